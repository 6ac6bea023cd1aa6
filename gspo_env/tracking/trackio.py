"""Tracking with Trackio: the only file that imports it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gspo_env.settings import settings
from gspo_env.tracking.base import RunInfo, Status, Tracker


@settings
class Trackio:
    """Records in Trackio (extra `trackio`): local files, or a Space of the Hugging Face Hub."""

    project: str = "gspo_env"
    """The project that the run belongs to."""
    space_id: str = ""
    """The Space that shows it; empty is `TRACKIO_SPACE_ID`, else local files (`TRACKIO_DIR`)."""

    package: ClassVar[str] = "trackio"

    def start(self, run: RunInfo) -> TrackioTracker:
        """Starts the run; a comparison's runs form a group."""
        import trackio

        resume = "never" if run.resume is None else "allow"
        where = (self.project, run.unique_name, run.group, self.space_id or None)
        began = trackio.init(*where, config={**run.tags, **run.params}, resume=resume)
        return TrackioTracker(self.project, run.unique_name, began, trackio.Markdown)


class TrackioTracker(Tracker):
    """One run."""

    def __init__(self, project: str, name: str, run: Any, markdown: Any) -> None:
        self.id, self._run, self._markdown, self._step = name, run, markdown, 0
        self.how_to_look = f"trackio show --project {shlex.quote(project)}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds a row to the metrics."""
        self._step = step
        self._run.log(dict(metrics), step)

    def text(self, name: str, text: str) -> None:
        """Adds a report to the step that was logged last."""
        self._run.log({name: self._markdown(text)}, step=self._step)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Logs a file or the files of a folder as an artifact."""
        self._run.log_artifact(path, type=folder or "file")

    def finish(self, status: Status, reason: str) -> None:
        """Adds the status and writes what is left."""
        self.text("status", f"{status} {reason}".strip())
        self._run.finish()
