"""Tracking with MLflow: the only file that imports it.

Everything is written by one worker thread behind a queue: importing MLflow and creating its
store takes seconds, a batch of metrics milliseconds, and training waits for neither.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from dataclasses import fields as fields_of
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from gspo_env.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.tracking import MlflowClient

_log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]

# MLflow's limits (mlflow.utils.validation).
_MAX_PARAM_VALUE = 6000
_MAX_TAG_VALUE = 8000
_MAX_KEY = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000
_KEY_REFUSED = re.compile(r"[^\w\-. /]")

NON_FINITE = "tracking/non_finite"
"""The metric that counts the NaN and infinite values that were dropped at a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Where and what to record."""

    experiment: str = "gspo_env"
    """The MLflow experiment that the run belongs to; made where it does not exist."""
    run_name: str = ""
    """The name of the run; empty lets MLflow make one up."""
    tracking_uri: str = ""
    """The store; empty is MLflow's default: `MLFLOW_TRACKING_URI`, else ./mlflow.db."""
    log_model: bool = True
    """Whether the trained model's files become artifacts of the run."""
    enabled: bool = True
    """False records nothing."""

    def __post_init__(self) -> None:
        """Refuse an experiment without a name."""
        if not self.experiment.strip():
            raise ConfigError(
                f"tracking.experiment is {self.experiment!r}; expected a name, such as 'gspo_env'"
            )


@dataclass(slots=True)
class _Run:
    """The run as the worker thread sees it."""

    client: MlflowClient
    run_id: str
    experiment_id: str


_Job = Callable[[_Run], None]


