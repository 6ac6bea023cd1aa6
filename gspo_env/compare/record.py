"""Records a comparison in its trackers: a parent run, and a child for each run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo_env.tracking.base import RunInfo, TrackerChoice
from gspo_env.tracking.multi import MultiTracker, parts


class Recorder(MultiTracker):
    """Records each run once in each tracker, also when the comparison is continued later.

    A tracker that failed gets no further runs; the next start of the comparison records them.
    """

    remedy = "start the comparison again to send them"

    def __init__(
        self, tracker: TrackerChoice, folder: Path, params: Any, say: Callable[[str], None]
    ) -> None:
        """Starts the parent run, or continues the one that was started in the folder."""
        self._note_path = folder / "tracked.json"
        self._done: dict[str, list[str]] = (
            json.loads(self._note_path.read_text()) if self._note_path.exists() else {}
        )
        self._choices, self._say = parts(tracker), say
        self._failed: set[str] = set()
        tags = {"gspo_env.kind": "comparison"}
        ids = dict.fromkeys(self._choices, "")
        super().__init__(
            self._choices,
            RunInfo(name=folder.name, folder=folder, params=params, tags=tags, resume=ids),
        )

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Ends the parent run and reports what was not recorded."""
        super().__exit__(exc_type, error)
        for problem in self.problems:
            self._say(problem)

    def child(self, name: str, folder: Path, params: Any, started: float, error: str = "") -> None:
        """Records a run that ended, in each tracker that has not recorded it yet.

        Args:
            name: Name of the run.
            folder: Where its worker wrote `metrics.jsonl`.
            params: Its settings.
            started: When it began, in seconds since 1970.
            error: Why it failed.
        """
        waiting = {
            key: choice
            for key, choice in self._choices.items()
            if key not in self._failed and name not in self._done.get(key, [])
        }
        if not waiting:
            return
        info = RunInfo(
            name=name,
            folder=folder,
            params=params,
            tags={"error": error} if error else {},
            parent=self.folder,
            resume=dict.fromkeys(self._choices, ""),
            started=started,
        )
        child = MultiTracker(waiting, info)
        child.finish("FAILED" if error else "FINISHED", error)
        for problem in child.problems:
            self._say(f"{name}: {problem}")
        self._failed |= child.failed
        for key in {*waiting} - child.failed:
            self._done.setdefault(key, []).append(name)
        self._note_path.write_text(json.dumps(self._done, indent=1))
