"""Tracking with MLflow: the only file that imports it.

One worker thread writes everything from a queue: importing MLflow and creating its store takes
seconds, a batch of metrics milliseconds, and training waits for neither.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_env.errors import ConfigError, TrackingError
from gspo_env.tracking.base import MODEL, RunInfo, Status

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_log = logging.getLogger(__name__)

# MLflow's limits (mlflow.utils.validation).
_MAX_PARAM_VALUE = 6000
_MAX_TAG_VALUE = 8000
_MAX_KEY = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000
_KEY_REFUSED = re.compile(r"[^\w\-. /]")

_PATIENCE = 60.0
"""Seconds that `finish` waits for a store that does not open, or spends on calls that fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MLflow:
    """Records in MLflow."""

    experiment: str = "gspo_env"
    """The experiment that the run belongs to; created if it does not exist."""
    run_name: str = ""
    """Name of the run; empty is the name of its folder."""
    tracking_uri: str = ""
    """The store; empty is MLflow's default: `MLFLOW_TRACKING_URI`, else ./mlflow.db."""
    log_model: bool = True
    """Whether the trained model's files become artifacts of the run."""

    def __post_init__(self) -> None:
        """Refuses an experiment without a name."""
        if not self.experiment.strip():
            raise ConfigError(
                f"tracker.experiment is {self.experiment!r}; expected a name, such as 'gspo_env'"
            )

    def start(self, run: RunInfo) -> MLflowTracker:
        """Starts the run and opens the store in the background.

        A run that resumes is open when this returns, so that its children find its id.

        Raises:
            TrackingError: The store of a run that resumes does not open.
        """
        tracker = MLflowTracker(self, run)
        if run.resume:
            tracker.wait()
        return tracker


@dataclass(slots=True)
class _Run:
    """The run as the worker thread sees it."""

    client: MlflowClient
    run_id: str
    experiment_id: str
    resumed: bool = False


_Job = Callable[[_Run], None]


class MLflowTracker:
    """One MLflow run. Calls queue their work and return.

    The first error in the worker is logged at once, and `finish` raises all of them.
    """

    def __init__(self, settings: MLflow, info: RunInfo) -> None:
        """Starts the worker, which opens the store."""
        self._settings, self._info = settings, info
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._finishing = threading.Event()
        self._run: _Run | None = None
        self._errors: list[str] = []
        # A daemon, so that a store that hangs cannot keep a dying process alive.
        self._worker = threading.Thread(target=self._work, name="gspo-tracking", daemon=True)
        self._worker.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records metrics of a step."""
        now = int(time.time() * 1000)
        self._jobs.put(lambda run: _log_metrics(run, metrics, step, now))

    def text(self, name: str, text: str) -> None:
        """Stores `text` as the artifact `name`, such as "episodes/step-10.txt"."""
        self._jobs.put(lambda run: run.client.log_text(run.run_id, text, name))

    def artifact(self, path: Path, folder: str = "") -> None:
        """Stores a file or the files of a folder under the artifact folder `folder`."""
        if folder == MODEL and not self._settings.log_model:
            return
        path = path.absolute()

        def job(run: _Run) -> None:
            log = run.client.log_artifacts if path.is_dir() else run.client.log_artifact
            log(run.run_id, str(path), folder or None)

        self._jobs.put(job)

    def finish(self, status: Status = "FINISHED") -> None:
        """Writes what is queued and ends the run.

        Raises:
            TrackingError: Something was not recorded.
        """
        self._jobs.put(lambda run: run.client.set_terminated(run.run_id, status))
        self._jobs.put(None)
        self._finishing.set()
        if self._answers():
            self._worker.join()
        if self._errors:
            raise TrackingError(self._errors)

    def wait(self) -> str:
        """Waits until the store is open; returns the id of the run.

        Raises:
            TrackingError: It does not open.
        """
        if not self._answers() or self._run is None:
            raise TrackingError(self._errors)
        return self._run.run_id

    @property
    def id(self) -> str:
        """Id of the run; empty until the store is open."""
        return "" if self._run is None else self._run.run_id

    @property
    def how_to_look(self) -> str:
        """Returns the run's page on a tracking server, or the command that shows a local store."""
        uri = self._uri
        if not uri:
            return "mlflow ui"
        if not uri.startswith(("http://", "https://")):
            return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        if self._run is None:
            return uri
        place = f"experiments/{self._run.experiment_id}/runs/{self._run.run_id}"
        return f"{uri.rstrip('/')}/#/{place}"

    @property
    def _uri(self) -> str:
        return self._settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def _answers(self) -> bool:
        """Waits until the store is open or has failed; False if neither happens."""
        known = self._ready.wait(_PATIENCE)
        if not known:
            self._fail(f"start: the store {self._uri!r} does not answer")
        return known

    def _work(self) -> None:
        """Opens the store, then does the jobs until None comes; runs in the worker thread."""
        try:
            self._run = _open_run(self._settings, self._info)
            if not self._run.resumed:  # a run's parameters cannot change
                _describe(self._run, self._info)
        except Exception as error:
            self._fail(f"start: {_line(error)}")
        finally:
            self._ready.set()
        wasted = 0.0
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            if self._run is None or wasted > _PATIENCE:
                self._errors.append("the store is not reachable")
                continue
            try:
                job(self._run)
            except Exception as error:
                self._fail(_line(error))
                if self._finishing.is_set():
                    wasted += time.monotonic() - began

    def _fail(self, message: str) -> None:
        if not self._errors:
            _log.error("MLflow cannot record everything, the run continues: %s", message)
        self._errors.append(message)


