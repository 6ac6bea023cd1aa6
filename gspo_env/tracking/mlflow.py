"""Tracking with MLflow: the only file that imports it.

Every call is idempotent: MLflow's database keeps a metric of the same name, step, time and value
once, and the id of a trace is derived from the run's and its own key.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

from annotated_types import Ge

from gspo_env.errors import ConfigError, OutputError
from gspo_env.files import MODEL
from gspo_env.redaction import TerminalFormatter, redact_text, visible
from gspo_env.runtime.loops import run_in_daemon
from gspo_env.settings import settings
from gspo_env.tracking.base import SUMMARY, Input, Point, RunInfo, Span, Status, Trace, Tracker
from gspo_env.tracking.jsonl import Received

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.entities import Run as StoredRun
    from mlflow.entities import Span as StoredSpan
    from mlflow.tracking import MlflowClient

T = TypeVar("T")
_log = logging.getLogger(__name__)

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

_KEY_TAG, _RUN_ID = "gspo_env.key", "MLFLOW_RUN_ID"
_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of a new experiment: it holds trainings, not traces of an application."""
_VIEW = "workflowType=machine_learning"
"""Opens the pages for training; MLflow 3 opens those for applications by default."""
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow's settings, unless they are set. Its own limits, 120 s and 7 retries of a request, let one
call take minutes; its telemetry reports to its makers."""
_KINDS = {"episode": "AGENT", "turn": "CHAT_MODEL", "step": "TOOL"}
"""MLflow's type of each kind of span."""
_TAGS = ("step", "phase", "success")
"""The tags that become MLflow's tags. Its store writes each in a statement of its own, which takes
as long as half a span, so the others become attributes of the first span."""
_REFUSALS = {"BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_ALREADY_EXISTS"}
"""MLflow's errors that a repetition does not change."""
_GONE = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}
"""MLflow's errors for a run that does not exist, or was deleted."""
_PORTS = {"http": 80, "https": 443}
_DELETED = "Current state is deleted"
"""What MLflow says of a run, or of its experiment, that can be restored."""
OPENING = 60.0
"""Seconds until a server, or a database of one, has answered."""
_OWN = 600.0
"""Seconds that a store in files may take: its tables take a busy machine long, as do other runs."""


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
        if set(self.register) & set("/:"):
            raise ConfigError(
                f"tracker.register is {self.register!r}; expected a name without / and :"
            )

    @property
    def address(self) -> str:
        """The store; empty is ./mlflow.db."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def check(self) -> None:
        """Opens the store, and the run and the experiment that the environment names.

        Raises:
            ConfigError: It cannot be opened, or lacks one of them.
        """
        if not self.address and not os.environ.get(_RUN_ID):
            return  # `start` makes ./mlflow.db, once nothing else can fail

        def look() -> None:
            server = urlsplit(self.address)
            if server.scheme in _PORTS and not getproxies():  # before the import, which takes time
                where = (server.hostname or "", server.port or _PORTS[server.scheme])
                socket.create_connection(where, OPENING).close()
            client = _open_client(self)
            _find_experiment(client, self.experiment)
            _find_run(client, self.experiment)

        self._open(look)

    def start(self, run: RunInfo) -> MLflowTracker:
        """Opens the store and creates or resumes the run.

        Raises:
            ConfigError: MLflow cannot do that.
        """
        return self._open(partial(MLflowTracker, self, run))

    def _open(self, work: Callable[[], T]) -> T:
        """Does something with the store, in the limit of time; the errors are MLflow's own."""
        is_file = self.address.partition("://")[0] in ("file", "sqlite")
        limit = _OWN if is_file or "://" not in self.address else OPENING
        try:
            # A server that sends a byte now and then would keep a socket with a timeout for hours.
            return run_in_daemon(partial(_one_at_a_time, self.address, work), "mlflow").result(
                limit
            )
        except Exception as error:
            reason = str(error) or f"no answer within {limit:g} seconds"
            name = "tracker.tracking_uri" if self.tracking_uri else "MLFLOW_TRACKING_URI"
            place = f"{name} is {self.address!r}" if self.address else "runs go to ./mlflow.db"
            text = visible(redact_text(f"{place}, which MLflow cannot open: {reason}"))
            raise ConfigError(
                f"{' '.join(text.split())}; name another store with --tracker.tracking-uri, or use "
                "--tracker none"
            ) from error


