"""Records a comparison in its trackers: a parent run, and a child for each run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gspo_env.tracking.base import RunInfo, TrackerChoice, flatten
from gspo_env.tracking.several import Several, parts, start


class Recorder:
    """Records each run once in each tracker, also when the comparison is continued later.

    A tracker that failed gets no further runs; the next start of the comparison records them.
    """

    def __init__(
        self,
        tracker: TrackerChoice,
        folder: Path,
        params: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """Starts the parent run, or continues the one that was started in the folder."""
        self._note = folder / "tracked.json"
        known = json.loads(self._note.read_text()) if self._note.exists() else {}
        self._done: dict[str, list[str]] = known
        tags = {"gspo_env.kind": "comparison"}
        info = RunInfo(name=folder.name, folder=folder, params=params, tags=tags, resume=True)
        self._choices = parts(tracker)
        self._parent = start(tracker, info)
        self._failed: set[str] = set()
        self._folder, self._say = folder, say
        self.artifact = self._parent.artifact

    def __enter__(self) -> Recorder:
        """Returns itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the parent run and says what was not recorded."""
        self._parent.__exit__(exc_type, exc, traceback)
        for problem in self._parent.problems:
            self._say(problem)

    def child(
        self,
        name: str,
        folder: Path,
        params: object,
        history: Sequence[tuple[int, dict[str, float]]],
        error: str = "",
    ) -> None:
        """Records a run that ended, in each tracker that has not recorded it yet."""
        failed = self._failed | self._parent.failed
        waiting = {
            key: choice
            for key, choice in self._choices.items()
            if key not in failed and name not in self._done.get(key, [])
        }
        tags = {"error": error} if error else {}
        info = RunInfo(
            name=name, folder=folder, params=flatten(params), tags=tags, parent=self._folder
        )
        child = Several(waiting, info)
        for step, metrics in history:
            child.log(metrics, step)
        child.finish("FAILED" if error else "FINISHED")
        for problem in child.problems:
            self._say(f"{name}: {problem}")
        self._failed |= child.failed
        for key in {*waiting} - child.failed:
            self._done.setdefault(key, []).append(name)
        self._note.write_text(json.dumps(self._done, indent=1))