def _open_run(settings: MLflow, info: RunInfo) -> _Run:
    """Imports MLflow, opens the store and makes the run, or resumes the one noted in the folder."""
    from mlflow.tracking import MlflowClient
    from mlflow.tracking.context.registry import resolve_tags

    # Creating the store logs each of its tables' migrations.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=settings.tracking_uri or None)
    experiment_id = _experiment_id(client, settings.experiment)
    known = (info.resume.get("mlflow") or _noted(info.folder)) if info.resume else ""
    if known and _resume(client, known):
        return _Run(client=client, run_id=known, experiment_id=experiment_id, resumed=True)
    tags = dict(info.tags)
    if info.parent is not None and (parent := _noted(info.parent)):
        tags["mlflow.parentRunId"] = parent
    tags = {_key(name): str(value)[:_MAX_TAG_VALUE] for name, value in tags.items()}
    named = info.name if info.parent else settings.run_name or info.name
    made = client.create_run(experiment_id, run_name=named or None, tags=resolve_tags(tags))
    return _Run(client=client, run_id=made.info.run_id, experiment_id=experiment_id)


def _describe(run: _Run, info: RunInfo) -> None:
    """Notes the run's id in its folder and logs its parameters."""
    from mlflow.entities import Param

    _note(info.folder).write_text(json.dumps({"run_id": run.run_id}))
    values = {_key(name): _cut(str(value)) for name, value in info.params.items()}
    params = [Param(name, value) for name, value in values.items()]
    for start in range(0, len(params), _PARAMS_PER_BATCH):
        run.client.log_batch(run.run_id, params=params[start : start + _PARAMS_PER_BATCH])


def _note(folder: Path) -> Path:
    return folder / "mlflow.json"


def _noted(folder: Path) -> str:
    """Returns the id of the run that was recorded for a folder, empty if there is none."""
    return str(json.loads(_note(folder).read_text())["run_id"]) if _note(folder).exists() else ""


def _resume(client: MlflowClient, run_id: str) -> bool:
    """Sets a run to running again; False if the store does not have it."""
    from mlflow.exceptions import MlflowException

    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException:
        return False
    return True


def _experiment_id(client: MlflowClient, name: str) -> str:
    """Finds the experiment or makes it."""
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


def _log_metrics(run: _Run, values: Mapping[str, float], step: int, timestamp_ms: int) -> None:
    from mlflow.entities import Metric

    metrics = [Metric(_key(name), value, timestamp_ms, step) for name, value in values.items()]
    for start in range(0, len(metrics), _METRICS_PER_BATCH):
        run.client.log_batch(run.run_id, metrics=metrics[start : start + _METRICS_PER_BATCH])


def _cut(text: str) -> str:
    """Cuts a parameter's value to MLflow's limit, visibly."""
    return text if len(text) <= _MAX_PARAM_VALUE else text[: _MAX_PARAM_VALUE - 1] + "…"


def _key(name: str) -> str:
    """Makes `name` a key that MLflow accepts."""
    return _KEY_REFUSED.sub("_", name)[:_MAX_KEY]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