class MLflowTracker(Tracker):
    """One MLflow run."""

    points_per_call = 200

    def __init__(self, settings: MLflow, info: RunInfo) -> None:
        self._settings, self.address = settings, settings.address
        self._client = client = _open_client(settings)
        from mlflow.tracing.client import TracingClient  # with the settings of `_open_client`

        self.id = _open_run(client, settings, info)
        run = client.get_run(self.id)
        self._experiment_id, self._artifacts = run.info.experiment_id, str(run.info.artifact_uri)
        is_local = urlsplit(self._artifacts).scheme in ("", "file")
        if is_local and not _RUN_FOLDER.search(self._artifacts):
            raise OutputError(  # what is there would be overwritten
                f"the store keeps the run's files in {self._artifacts!r}; expected a folder "
                "RUN_ID/artifacts"
            )
        self._key, self._trace_store = info.key, TracingClient(client.tracking_uri)

    def log_points(self, points: Sequence[Point]) -> None:
        """Records points, many in a request."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_key(name), value, point.time, point.step)
            for point in points
            for name, value in point.metrics.items()
        ]
        for batch in _batches(metrics, _METRICS_PER_BATCH):
            self._client.log_batch(self.id, metrics=batch)

    def text(self, name: str, text: str) -> None:
        """Stores `text` as the artifact `name`; the summary becomes the description of the run."""
        if name == SUMMARY:
            self._client.set_tag(self.id, "mlflow.note.content", text[:_MAX_TAG_VALUE])
        self._client.log_text(self.id, text, name)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Stores a file or the files of a folder under the artifact folder `folder`."""
        if folder == MODEL and not self._settings.log_model:
            return
        if folder != MODEL or not _link(path, self._artifacts, folder):
            log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
            log(self.id, str(path), folder or None)
        if folder == MODEL and self._settings.register:
            self._register(self._settings.register)

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
        self._client.log_inputs(self.id, datasets=[DatasetInput(dataset, tags)])

    def log_traces(self, traces: Sequence[Trace]) -> None:
        """Records traces, many in a request; a repeated trace replaces the first.

        MLflow's tracing clients write in threads of their own and lose what they cannot write. So
        the finished spans go to the store in one call, and the traces are linked to the run in
        another.
        """
        named = {_trace_name(self._key, trace): trace for trace in traces}
        spans = [
            _span(name, trace, number, span)
            for name, trace in named.items()
            for number, span in enumerate(trace.spans)
        ]
        self._trace_store.log_spans(self._experiment_id, spans)
        self._client.link_traces_to_run(list(named), self.id)

    def finish(self, status: Status, reason: str) -> None:
        """Ends the run; the tag `error` says why it failed."""
        if reason:
            self._client.set_tag(self.id, "error", reason[:_MAX_TAG_VALUE])
        self._client.set_terminated(self.id, status)

    def is_transient(self, error: Exception) -> bool:
        """Returns whether a call that raised this error may succeed later.

        A full or locked store, a broken server and an expired login may recover; what the store
        refuses, and a missing file, may not. A deleted run or experiment can be restored.
        """
        from mlflow.exceptions import MlflowException

        if isinstance(error, MlflowException):
            return error.error_code not in _REFUSALS or _DELETED in str(error)
        status = getattr(getattr(error, "response", None), "status_code", 500)
        files = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
        final = (*files, NotImplementedError, OutputError, TypeError, ValueError, OverflowError)
        return not isinstance(error, final) and (status >= 500 or status in (401, 403, 408, 429))

    @property
    def how_to_look(self) -> str:  # type: ignore[override]
        """The address of the run, and the command that shows a local store."""
        uri, command = self.address, ""
        if not uri.startswith(("http://", "https://")):
            command = f"mlflow ui{f' --backend-store-uri {shlex.quote(uri)}' if uri else ''}, then "
            uri = "http://127.0.0.1:5000"
        place = f"experiments/{self._experiment_id}/runs/{self.id}"
        return f"{command}{uri.rstrip('/')}/#/{place}?{_VIEW}"

    def _register(self, name: str) -> None:
        """Adds the model as a version of a registered model, once."""
        client = self._client
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        versions = client.search_model_versions(f"run_id = '{self.id}'")
        if not any(version.name == name for version in versions):
            client.create_model_version(name, f"{self._artifacts.rstrip('/')}/{MODEL}", self.id)


