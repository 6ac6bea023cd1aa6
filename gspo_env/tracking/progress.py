"""Progress on the terminal: a live line per phase; plain lines if stdout is not a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

import rich.progress
from rich.console import Console
from rich.progress import TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from gspo_env.redaction import redact_text


class Progress:
    """Shows the phase, step, success, return, tokens per second and time left.

    Example:
        with Progress() as progress:
            progress.update("train", 3, 100, success=0.5, return_=0.4, tokens_per_second=900)
            progress.line("saved runs/example/step-3")
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        """Writes to `stream` (stdout by default); `live` is by default whether it is a terminal."""
        stream = sys.stdout if stream is None else stream
        terminal = stream.isatty() if live is None else live
        self._console = Console(file=stream, highlight=False, force_terminal=terminal)
        self._tasks: dict[str, TaskID] = {}
        # Estimates the time left in both modes; displays the live lines.
        self._rich = rich.progress.Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            console=self._console,
            auto_refresh=False,
            transient=True,
            speed_estimate_period=math.inf,
            disable=not self._console.is_interactive,
        )

    def __enter__(self) -> Progress:
        """Returns itself; a live line appears with the first update of its phase."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Removes the live lines, also after an exception, and restores the cursor."""
        self._rich.stop()

    def update(
        self,
        phase: str,
        step: int,
        total: int,
        success: float | None = None,
        return_: float | None = None,
        tokens_per_second: float | None = None,
        loss: float | None = None,
        best: float | None = None,
        spread: float | None = None,
        clipped: float | None = None,
        lost: float | None = None,
    ) -> None:
        """Shows the progress of a phase ("imitation", "train", "evaluate"): `step` of `total`.

        Args:
            phase: Its name.
            step: Parts that are done.
            total: All parts.
            success: Share of the episodes.
            return_: Mean return of the episodes.
            tokens_per_second: Sampled tokens.
            loss: Of the warm-up.
            best: The best success of an evaluation so far.
            spread: Standard deviation of the returns.
            clipped: Share of the tokens whose ratio was clipped.
            lost: Episodes whose environment failed; shown if there are any.
        """
        values = {
            "loss {:.4f}": loss,
            "success {:.1%}": success,
            "best {:.1%}": best,
            "return {:.3f}": return_,
            "spread {:.3f}": spread,
            "clipped {:.1%}": clipped,
            "{:,.0f} tokens/s": tokens_per_second,
            "{:.0f} lost": lost or None,
        }
        parts = [form.format(value) for form, value in values.items() if value is not None]
        if phase not in self._tasks:
            self._tasks[phase] = self._rich.add_task(phase)
        task = self._rich.tasks[self._tasks[phase]]
        if step < task.completed:  # the phase began again
            self._rich.reset(task.id)
        self._rich.update(task.id, completed=step, total=total)
        if task.time_remaining:  # a narrow terminal cuts the line at its end
            parts.insert(0, f"{timedelta(seconds=task.time_remaining)} left")
        task.description = "  ".join([f"{phase} {step}/{total}", *parts])
        if self._rich.disable:
            self.line(task.description)
        else:
            self._rich.start()
            self._rich.refresh()

    def when_slow(self, seconds: float = 2.0) -> Callable[[str, int, int], None]:
        """Returns a function that shows the progress of a phase, but only every few seconds.

        What takes less time than that is not shown.
        """
        last = time.monotonic()

        def show(phase: str, step: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= seconds:
                self.update(phase, step, total)
                last = time.monotonic()

        return show

    def line(self, text: str) -> None:
        """Prints a line that stays, without secrets."""
        text = redact_text(text).encode(self.encoding, "replace").decode(self.encoding)
        self._console.print(Text(text), soft_wrap=True)

    @property
    def encoding(self) -> str:
        """The encoding of the terminal or the file."""
        return self._console.encoding