class Tracker:
    """One MLflow run, as a context manager that ends it as FINISHED, FAILED or KILLED.

    Calls queue their work and return; what goes wrong in the worker is logged at once and raised
    by `finish`, so that a run never looks recorded when it is not.

    Example:
        with Tracker(TrackingConfig(run_name="first")) as tracker:
            tracker.start({"learner": {"learning_rate": 1e-5}})
            tracker.log({"train/loss": 0.1}, step=1)
    """

    def __init__(self, config: TrackingConfig | None = None) -> None:
        """Open nothing yet: `start` does."""
        self.config = TrackingConfig() if config is None else config
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._worker: threading.Thread | None = None
        self._run: _Run | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Tracker:
        """Return itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the run; an exception of the caller's is never hidden by one of tracking."""
        if exc_type is None:
            self.finish()
            return
        try:
            self.finish("KILLED" if issubclass(exc_type, KeyboardInterrupt) else "FAILED")
        except Exception:
            _log.exception("tracking failed too")

    def start(
        self, params: Mapping[str, Any] | object = None, tags: Mapping[str, str] | None = None
    ) -> None:
        """Begin the run; returns at once and opens the store in the background.

        Args:
            params: Nested mappings or dataclasses; logged flat, as `learner.learning_rate`.
            tags: Tags of the run, beside MLflow's own (user, source, git commit).
        """
        if not self.config.enabled:
            return
        if self._worker is not None:
            raise RuntimeError("Tracker.start was called twice; make a new Tracker for a new run")
        # Flattened here, since the caller may change its mappings before the worker gets to them.
        flat = dict(_flatten({} if params is None else params))
        wanted = {_key(name): str(value)[:_MAX_TAG_VALUE] for name, value in (tags or {}).items()}
        # A daemon, so that a store that hangs cannot keep a dying process alive.
        self._worker = threading.Thread(
            target=self._work, args=(flat, wanted), name="gspo-tracking", daemon=True
        )
        self._worker.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step; non-finite values are dropped, counted and reported."""
        if self._worker is None:
            return
        values = {name: float(value) for name, value in metrics.items()}
        dropped = [name for name, value in values.items() if not math.isfinite(value)]
        for name in dropped:
            _log.warning("step %d: metric %s is %s; not recorded", step, name, values.pop(name))
        if dropped:
            values[NON_FINITE] = float(len(dropped))
        now = int(time.time() * 1000)
        self._jobs.put(lambda run: _log_metrics(run, values, step, now))

    def text(self, name: str, text: str) -> None:
        """Store `text` as the artifact `name`, such as "episodes/step-10.txt"."""
        self._put(lambda run: run.client.log_text(run.run_id, text, name))

    def figure(self, name: str, figure: Figure) -> None:
        """Store a Matplotlib figure as the artifact `name`; do not change it afterwards."""
        self._put(lambda run: run.client.log_figure(run.run_id, figure, name))

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """Store a file or a folder under the artifact folder `folder`; keep it until `finish`."""
        path = Path(path).absolute()

        def job(run: _Run) -> None:
            log = run.client.log_artifacts if path.is_dir() else run.client.log_artifact
            log(run.run_id, str(path), folder or None)

        self._put(job)

    def finish(self, status: Status = "FINISHED") -> None:
        """Write what is queued and end the run; the first call counts.

        Raises:
            Exception: What went wrong first in the worker, if anything did.
        """
        if self._worker is None:
            return
        self._put(lambda run: run.client.set_terminated(run.run_id, status))
        self._jobs.put(None)
        self._worker.join()
        self._worker = None
        if self._error is not None:
            raise self._error

    @property
    def run_id(self) -> str:
        """The id of the run, waiting for the store where it must; empty without tracking."""
        if self._worker is not None:
            self._ready.wait()
        if self._run is None and self._error is not None:
            raise self._error
        return "" if self._run is None else self._run.run_id

    @property
    def run_url(self) -> str:
        """The page of the run on a tracking server; empty for a local store."""
        uri = self._uri
        if not self.run_id or self._run is None or not uri.startswith(("http://", "https://")):
            return ""
        return f"{uri.rstrip('/')}/#/experiments/{self._run.experiment_id}/runs/{self.run_id}"

    @property
    def how_to_look(self) -> str:
        """The command, or the address, that shows the runs."""
        uri = self._uri
        if not self.config.enabled:
            return ""
        if not uri:
            return "mlflow ui"
        if uri.startswith(("http://", "https://")):
            return uri
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"

    @property
    def _uri(self) -> str:
        return self.config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def _put(self, job: _Job) -> None:
        if self._worker is not None:
            self._jobs.put(job)

    def _work(self, params: dict[str, str], tags: dict[str, str]) -> None:
        """Open the store, then do the jobs until None comes; runs in the worker thread."""
        try:
            self._run = _open_run(self.config, tags)
        except Exception as error:
            self._fail(error, "MLflow's store cannot be opened; nothing is recorded")
        finally:
            self._ready.set()
        if self._run is not None:
            self._do(lambda run: _log_params(run, params))
        while (job := self._jobs.get()) is not None:
            self._do(job)

    def _do(self, job: _Job) -> None:
        if self._run is None:
            return
        try:
            job(self._run)
        except Exception as error:
            self._fail(error, "MLflow could not record something")

    def _fail(self, error: Exception, message: str) -> None:
        _log.error("%s: %s: %s", message, type(error).__name__, error)
        if self._error is None:
            self._error = error


class ParentRun:
    """One MLflow run with a nested child for each run of a comparison, as a context manager.

    What was recorded is noted in `mlflow.json` in the folder, so that a comparison that is resumed
    goes on in the same runs.
    """

    def __init__(self, config: TrackingConfig, folder: Path) -> None:
        """Open nothing yet: `start` does."""
        self.config = config
        self._note = folder / "mlflow.json"
        self._run: _Run | None = None
        self._children: dict[str, str] = {}

    def __enter__(self) -> ParentRun:
        """Return itself."""
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        """End the parent as FINISHED, FAILED or KILLED."""
        if self._run is not None:
            killed = exc_type is not None and issubclass(exc_type, KeyboardInterrupt)
            status = "FINISHED" if exc_type is None else "KILLED" if killed else "FAILED"
            self._run.client.set_terminated(self._run.run_id, status)

    def start(self, params: Mapping[str, Any]) -> None:
        """Begin the parent, or go on in the one that the folder's note names."""
        if not self.config.enabled:
            return
        known = self._known()
        self._run = _open_run(self.config, {"gspo_env.kind": "comparison"}, known)
        if self._run.run_id != known:  # a run's parameters cannot change
            _log_params(self._run, dict(_flatten(params)))
        self._save()

    def child(
        self,
        name: str,
        params: Mapping[str, Any] | object,
        history: Sequence[tuple[int, dict[str, float]]],
        error: str = "",
    ) -> None:
        """Record a run under the parent, once."""
        if self._run is None or name in self._children:
            return
        tags = {"mlflow.parentRunId": self._run.run_id, **({"error": error} if error else {})}
        named = replace(self.config, run_name=name)
        child = _open_run(named, {k: v[:_MAX_TAG_VALUE] for k, v in tags.items()})
        _log_params(child, dict(_flatten(params)))
        for step, metrics in history:
            finite = {k: v for k, v in metrics.items() if math.isfinite(v)}
            _log_metrics(child, finite, step, int(time.time() * 1000))
        child.client.set_terminated(child.run_id, "FAILED" if error else "FINISHED")
        self._children[name] = child.run_id
        self._save()

    def artifact(self, path: Path) -> None:
        """Store a file with the parent."""
        if self._run is not None:
            self._run.client.log_artifact(self._run.run_id, str(path))

    def _known(self) -> str:
        if not self._note.exists():
            return ""
        kept = json.loads(self._note.read_text())
        self._children = kept["children"]
        return str(kept["parent"])

    def _save(self) -> None:
        if self._run is not None:
            kept = {"parent": self._run.run_id, "children": self._children}
            self._note.write_text(json.dumps(kept, indent=1))