def _one_at_a_time(address: str, work: Callable[[], T]) -> T:
    """Opens a store while no other process does: two would both make the tables of a new file."""
    scheme, _, path = (address or "sqlite:///mlflow.db").partition(":///")
    folder = Path(path).parent
    if scheme != "sqlite" or not folder.is_dir():
        return work()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return work()
    finally:
        os.close(descriptor)


def _open_client(settings: MLflow) -> MlflowClient:
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


def _find_experiment(client: MlflowClient, name: str) -> tuple[str, str]:
    """Returns the name and the id of the experiment; the id is empty if there is none yet.

    Raises:
        ConfigError: It was deleted; MLflow keeps its name, and takes no run.
    """
    name = name.strip() or os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
    if not name and (experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID", "")):
        stored: Experiment | None = client.get_experiment(experiment_id)
    else:
        stored = client.get_experiment_by_name(name or "gspo_env")
    if stored is None:
        return name or "gspo_env", ""
    return _check_experiment(stored), str(stored.experiment_id)


def _check_experiment(stored: Experiment) -> str:
    """Returns the name of an experiment that was not deleted."""
    if stored.lifecycle_stage == "deleted":
        raise ConfigError(
            f"the experiment {stored.name!r} was deleted; expected `mlflow experiments restore -x "
            f"{stored.experiment_id}`, or another experiment with --tracker.experiment"
        )
    return str(stored.name)


def _find_run(client: MlflowClient, experiment: str) -> StoredRun | None:
    """Returns the run that the environment names, if it names one.

    Raises:
        ConfigError: It was deleted, or belongs to another experiment than the settings name.
    """
    if not (run_id := os.environ.get(_RUN_ID, "").strip()):
        return None
    run = client.get_run(run_id)
    name = _check_experiment(client.get_experiment(run.info.experiment_id))
    if run.info.lifecycle_stage == "deleted":
        raise ConfigError(
            f"{_RUN_ID} is {run_id!r}, a run that was deleted; expected `mlflow runs restore "
            f"--run-id {run_id}`, or no {_RUN_ID}"
        )
    if experiment.strip() not in ("", name):
        raise ConfigError(
            f"{_RUN_ID} is {run_id!r}, a run of the experiment {name!r}, and tracker.experiment is "
            f"{experiment!r}; expected the same experiment, or only one of the two"
        )
    return run


def _open_run(client: MlflowClient, settings: MLflow, info: RunInfo) -> str:
    """Resumes the run, or creates it; returns its id."""
    from mlflow.entities import Param, RunTag
    from mlflow.exceptions import MlflowException
    from mlflow.tracking.context.registry import resolve_tags

    name, experiment_id = _find_experiment(client, settings.experiment)
    try:
        if info.id and _reopen(client, info.id, info.key):
            return info.id
    except MlflowException as error:
        if error.error_code not in _GONE:
            raise
    if experiment_id and info.resume is not None:  # the id is another store's, or lost
        runs = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{info.key}'")
        if runs and _reopen(client, runs[0].info.run_id, info.key):
            return str(runs[0].info.run_id)
    tags = {**info.tags, _KEY_TAG: info.key, "folder": str(info.folder.absolute())}
    if info.parent and (parent_id := Received.load(info.parent, "mlflow").id):
        tags["mlflow.parentRunId"] = parent_id  # MLflow shows a child in its parent's experiment
        experiment_id = client.get_run(parent_id).info.experiment_id
    tags = {_key(name): str(value)[:_MAX_TAG_VALUE] for name, value in tags.items()}
    named = None if info.parent else _find_run(client, settings.experiment)
    if named and named.data.tags.get(_KEY_TAG, info.key) != info.key:
        _log.warning(
            "%s is %r, the run of another training: this training gets a run of its own",
            *(_RUN_ID, named.info.run_id),
        )
        named = None
    run = named or client.create_run(
        experiment_id or client.create_experiment(name, tags=_KIND),
        start_time=int(info.started * 1000),
        run_name=(info.name if info.parent else settings.run_name or info.name) or None,
        tags=resolve_tags(tags),
    )
    run_id = str(run.info.run_id)
    values = {_key(name): _cut(str(value)) for name, value in info.params.items()}
    for params in _batches([Param(*item) for item in values.items()], _PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params)
    if named:  # now, so that a run that refuses a parameter stays as it was
        client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags.items()])
        client.update_run(run_id, status="RUNNING")
    return run_id


