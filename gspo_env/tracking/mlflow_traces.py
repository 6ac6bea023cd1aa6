"""Traces in MLflow. Imports it, as `mlflow.py` does, whose run the traces belong to.

The clients of MLflow's tracing write in threads of their own and lose what they cannot write. So
the finished spans go to the store in one call, and the traces are linked to the run in another.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gspo_env.tracking.traces import Span, Trace

if TYPE_CHECKING:
    from mlflow.entities import Span as StoredSpan
    from mlflow.tracking import MlflowClient

_KINDS = {"episode": "AGENT", "turn": "CHAT_MODEL", "step": "TOOL"}
"""MLflow's type of each kind of span."""
_TAGS = ("step", "phase", "success")
"""The tags that MLflow has as such. Its store writes each in a statement of its own, which takes
as long as half a span, so the others are attributes of the first span."""
_MOST_PREVIEW = 1000
"""Characters of a preview (mlflow.tracing.constant)."""


class TraceWriter:
    """Writes traces of one run; the same trace again replaces the first."""

    def __init__(self, client: MlflowClient, experiment_id: str, run_id: str, key: str) -> None:
        """Writes nothing yet.

        Args:
            client: Client of the store.
            experiment_id: The experiment of the run.
            run_id: Id of the run.
            key: Tells the run from all others, also in other stores.
        """
        from mlflow.tracing.client import TracingClient

        self._client, self._experiment_id, self._run_id = client, experiment_id, run_id
        self._key, self._store = key, TracingClient(client.tracking_uri)
        self._takes_spans = not client.tracking_uri.startswith("databricks")

    def write(self, traces: Sequence[Trace]) -> None:
        """Writes traces.

        Raises:
            MlflowException: The store refuses them, or does not answer.
        """
        stored = {f"tr-{_trace_id(self._key, trace)}": trace for trace in traces}
        spans = {name: _spans(name, trace) for name, trace in stored.items()}
        if self._takes_spans:
            try:
                every = [span for made in spans.values() for span in made]
                self._store.log_spans(self._experiment_id, every)
            except Exception as error:
                if not _takes_no_spans(error):
                    raise
                self._takes_spans = False
            else:
                self._client.link_traces_to_run(list(stored), self._run_id)
                return
        for name, trace in stored.items():
            self._write_file(name, trace, spans[name])

    def _write_file(self, name: str, trace: Trace, spans: list[StoredSpan]) -> None:
        """Writes a trace with its spans as a file, for a store that takes no spans."""
        from mlflow.entities import TraceData, TraceInfo, TraceLocation, TraceState
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
        from mlflow.tracing.utils.artifact_utils import get_artifact_uri_for_trace

        first = trace.spans[0]
        info = TraceInfo(
            trace_id=name,
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=first.start // 10**6,
            execution_duration=(first.end - first.start) // 10**6,
            state=TraceState.ERROR if trace.error else TraceState.OK,
            request_preview=json.dumps(first.inputs)[:_MOST_PREVIEW],
            response_preview=json.dumps(first.outputs)[:_MOST_PREVIEW],
            trace_metadata={"mlflow.sourceRun": self._run_id},
            tags=_tags(trace),
        )
        place = get_artifact_uri_for_trace(self._store.start_trace(info))
        text = json.dumps(TraceData(spans=spans).to_dict(), default=str)
        get_artifact_repository(place).upload_trace_data(text)


def _takes_no_spans(error: Exception) -> bool:
    """Returns whether a store has no table of spans: a folder of files, or an old server."""
    return isinstance(error, NotImplementedError) or "span logging is not supported" in str(error)


def _trace_id(key: str, trace: Trace) -> str:
    return hashlib.sha256(f"{key}/{trace.key}".encode()).hexdigest()[:32]


def _spans(name: str, trace: Trace) -> list[StoredSpan]:
    """Makes MLflow's spans; the number of a span is its index and 1."""
    return [_span(name, trace, number, span) for number, span in enumerate(trace.spans)]


def _span(name: str, trace: Trace, number: int, span: Span) -> StoredSpan:
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
        attributes |= {f"mlflow.traceTag.{tag}": value for tag, value in _tags(trace).items()}
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


def _tags(trace: Trace) -> dict[str, str]:
    chosen = {name: trace.tags[name] for name in _TAGS if name in trace.tags}
    return {"mlflow.traceName": trace.name, **chosen}


def _encode(number: int, size: int) -> str:
    """Encodes an id as MLflow's spans have it in JSON."""
    return base64.b64encode(number.to_bytes(size, "big")).decode()
