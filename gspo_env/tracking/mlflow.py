"""Tracking with MLflow: the only file that imports it, but for `mlflow_traces.py`.

Every call can be repeated: a run is found again by its key, MLflow's database keeps a metric of the
same name, step, time and value once, and the id of a trace is made of the run's and its own key.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from gspo_env.errors import ConfigError, OutputError, TrackingError
from gspo_env.tracking.address import check_address
from gspo_env.tracking.base import MODEL, Input, Point, RunInfo, Status
from gspo_env.tracking.delivery import Cursor
from gspo_env.tracking.mlflow_traces import TraceWriter
from gspo_env.tracking.traces import Trace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# MLflow's limits (mlflow.utils.validation).
_MAX_PARAM_VALUE = 6000
_MAX_TAG_VALUE = 8000
_MAX_KEY = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000
_MAX_INPUT_NAME = 500
_MAX_INPUT_SOURCE = 65_535
_KEY_REFUSED = re.compile(r"[^\w\-. /]")

_KEY_TAG = "gspo_env.key"
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow's settings, unless they are set. With its own limits of a request, 120 s and 7 retries,
one call can take minutes; its telemetry reports to its makers."""
_REFUSALS = {"BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_ALREADY_EXISTS"}
"""MLflow's errors that a repetition does not change."""
_GONE = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}
"""MLflow's errors for a run that does not exist, or was deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MLflow:
    """Records in MLflow."""

    experiment: str = "gspo_env"
    """The experiment that the run belongs to; created if it does not exist."""
    run_name: str = ""
    """Name of the run; empty is two words and the name of the run's folder."""
    tracking_uri: str = ""
    """The store; empty is MLflow's default: `MLFLOW_TRACKING_URI`, else ./mlflow.db."""
    log_model: bool = True
    """Whether the trained model's files become artifacts of the run. A store on the same disk gets
    links to them, no copies."""
    register: str = ""
    """Name of a registered model, of which the trained model becomes a new version."""
    traces: int = 1
    """Episodes of each evaluation, sampled and greedy, that become traces at least. More of those
    that the run keeps do while sending them computes less than 0.2 % of its time."""
    train_traces: int = 0
    """Episodes of each training step that become traces at least. With 0 here and in `traces`,
    none do."""

    def __post_init__(self) -> None:
        """Refuses an experiment without a name, and a model to register that is not logged."""
        for name in ("traces", "train_traces"):
            if (count := getattr(self, name)) < 0:
                raise ConfigError(f"tracker.{name} is {count}; expected 0 or more")
        if self.register and not self.log_model:
            raise ConfigError(
                f"tracker.register is {self.register!r} and tracker.log_model is false; expected "
                "true, since only a model in the store can be registered"
            )
        if self.register and (not self.register.strip() or set(self.register) & set("/:")):
            raise ConfigError(
                f"tracker.register is {self.register!r}; expected a name without / and :"
            )
        if not self.experiment.strip():
            raise ConfigError(
                f"tracker.experiment is {self.experiment!r}; expected a name, such as 'gspo_env'"
            )

    @property
    def address(self) -> str:
        """The store; empty is ./mlflow.db."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def check(self) -> None:
        """Tries the store.

        Raises:
            ConfigError: It does not answer, cannot be written, or is of no kind that MLflow knows.
        """
        name = "tracker.tracking_uri" if self.tracking_uri else "MLFLOW_TRACKING_URI"
        check_address(self.address, name)

    def start(self, run: RunInfo) -> MLflowTracker:
        """Tries the store; `MLflowTracker.open` starts the run, which takes seconds.

        Raises:
            ConfigError: See `check`.
        """
        self.check()
        return MLflowTracker(self, run)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """An open run."""

    client: MlflowClient
    run_id: str
    experiment_id: str
    artifacts: str
    """Address of its artifacts."""


class MLflowTracker:
    """One MLflow run; see `gspo_env.tracking.base.Repeatable`."""

    def __init__(self, settings: MLflow, info: RunInfo) -> None:
        self._settings, self._info = settings, info
        self._run: _Run | None = None
        self._writer: TraceWriter | None = None
        self._tried = bool(info.resume)

    def open(self) -> str:
        """Opens the store, if it is not open, and makes the run or goes on with it."""
        if self._run is None:
            tried, self._tried = self._tried, True
            self._run = run = _open_run(self._settings, self._info, self.id, search=tried)
            self._writer = TraceWriter(run.client, run.experiment_id, run.run_id, self._info.key)
        return self._run.run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Is not used: points have times."""
        raise NotImplementedError

    def log_points(self, points: Sequence[Point]) -> None:
        """Records points, many in a request."""
        from mlflow.entities import Metric

        run = self._opened
        metrics = [
            Metric(_key(name), value, point.time, point.step)
            for point in points
            for name, value in point.metrics.items()
        ]
        for start in range(0, len(metrics), _METRICS_PER_BATCH):
            run.client.log_batch(run.run_id, metrics=metrics[start : start + _METRICS_PER_BATCH])

    def text(self, name: str, text: str) -> None:
        """Stores `text` as the artifact `name`, such as "episodes/step-10.txt"."""
        self._opened.client.log_text(self._opened.run_id, text, name)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Stores a file or the files of a folder under the artifact folder `folder`."""
        if folder == MODEL and not self._settings.log_model:
            return
        run = self._opened
        if folder != MODEL or not _link(path, run.artifacts, folder):
            log = run.client.log_artifacts if path.is_dir() else run.client.log_artifact
            log(run.run_id, str(path), folder or None)
        if folder == MODEL and self._settings.register:
            _register(run, self._settings.register)

    def log_input(self, source: Input) -> None:
        """Records an input as a dataset; MLflow keeps one of this name and digest once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=source.name[:_MAX_INPUT_NAME],
            digest=source.digest,
            source_type="gspo_env",
            source=json.dumps(source.source, default=repr)[:_MAX_INPUT_SOURCE],
            profile=json.dumps(source.profile, default=repr),
        )
        tags = [InputTag("mlflow.data.context", source.context)]
        run = self._opened
        run.client.log_inputs(run.run_id, datasets=[DatasetInput(dataset, tags)])

    def log_traces(self, traces: Sequence[Trace]) -> None:
        """Records traces, many in a request; the same trace again replaces the first."""
        if self._writer is None:
            raise TrackingError("the store is not open")
        self._writer.write(traces)

    def finish(self, status: Status, reason: str) -> None:
        """Ends the run; the tag `error` says why it failed."""
        run = self._opened
        if reason:
            run.client.set_tag(run.run_id, "error", reason[:_MAX_TAG_VALUE])
        run.client.set_terminated(run.run_id, status)

    def passing(self, error: Exception) -> bool:
        """Returns whether a call that raised this error may succeed later.

        A store that is full or locked, a server that is away or broken and a login that expired
        may; what the store refuses, and a file that does not exist, may not.
        """
        from mlflow.exceptions import MlflowException

        if isinstance(error, MlflowException):
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                self._run = None  # the store is another one; `open` looks
            return error.error_code not in _REFUSALS
        status = getattr(getattr(error, "response", None), "status_code", 500)
        gone = isinstance(error, (FileNotFoundError, OutputError, UnicodeError))
        return not gone and (status >= 500 or status in (401, 403, 408, 429))

    @property
    def id(self) -> str:
        """Id of the run; empty until it is known."""
        return self._info.resume.get("mlflow", "") if self._run is None else self._run.run_id

    @property
    def how_to_look(self) -> str:
        """Returns the run's page on a tracking server, or the command that shows a local store."""
        uri = self._settings.address
        if not uri:
            return "mlflow ui"
        if not uri.startswith(("http://", "https://")):
            return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        if self._run is None:
            return uri
        place = f"experiments/{self._run.experiment_id}/runs/{self._run.run_id}"
        return f"{uri.rstrip('/')}/#/{place}"

    @property
    def _opened(self) -> _Run:
        if self._run is None:
            raise TrackingError("the store is not open")
        return self._run