def _reopen(client: MlflowClient, run_id: str, key: str) -> bool:
    """Sets a run to running again; False if it is another training's."""
    if client.get_run(run_id).data.tags.get(_KEY_TAG, key) != key:
        return False
    client.update_run(run_id, status="RUNNING")
    return True


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


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _cut(text: str) -> str:
    """Cuts a parameter's value to MLflow's limit, visibly."""
    return text if len(text) <= _MAX_PARAM_VALUE else text[: _MAX_PARAM_VALUE - 1] + "…"


def _key(name: str) -> str:
    """Turns a name into a key that MLflow accepts."""
    return _KEY_REFUSED.sub("_", name[:_MAX_KEY])


def _trace_name(run_key: str, trace: Trace) -> str:
    return f"tr-{hashlib.sha256(f'{run_key}/{trace.key}'.encode()).hexdigest()[:32]}"


def _span(name: str, trace: Trace, number: int, span: Span) -> StoredSpan:
    """Returns a span of a trace as MLflow's; its spans count from 1."""
    from mlflow.entities import Span as Stored

    attributes: dict[str, Any] = {
        **span.attributes,
        "mlflow.traceRequestId": name,
        "mlflow.spanType": _KINDS[span.kind],
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
    }
    if span.output_tokens is not None:
        context, sampled = span.input_tokens or 0, span.output_tokens
        usage = {"input_tokens": context, "output_tokens": sampled}
        attributes["mlflow.chat.tokenUsage"] = usage | {"total_tokens": context + sampled}
    if number == 0:
        attributes |= {name: value for name, value in trace.tags.items() if name not in _TAGS}
        tags = {name: trace.tags[name] for name in _TAGS if name in trace.tags}
        tags["mlflow.traceName"] = trace.name
        attributes |= {f"mlflow.traceTag.{tag}": value for tag, value in tags.items()}
    failed = number == 0 and bool(trace.error)
    return Stored.from_dict(
        {
            "trace_id": _encode(int(name.removeprefix("tr-"), 16), 16),
            "span_id": _encode(number + 1, 8),
            "parent_span_id": "" if span.parent is None else _encode(span.parent + 1, 8),
            "name": span.name,
            "start_time_unix_nano": span.start,
            "end_time_unix_nano": span.end,
            "status": {"code": "ERROR" if failed else "OK", "message": trace.error * failed},
            "attributes": {key: json.dumps(value) for key, value in attributes.items()},
        }
    )


def _encode(number: int, size: int) -> str:
    """Encodes an id as in the JSON of MLflow's spans."""
    return base64.b64encode(number.to_bytes(size, "big")).decode()
