"""Tracking with MLflow: the only file that imports it, besides `mlflow_traces` and `mlflow_ids`.

Every call is idempotent: a run is found again by its key, MLflow's database keeps a metric of the
same name, step, time and value once, and the id of a trace is derived from the run's and its own
key.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPException
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import SplitResult, unquote, urlsplit

from annotated_types import Ge

from gspo_env.errors import ConfigError, OutputError, TrackingError
from gspo_env.redaction import TerminalFormatter, redact_text
from gspo_env.registry import load_function
from gspo_env.runtime.futures import run_in_daemon
from gspo_env.settings import settings
from gspo_env.tracking.base import MODEL, SUMMARY, Input, Point, RunInfo, Status
from gspo_env.tracking.jsonl import Received
from gspo_env.tracking.mlflow_traces import TraceWriter
from gspo_env.tracking.traces import Trace

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

# MLflow's limits (mlflow.utils.validation).
_MAX_PARAM_VALUE = 6000
_MAX_TAG_VALUE = 8000
_MAX_KEY = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000
_MAX_INPUT_NAME = 500
_MAX_INPUT_SOURCE = 65_535
_RUN_FOLDER = re.compile(r"[/\\][0-9a-f]{32}[/\\]artifacts[/\\]?\Z")
_KEY_REFUSED = re.compile(r"[^\w\-. /]|^/|/(?=/|\Z)|(?<![^/])\.{1,2}(?=/|\Z)|\A\Z")

_KEY_TAG = "gspo_env.key"
_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of a new experiment: it holds trainings, not traces of an application."""
_VIEW = "workflowType=machine_learning"
"""Opens the pages for training; MLflow 3 opens those for applications by default."""
_FIRST = {"eval/success": "Success/evaluation", "rollout/success": "Success/training"}
"""Metrics with a second name, with which MLflow's charts, sorted by name, begin."""
_RESULT = re.compile("/(success|outcome|return|reward)|^Success/")
"""Metrics that are recorded even if always 0; most others count faults that never happen."""
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow's settings, unless they are set. Its own limits, 120 s and 7 retries of a request, let one
call take minutes; its telemetry reports to its makers."""
_REFUSALS = {"BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_ALREADY_EXISTS"}
"""MLflow's errors that a repetition does not change."""
GONE = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}
"""MLflow's errors for a run that does not exist, or was deleted."""
TIMEOUT = 5.0
"""Seconds that a server has to answer before training."""
_OTHER_KINDS = ("postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc")


@settings
class MLflow:
    """Records in MLflow."""

    experiment: str = ""
    """The experiment that the run belongs to, created if it does not exist; by default
    `MLFLOW_EXPERIMENT_NAME` or `MLFLOW_EXPERIMENT_ID`, else gspo_env."""
    run_name: str = ""
    """Name of the run; by default that of its folder."""
    tracking_uri: str = ""
    """The store; by default `MLFLOW_TRACKING_URI`, else ./mlflow.db."""
    log_model: bool = True
    """Whether the trained model becomes an artifact of the run. A store on the same disk gets hard
    links instead of a copy."""
    register: str = ""
    """Name of a registered model, of which the trained model becomes a new version."""
    traces: Annotated[int, Ge(0)] = 1
    """Minimum number of episodes of each evaluation, sampled and greedy, that become traces; a run
    sends more while they cost less than 0.2 % of its time."""
    train_traces: Annotated[int, Ge(0)] = 0
    """Minimum number of episodes of each training step that become traces. With 0 here and in
    `traces`, there are none."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if self.register and not self.log_model:
            raise ConfigError(
                f"tracker.register is {self.register!r} and tracker.log_model is false; expected "
                "true, since only a model in the store can be registered"
            )
        if self.register and (not self.register.strip() or set(self.register) & set("/:")):
            raise ConfigError(
                f"tracker.register is {self.register!r}; expected a name without / and :"
            )

    @property
    def address(self) -> str:
        """The store; empty is ./mlflow.db."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def check(self) -> None:
        """Tries the store.

        Raises:
            ConfigError: It does not answer, cannot be written, is of no kind that MLflow knows, or
                lacks an id that the environment names.
        """
        if problem := _address_problem(self.address):
            name = "tracker.tracking_uri" if self.tracking_uri else "MLFLOW_TRACKING_URI"
            address = f"{name} is {redact_text(self.address)!r}"
            raise ConfigError(
                f"{address if self.address else 'runs are tracked in ./mlflow.db'}, {problem}; "
                "name a store that works with --tracker.tracking-uri, or train with --tracker none"
            )
        if os.environ.keys() & {"MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"}:
            load_function("gspo_env.tracking.mlflow_ids:check_ids", "id")(self)

    def start(self, run: RunInfo) -> MLflowTracker:
        """Returns the tracker; `MLflowTracker.open` starts the run, which takes seconds."""
        return MLflowTracker(self, run)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """An open run."""

    client: MlflowClient
    run_id: str
    experiment_id: str
    artifacts: str
    """Address of its artifacts."""
    traces: TraceWriter
    metrics: set[str]
    """Names of the metrics that it has."""
    zeros: dict[str, list[Metric]] = field(default_factory=dict)
    """The first and the last point of each metric that has been 0 so far."""