def _open_run(config: TrackingConfig, tags: dict[str, str], known: str = "") -> _Run:
    """Import MLflow, open the store and make the run, or go on in a known one."""
    from mlflow.tracking import MlflowClient
    from mlflow.tracking.context.registry import resolve_tags

    # Creating the store reports each of its tables' migrations.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=config.tracking_uri or None)
    experiment_id = _experiment_id(client, config.experiment)
    if known and _resume(client, known):
        return _Run(client=client, run_id=known, experiment_id=experiment_id)
    run = client.create_run(
        experiment_id, run_name=config.run_name or None, tags=resolve_tags(tags)
    )
    return _Run(client=client, run_id=run.info.run_id, experiment_id=experiment_id)


def _resume(client: MlflowClient, run_id: str) -> bool:
    """Whether the store has that run; it is running again then."""
    from mlflow.exceptions import MlflowException

    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException:
        return False
    return True


def _experiment_id(client: MlflowClient, name: str) -> str:
    """Find the experiment or make it."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            # Another process may have made it in the meantime.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return str(experiment.experiment_id)


def _log_metrics(run: _Run, values: dict[str, float], step: int, timestamp_ms: int) -> None:
    from mlflow.entities import Metric

    metrics = [Metric(_key(name), value, timestamp_ms, step) for name, value in values.items()]
    for start in range(0, len(metrics), _METRICS_PER_BATCH):
        run.client.log_batch(run.run_id, metrics=metrics[start : start + _METRICS_PER_BATCH])


def _log_params(run: _Run, values: dict[str, str]) -> None:
    from mlflow.entities import Param

    params = [Param(name, value) for name, value in values.items()]
    for start in range(0, len(params), _PARAMS_PER_BATCH):
        run.client.log_batch(run.run_id, params=params[start : start + _PARAMS_PER_BATCH])


def _flatten(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for each leaf of nested mappings and dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields_of(value)}
    if isinstance(value, Mapping) and (value or not prefix):
        for name, child in value.items():
            yield from _flatten(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield _key(prefix), _cut(str(value.value if isinstance(value, Enum) else value))


def _cut(text: str) -> str:
    """Cut a parameter's value to MLflow's limit, visibly."""
    return text if len(text) <= _MAX_PARAM_VALUE else text[: _MAX_PARAM_VALUE - 1] + "…"


def _key(name: str) -> str:
    """Make `name` a key that MLflow takes."""
    return _KEY_REFUSED.sub("_", name)[:_MAX_KEY]