def _open_run(settings: MLflow, info: RunInfo, run_id: str, *, search: bool) -> _Run:
    """Opens the store and goes on with the run, or makes it.

    Args:
        settings: The tracker's settings.
        info: The run.
        run_id: Id of the run that goes on; empty if it is not known.
        search: Whether the run may exist although its id is not known.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    # Creating the store logs each of its tables' migrations, a full disk a traceback for each call.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    client = MlflowClient(tracking_uri=settings.tracking_uri or None)
    experiment_id = _experiment_id(client, settings.experiment)
    if search and not run_id:
        found = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{info.key}'")
        run_id = found[0].info.run_id if found else ""
        if run_id:
            _log_params(client, run_id, info)  # they may be missing
    if not run_id or not _resume(client, run_id):
        run_id = _make_run(client, experiment_id, settings, info)
        _log_params(client, run_id, info)
    artifacts = str(client.get_run(run_id).info.artifact_uri)
    return _Run(client=client, run_id=run_id, experiment_id=experiment_id, artifacts=artifacts)


def _make_run(client: MlflowClient, experiment_id: str, settings: MLflow, info: RunInfo) -> str:
    from mlflow.tracking.context.registry import resolve_tags

    tags = {**info.tags, _KEY_TAG: info.key, "folder": str(info.folder.absolute())}
    if info.parent is not None:
        tags["mlflow.parentRunId"] = Cursor.read(info.parent, "mlflow").id
        if not tags["mlflow.parentRunId"]:
            raise TrackingError("the run of the comparison has not begun yet")
    tags = {_key(name): str(value)[:_MAX_TAG_VALUE] for name, value in tags.items()}
    named = info.name if info.parent else settings.run_name or info.name
    made = client.create_run(
        experiment_id,
        start_time=int(info.started * 1000),
        run_name=named or None,
        tags=resolve_tags(tags),
    )
    return str(made.info.run_id)


def _log_params(client: MlflowClient, run_id: str, info: RunInfo) -> None:
    from mlflow.entities import Param

    values = {_key(name): _cut(str(value)) for name, value in info.params.items()}
    params = [Param(name, value) for name, value in values.items()]
    for start in range(0, len(params), _PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params[start : start + _PARAMS_PER_BATCH])


def _resume(client: MlflowClient, run_id: str) -> bool:
    """Sets a run to running again; False if the store does not have it."""
    from mlflow.exceptions import MlflowException

    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code in _GONE:
            return False
        raise
    return True


def _register(run: _Run, name: str) -> None:
    """Makes the model of a run a version of a registered model, once."""
    from mlflow.exceptions import MlflowException

    client = run.client
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"run_id = '{run.run_id}'")
    if not any(version.name == name for version in versions):
        client.create_model_version(name, f"{run.artifacts.rstrip('/')}/{MODEL}", run.run_id)


def _link(path: Path, address: str, folder: str) -> bool:
    """Links the files of a folder into a store on the same disk; False if it is elsewhere."""
    place = urlsplit(address)
    if place.scheme not in ("", "file") or not path.is_dir():
        return False
    target = Path(unquote(place.path) if place.scheme else address, folder)
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(path, target, copy_function=os.link)
    except OSError:  # another disk, or one without links: `log_artifacts` copies
        shutil.rmtree(target, ignore_errors=True)
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


def _cut(text: str) -> str:
    """Cuts a parameter's value to MLflow's limit, visibly."""
    return text if len(text) <= _MAX_PARAM_VALUE else text[: _MAX_PARAM_VALUE - 1] + "…"


def _key(name: str) -> str:
    """Makes `name` a key that MLflow accepts."""
    return _KEY_REFUSED.sub("_", name)[:_MAX_KEY]
