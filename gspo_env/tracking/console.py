"""Progress in the terminal: a live line at its bottom, or plain lines where that is not wanted."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as LiveProgress
from rich.text import Text

from gspo_env.errors import figure
from gspo_env.redaction import redact_text, visible

_FORMATS = {
    "loss": "loss {:.4f}",
    "success": "success {:.1%}",
    "best": "best {:.1%}",
    "mean_return": "return {:z.3f}",
    "return_std": "std {:.3f}",
    "clipped": "clipped {:.1%}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "lost": "{:.0f} lost",
}
"""How each number is shown."""


_parts: list[str] = []


@contextmanager
def part(name: str) -> Iterator[None]:
    """Names the part of a step that runs in the context, such as `rollout`, in the live line."""
    _parts.append(name)
    try:
        yield
    finally:
        _parts.remove(name)


class _PartColumn(ProgressColumn):
    """The part of a step that began last."""

    def render(self, task: Task) -> Text:
        """Returns its name."""
        return Text(next(reversed(_parts), ""), style="dim")


class Progress:
    """Shows the phase, the step, its numbers and the time left.

    A live line if the stream is a terminal; plain lines if it is not, in CI, on a dumb terminal and
    with `NO_COLOR`. What is printed while the live line is shown goes above it.

    Example:
        with Progress() as progress:
            progress.update("train", 3, 100, success=0.5, tokens_per_second=900)
            progress.line("saved runs/example/step-3")
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        """Writes to `stream` (stdout by default); `live` is by default whether it is a terminal."""
        stream = sys.stdout if stream is None else stream
        is_wanted = not (os.environ.get("CI") or os.environ.get("NO_COLOR"))
        terminal = (stream.isatty() and is_wanted) if live is None else live
        self._console = Console(file=stream, highlight=False, force_terminal=terminal)
        self._starts: dict[str, tuple[int, int, float]] = {}
        """First and last step of each phase, and the time of the first."""
        self._live = LiveProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}", markup=False),
            _PartColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=2,
            disable=not self._console.is_interactive,
        )
        self._task = self._live.add_task("start", total=None, summary="")

    def __enter__(self) -> Self:
        """Shows the live line, if the stream has one."""
        self._live.start()
        self._console.show_cursor()  # whatever ends or suspends the process finds it visible
        return self

    def __exit__(self, *exception: object) -> None:
        """Removes the live line."""
        self._live.stop()

    def begin(self, phase: str, step: int, total: int) -> None:
        """Shows a phase in the live line before it has numbers; see `update`."""
        self._live.update(self._task, description=phase, completed=step, total=total)

    def update(self, phase: str, step: int, total: int, **numbers: float | None) -> None:
        """Shows the progress of a phase.

        Args:
            phase: Its name, such as `train`.
            step: Number of steps that are done.
            total: Number of all steps.
            numbers: What the phase has reached, such as `success`; None is not shown.

        Example:
            >>> Progress().update("train", 1, 4, success=0.5, tokens_per_second=1234)
            train 1/4  success 50.0%  1,234 tokens/s
        """
        shown = [
            _FORMATS[name].format(value) if name in _FORMATS else f"{name} {figure(value)}"
            for name, value in numbers.items()
            if value is not None
        ]
        if (seconds := self._time_left(phase, step, total)) is not None:
            shown.insert(0, f"{timedelta(seconds=math.ceil(seconds))} left")
        self.begin(phase, step, total)
        if phase != "evaluate":
            self._live.update(self._task, summary="  ".join(shown))
        if phase == "evaluate" or self._live.disable:
            self.line("  ".join([f"{phase} {step}/{total}", *shown]))

    def when_slow(self, seconds: float = 2.0) -> Callable[..., None]:
        """Returns an `update` that shows nothing more often than every few seconds.

        What takes less time than that is not shown, also where a phase begins again.
        """
        last, before = time.monotonic(), 0

        def show(phase: str, step: int, total: int, **numbers: float | None) -> None:
            nonlocal last, before
            now = time.monotonic()
            if step < before:
                last, self._starts[phase] = now, (step, step, now)
            before = step
            if now - last >= seconds:
                self.update(phase, step, total, **numbers)
                last = now

        return show

    def line(self, text: str) -> None:
        """Prints a line that stays, without secrets and with hidden characters shown."""
        text = visible(redact_text(text)).encode(self.encoding, "replace").decode(self.encoding)
        self._console.print(Text(text), soft_wrap=True)

    @property
    def encoding(self) -> str:
        """The encoding of the terminal or the file."""
        return self._console.encoding

    def _time_left(self, phase: str, step: int, total: int) -> float | None:
        """Estimates the seconds until all steps are done from the steps since the first update."""
        now = time.monotonic()
        first, last, began = self._starts.get(phase, (step, step, now))
        if step < last:  # the phase began again
            first, began = step, now
        self._starts[phase] = first, step, began
        if step == first or step >= total:
            return None
        return (total - step) * (now - began) / (step - first)
