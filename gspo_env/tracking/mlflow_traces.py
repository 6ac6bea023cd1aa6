"""Traces in MLflow, for the run that `mlflow.py` opens.

MLflow's tracing clients write in threads of their own and lose what they cannot write. So the
finished spans go to the store in one call, and the traces are linked to the run in another.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gspo_env.tracking.base import Span, Trace

if TYPE_CHECKING:
    from mlflow.entities import Span as StoredSpan
    from mlflow.tracking import MlflowClient

_KINDS = {"episode": "AGENT", "turn": "CHAT_MODEL", "step": "TOOL"}
"""MLflow's type of each kind of span."""
_TAGS = ("step", "phase", "success")
"""The tags that become MLflow's tags. Its store writes each in a statement of its own, which takes
as long as half a span, so the others become attributes of the first span."""


class TraceWriter:
    """Writes traces of one run; a repeated trace replaces the first."""

    def __init__(self, client: MlflowClient, experiment_id: str, run_id: str, key: str) -> None:
        """Writes nothing yet.

        Args:
            client: Client of the store.
            experiment_id: The experiment of the run.
            run_id: Id of the run.
            key: Unique key of the run, also in other stores.
        """
        from mlflow.tracing.client import TracingClient

        self._client, self._experiment_id, self._run_id = client, experiment_id, run_id
        self._key, self._store = key, TracingClient(client.tracking_uri)

    def write(self, traces: Sequence[Trace]) -> None:
        """Writes traces.

        Raises:
            MlflowException: The store refuses them, or does not answer.
        """
        named = {f"tr-{_trace_id(self._key, trace)}": trace for trace in traces}
        spans = [span for name, trace in named.items() for span in _spans(name, trace)]
        self._store.log_spans(self._experiment_id, spans)
        self._client.link_traces_to_run(list(named), self._run_id)


def _trace_id(key: str, trace: Trace) -> str:
    return hashlib.sha256(f"{key}/{trace.key}".encode()).hexdigest()[:32]


def _spans(name: str, trace: Trace) -> list[StoredSpan]:
    """Returns a trace as MLflow's spans, which count from 1."""
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
    tags = {name: trace.tags[name] for name in _TAGS if name in trace.tags}
    return {"mlflow.traceName": trace.name, **tags}


def _encode(number: int, size: int) -> str:
    """Encodes an id as in the JSON of MLflow's spans."""
    return base64.b64encode(number.to_bytes(size, "big")).decode()