class MLflowTracker:
    """One MLflow run; see `gspo_env.tracking.base.Repeatable`."""

    def __init__(self, settings: MLflow, info: RunInfo) -> None:
        self._settings, self._info = settings, info
        self._run: _Run | None = None
        self._may_exist = bool(info.resume)

    def open(self) -> str:
        """Opens the store and creates or resumes the run."""
        if self._run is None:
            may_exist, self._may_exist = self._may_exist, True
            self._run = _open_run(self._settings, self._info, search=may_exist)
        return self._run.run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Is never called: `log_points` is."""
        raise NotImplementedError

    def log_points(self, points: Sequence[Point]) -> None:
        """Records points, many in a request."""
        from mlflow.entities import Metric

        run = self._opened
        metrics = []
        for point in points:
            first = {_FIRST[name]: value for name, value in point.metrics.items() if name in _FIRST}
            for name, value in {**first, **point.metrics}.items():
                metric = Metric(_key(name), value, point.time, point.step)
                if value or name in run.metrics or _RESULT.search(name):
                    metrics += [*run.zeros.pop(name, ()), metric]
                    run.metrics.add(name)
                else:
                    run.zeros.setdefault(name, [])[1:] = [metric]
        for start in range(0, len(metrics), _METRICS_PER_BATCH):
            run.client.log_batch(run.run_id, metrics=metrics[start : start + _METRICS_PER_BATCH])

    def text(self, name: str, text: str) -> None:
        """Stores `text` as the artifact `name`; the summary becomes the description of the run."""
        run = self._opened
        if name == SUMMARY:
            run.client.set_tag(run.run_id, "mlflow.note.content", text[:_MAX_TAG_VALUE])
        run.client.log_text(run.run_id, text, name)

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
        """Records traces, many in a request; a repeated trace replaces the first."""
        try:
            self._opened.traces.write(traces)
        except NotImplementedError as error:  # a store of plain files
            raise NotImplementedError(
                "this store keeps no traces; expected an SQLite file or a server, or "
                "--tracker.traces 0"
            ) from error

    def finish(self, status: Status, reason: str) -> None:
        """Ends the run; the tag `error` says why it failed."""
        run = self._opened
        if reason:
            run.client.set_tag(run.run_id, "error", reason[:_MAX_TAG_VALUE])
        run.client.set_terminated(run.run_id, status)

    def is_transient(self, error: Exception) -> bool:
        """Returns whether a call that raised this error may succeed later.

        A full or locked store, a broken server and an expired login may recover; what the store
        refuses, and a missing file, may not.
        """
        from mlflow.exceptions import MlflowException

        if isinstance(error, MlflowException):
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                self._run = None  # the store was replaced; `open` searches it for the run
            return error.error_code not in _REFUSALS
        status = getattr(getattr(error, "response", None), "status_code", 500)
        files = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
        final = (*files, NotImplementedError, OutputError, TypeError, UnicodeError)
        return not isinstance(error, final) and (status >= 500 or status in (401, 403, 408, 429))

    @property
    def how_to_look(self) -> str:
        """Returns the address of the run, and the command that shows a local store."""
        uri, command = self._settings.address, ""
        if not uri.startswith(("http://", "https://")):
            command = f"mlflow ui{f' --backend-store-uri {shlex.quote(uri)}' if uri else ''}"
            uri = "http://127.0.0.1:5000"
        if self._run is None:
            return command or uri
        place = f"experiments/{self._run.experiment_id}/runs/{self._run.run_id}"
        address = f"{uri.rstrip('/')}/#/{place}?{_VIEW}"
        return f"{command}, then {address}" if command else address

    @property
    def _opened(self) -> _Run:
        if self._run is None:
            raise TrackingError("the store is not open")
        return self._run


def open_client(settings: MLflow) -> MlflowClient:
    """Opens the store."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    # Creating the store logs each of its tables' migrations, a full disk a traceback for each call.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    for handler in logging.getLogger("mlflow").handlers:  # it shows what a server sends
        handler.setFormatter(TerminalFormatter("%(levelname)s %(message)s"))
    return MlflowClient(tracking_uri=settings.tracking_uri or None)


