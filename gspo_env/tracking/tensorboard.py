"""Tracking with TensorBoard: event files in the run's folder. The only file that imports it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gspo_env.settings import settings
from gspo_env.tracking.base import RunInfo, Status, Tracker


@settings
class TensorBoard:
    """Writes event files for TensorBoard (extra `tensorboard`)."""

    log_dir: str = ""
    """Folder of the event files, one folder a run; empty writes them beside the run's results."""

    package: ClassVar[str] = "tensorboard"

    def start(self, run: RunInfo) -> TensorBoardTracker:
        """Opens the event file and writes the settings into it."""
        folder = Path(self.log_dir, run.unique_name) if self.log_dir else run.folder
        tracker = TensorBoardTracker(folder, run.repeats)
        if run.resume is not None:
            return tracker
        pairs = {"name": "value", "---": "---", **run.tags, **run.params}
        table = "\n".join(f"| {name} | {value} |" for name, value in pairs.items())
        tracker.writer.add_text("params", table)
        return tracker


class TensorBoardTracker(Tracker):
    """One event file. Pictures and texts are shown; other files stay where the run wrote them."""

    def __init__(self, folder: Path, repeats: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder), purge_step=repeats)
        self.how_to_look = f"tensorboard --logdir {shlex.quote(str(folder))}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds a point to each metric's curve."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def text(self, name: str, text: str) -> None:
        """Adds a text as a block of Markdown that keeps its lines."""
        self.writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))

    def artifact(self, path: Path, folder: str = "") -> None:
        """Adds a picture (.png)."""
        from matplotlib.image import imread

        if path.suffix == ".png":
            self.writer.add_image(path.stem, imread(path), dataformats="HWC")

    def finish(self, status: Status, reason: str) -> None:
        """Adds the status and closes the file."""
        self.writer.add_text("status", f"{status} {reason}".strip())
        self.writer.close()
