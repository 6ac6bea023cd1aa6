"""A trace of a run that Perfetto and Chrome open: what rollout and learner did, and when.

The format is the JSON array of the Trace Event Format: https://perfetto.dev/docs/getting-started/other-formats
lists what is read of it. The closing bracket may be missing, so a run that is killed leaves a trace
that can be opened.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gspo_env.tracking.parts import part

logger = logging.getLogger(__name__)

_LEARNER, _GROUPS = 1, 100
"""Rows of the trace: the learner's; the first of those of groups."""
_SHOWN = {"wait for groups": "rollout", "evaluate": "evaluation", "save": "saving"}
"""Spans that have another name in the terminal."""


class Timeline:
    """Writes spans of time to a file; without a file, does nothing.

    Groups that are played at the same time are in rows of their own, so that no two spans of a row
    overlap.

    Args:
        path: The file; None writes nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file: TextIO | None = None
        self._start = time.perf_counter()
        self._free: list[int] = []
        self._rows = self._playing = 0
        if path is not None:
            try:
                self._file = path.open("w", encoding="utf-8")
                self._file.write("[\n")
            except OSError as error:  # a full disk costs the trace, not the run
                logger.warning("no trace is written: %s", error)
            self._write({"name": "process_name", "ph": "M", "args": {"name": "gspo-env train"}})
            self._name(_LEARNER, "learner and training loop")

    @classmethod
    def of_run(cls, folder: Path) -> Timeline:
        """Begins `trace.json` in the folder of a run; a run that goes on adds a file."""
        known = len(list(folder.glob("trace*.json")))
        return cls(folder / (f"trace-{known + 1}.json" if known else "trace.json"))

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        """Returns a context whose time is a span of the learner's row; the terminal shows it.

        Args:
            name: Such as `update`.
            facts: JSON values that are shown with it.
        """
        begun = time.perf_counter()
        try:
            with part(_SHOWN.get(name, name)):
                yield
        finally:
            self._span(_LEARNER, name, begun, facts)
            self.flush()

    @contextmanager
    def group(self, name: str, facts: Mapping[str, Any]) -> Iterator[None]:
        """Returns a context whose time is a span of a row of groups.

        Args:
            name: Such as `step 3, group 7`.
            facts: JSON values, read when the span ends.
        """
        if self._file is None:
            yield
            return
        row, begun = self._take_row(), time.perf_counter()
        self._count(1)
        try:
            yield
        finally:
            heapq.heappush(self._free, row)
            self._count(-1)
            self._span(_GROUPS + row, name, begun, facts)

    def flush(self) -> None:
        """Hands what was written to the operating system."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._write({"name": "end", "ph": "i", "s": "g", "ts": self._now()}, last=True)
                self._file.close()
            self._file = None

    def _take_row(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._rows += 1
        self._name(_GROUPS + self._rows - 1, f"groups {self._rows}")
        return self._rows - 1

    def _count(self, change: int) -> None:
        self._playing += change
        counted = {"groups": self._playing}
        self._write({"name": "groups in flight", "ph": "C", "ts": self._now(), "args": counted})

    def _span(self, row: int, name: str, begun: float, facts: Mapping[str, Any]) -> None:
        start = self._now(begun)
        span = {"name": name, "ph": "X", "ts": start, "dur": self._now() - start, "args": facts}
        self._write({**span, "tid": row})

    def _name(self, row: int, name: str) -> None:
        self._write({"name": "thread_name", "ph": "M", "tid": row, "args": {"name": name}})

    def _now(self, at: float | None = None) -> int:
        """Returns a time in microseconds since the start."""
        return round(((time.perf_counter() if at is None else at) - self._start) * 1e6)

    def _write(self, event: Mapping[str, Any], last: bool = False) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                line = json.dumps({"pid": 1, "tid": _LEARNER, **event}, separators=(",", ":"))
                self._file.write(line + ("\n]\n" if last else ",\n"))