def _open_run(settings: MLflow, info: RunInfo, *, search: bool) -> _Run:
    """Opens the store and resumes the run, or creates it.

    Args:
        settings: The tracker's settings.
        info: The run.
        search: Whether the run may exist although its id is not known.
    """
    client = open_client(settings)
    experiment_id = _experiment_id(client, settings.experiment)
    run_id = info.resume.get("mlflow", "")
    if search and not run_id:
        runs = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{info.key}'")
        if runs:
            run_id = runs[0].info.run_id
            _log_params(client, run_id, info)  # they may be missing
    if not run_id or not _resume(client, run_id, info.key):
        run_id = _create_run(client, experiment_id, settings, info)
        _log_params(client, run_id, info)
    run = client.get_run(run_id)
    artifacts = str(run.info.artifact_uri)
    if urlsplit(artifacts).scheme in ("", "file") and not _RUN_FOLDER.search(artifacts):
        raise OutputError(  # what is there would be overwritten
            f"the store keeps the run's files in {artifacts!r}; expected a folder RUN_ID/artifacts"
        )
    return _Run(
        client=client,
        run_id=run_id,
        experiment_id=run.info.experiment_id,
        artifacts=artifacts,
        traces=TraceWriter(client, run.info.experiment_id, run_id, info.key),
        metrics=set(run.data.metrics),
    )


def _create_run(client: MlflowClient, experiment_id: str, settings: MLflow, info: RunInfo) -> str:
    """Creates the run, or takes the one of `MLFLOW_RUN_ID` if no other training has it."""
    from mlflow.entities import RunTag
    from mlflow.tracking.context.registry import resolve_tags

    tags = {**info.tags, _KEY_TAG: info.key, "folder": str(info.folder.absolute())}
    if info.parent is not None:
        tags["mlflow.parentRunId"] = Received.load(info.parent, "mlflow").id
        if not tags["mlflow.parentRunId"]:
            raise TrackingError("the run of the comparison has not begun yet")
    tags = {_key(name): str(value)[:_MAX_TAG_VALUE] for name, value in tags.items()}
    run_id = "" if info.parent else os.environ.get("MLFLOW_RUN_ID", "")
    if run_id and _resume(client, run_id, info.key):
        client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags.items()])
        return run_id
    run = client.create_run(
        experiment_id,
        start_time=int(info.started * 1000),
        run_name=(info.name if info.parent else settings.run_name or info.name) or None,
        tags=resolve_tags(tags),
    )
    return str(run.info.run_id)


def _log_params(client: MlflowClient, run_id: str, info: RunInfo) -> None:
    from mlflow.entities import Param

    values = {_key(name): _cut(str(value)) for name, value in info.params.items()}
    params = [Param(name, value) for name, value in values.items()]
    for start in range(0, len(params), _PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params[start : start + _PARAMS_PER_BATCH])


