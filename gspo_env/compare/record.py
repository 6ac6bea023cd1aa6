"""Records a comparison in its trackers: a parent run, and a child for each run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo_env.tracking.base import RunInfo, TrackerChoice
from gspo_env.tracking.several import Several, parts


class Recorder(Several):
    """Records each run once in each tracker, also when the comparison is continued later.

    A tracker that failed gets no further runs; the next start of the comparison records them.
    """

    def __init__(
        self, tracker: TrackerChoice, folder: Path, params: Any, say: Callable[[str], None]
    ) -> None:
        """Starts the parent run, or continues the one that was started in the folder."""
        self._note = folder / "tracked.json"
        self._done: dict[str, list[str]] = (
            json.loads(self._note.read_text()) if self._note.exists() else {}
        )
        tags = {"gspo_env.kind": "comparison"}
        self._choices, self._folder, self._say = parts(tracker), folder, say
        goes_on = dict.fromkeys(self._choices, "")
        info = RunInfo(name=folder.name, folder=folder, params=params, tags=tags, resume=goes_on)
        self._failed: set[str] = set()
        super().__init__(self._choices, info)

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        """Ends the parent run and reports what was not recorded."""
        super().__exit__(exc_type)
        for problem in self.problems:
            self._say(problem)

    def child(
        self,
        name: str,
        folder: Path,
        params: Any,
        history: Sequence[tuple[int, dict[str, float]]],
        error: str = "",
    ) -> None:
        """Records a run that ended, in each tracker that has not recorded it yet."""
        failed = self._failed | self.failed
        waiting = {
            key: choice
            for key, choice in self._choices.items()
            if key not in failed and name not in self._done.get(key, [])
        }
        tags = {"error": error} if error else {}
        info = RunInfo(
            name=name,
            folder=folder,
            params=params,
            tags=tags,
            parent=self._folder,
            resume=dict.fromkeys(self._choices, ""),  # the worker wrote its metrics.jsonl
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
