"""Tracking with Weights & Biases: the only file that imports it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

from gspo_env.files import plain_path
from gspo_env.settings import settings
from gspo_env.tracking.base import RunInfo, Status, Tracker


@settings
class WandB:
    """Records in Weights & Biases (extra `wandb`)."""

    project: str = "gspo_env"
    """The project that the run belongs to."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run's folder only; `wandb sync` uploads it later."""

    package: ClassVar[str] = "wandb"

    def start(self, run: RunInfo) -> WandBTracker:
        """Starts the run; a comparison's runs form a group."""
        import wandb

        who = {**asdict(self), "name": run.name, "group": run.group, "dir": run.folder}
        how = {"config": {**run.tags, **run.params}, "reinit": "create_new"}
        if run.id:
            how |= {"id": run.id, "resume": "allow"}
        return WandBTracker(wandb.init(**who, **how, settings={"console": "off"}))


class WandBTracker(Tracker):
    """One run. Texts and files are under its Files, folders under its Artifacts."""

    def __init__(self, run: Any) -> None:
        self.id, self._run, folder = str(run.id), run, shlex.quote(str(Path(run.dir).parent))
        self.how_to_look = f"wandb sync {folder}" if run.offline else str(run.url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds a row to the history."""
        self._run.log(dict(metrics), step=step)

    def text(self, name: str, text: str) -> None:
        """Writes a file into the run's files."""
        path = plain_path(Path(self._run.dir), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self._run.save(path, self._run.dir, "now", glob=False)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Adds a file to the run's files; logs a folder as an artifact."""
        if path.is_dir():
            self._run.log_artifact(str(path), type=folder or "files")
        else:
            self._run.save(path.resolve(strict=True), path.resolve().parent, "now", glob=False)

    def finish(self, status: Status, reason: str) -> None:
        """Writes what is left and ends the run with an exit code."""
        if reason:
            self._run.summary["error"] = reason
        self._run.finish({"FINISHED": 0, "FAILED": 1, "KILLED": 255}[status])