def _resume(client: MlflowClient, run_id: str, key: str) -> bool:
    """Sets a run to running again; False if the store lacks it, or it is another training's."""
    from mlflow.exceptions import MlflowException

    try:
        if client.get_run(run_id).data.tags.get(_KEY_TAG, key) != key:
            return False
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code in GONE:
            return False
        raise
    return True


def _register(run: _Run, name: str) -> None:
    """Adds the model of a run as a version of a registered model, once."""
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
    parts = urlsplit(address)
    if parts.scheme not in ("", "file") or not path.is_dir():
        return False
    target = Path(unquote(parts.path) if parts.scheme else address, folder)
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(path, target, copy_function=os.link)
    except OSError:  # another disk, or one without links: `log_artifacts` copies
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def _experiment_id(client: MlflowClient, name: str) -> str:
    name = name.strip() or os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
    if not name and (experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID", "")):
        return experiment_id
    name = name or "gspo_env"
    stored = client.get_experiment_by_name(name)
    return str(stored.experiment_id if stored else client.create_experiment(name, tags=_KIND))


def _cut(text: str) -> str:
    """Cuts a parameter's value to MLflow's limit, visibly."""
    return text if len(text) <= _MAX_PARAM_VALUE else text[: _MAX_PARAM_VALUE - 1] + "…"


def _key(name: str) -> str:
    """Turns a name into a key that MLflow accepts."""
    return _KEY_REFUSED.sub("_", name[:_MAX_KEY])


def _address_problem(uri: str) -> str:
    """Returns why an address cannot be used; empty if it can."""
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018 - a port that is no number raises
    except ValueError as error:
        return f"which is no address ({error})"
    kind = parts.scheme.partition("+")[0]
    if kind in ("http", "https"):
        return _server_problem(parts)
    if not uri and any(Path("mlruns").glob("[0-9]*/meta.yaml")):
        kind, uri = "file", "mlruns"  # MLflow's default where an old store exists
    if kind == "sqlite" or not uri:
        return _sqlite_problem(uri)
    if kind in ("", "file"):
        return _folder_problem(uri)
    plugins = (entry.name for entry in entry_points(group="mlflow.tracking_store"))
    if kind in (*_OTHER_KINDS, *plugins):
        return ""
    kinds = ", ".join(("http", "https", "sqlite", "file", *_OTHER_KINDS))
    return f"of the kind {kind!r}; expected one of: {kinds}"


def _server_problem(parts: SplitResult) -> str:
    host = parts.netloc.rpartition("@")[2]
    try:
        _ask(f"{parts.scheme}://{host}{parts.path.rstrip('/')}/health")
    except urllib.error.HTTPError as error:
        return f"which answers with the error {error.code}"
    except (OSError, ValueError, HTTPException) as error:  # it may speak no HTTP
        return f"which does not answer ({getattr(error, 'reason', error)})"
    return ""


@cache
def _ask(url: str) -> None:
    """Asks a tracking server for its health, once if it answers; a server error is no answer."""

    def ask() -> None:
        urllib.request.urlopen(url, timeout=TIMEOUT).close()

    try:
        # A server that sends a byte now and then would keep a socket with a timeout for hours.
        run_in_daemon(ask, "mlflow").result(TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise
    except TimeoutError:
        raise TimeoutError(f"no answer within {TIMEOUT:.0f} seconds") from None
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # MLflow has its own certificates
            raise


def _sqlite_problem(uri: str) -> str:
    """Tries to write to an SQLite file and beside it."""
    name = unquote(uri.partition("///")[2].partition("?")[0]) if uri else "mlflow.db"
    if name in ("", ":memory:"):
        return ""
    path = Path(name).absolute()
    if not path.parent.exists():
        return f"and there is no folder {str(path.parent)!r}"
    try:
        if path.exists():
            path.open("r+b").close()
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return f"which cannot be written ({error.strerror}: {str(path)!r})"
    return ""


def _folder_problem(uri: str) -> str:
    """A store of plain files, which MLflow has deprecated."""
    if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1"):
        return ""
    return (
        f"a store of plain files ({uri!r}), which MLflow no longer writes unless "
        "MLFLOW_ALLOW_FILE_STORE is true"
    )
