"""Progress on the terminal: a live panel; plain lines where that is not wanted or not possible."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.text import Text

from gspo_env.redaction import redact_text
from gspo_env.tracking.console import Numbers, Pace
from gspo_env.tracking.live import Panel


class Progress:
    """Shows the phase, step, success, return, tokens per second and time left.

    A live panel if the stream is a terminal; plain lines if it is not, in CI, on a dumb terminal,
    and with `NO_COLOR`. Everything that is printed while the panel is shown goes above it.

    Example:
        with Progress() as progress:
            progress.update("train", 3, 100, Numbers(success=0.5, tokens_per_second=900))
            progress.line("saved runs/example/step-3")
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        """Writes to `stream` (stdout by default); `live` is by default whether it is a terminal."""
        stream = sys.stdout if stream is None else stream
        terminal = (stream.isatty() and _wanted()) if live is None else live
        self._console = Console(file=stream, highlight=False, force_terminal=terminal)
        self._paces: dict[str, Pace] = {}
        self._panel: Panel | None = None
        self._lives = self._console.is_interactive

    def __enter__(self) -> Progress:
        """Returns itself; the panel appears with the first phase."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Removes the panel, also after an exception, and restores the terminal."""
        if self._panel is not None:
            self._panel.stop()
            self._panel = None

    def begin(self, phase: str, step: int, total: int, title: str = "") -> None:
        """Shows in the panel what happens now, before there are numbers.

        Args:
            phase: Its name, as in `update`.
            step: Parts that are done.
            total: All parts.
            title: Name of the run; the one before by default.
        """
        if (panel := self._shown) is not None:
            screen = panel.screen
            screen.phase, screen.step, screen.total = phase, step, total
            screen.title = title or screen.title
            panel.wake()

    def update(self, phase: str, step: int, total: int, numbers: Numbers | None = None) -> None:
        """Shows the progress of a phase ("imitation", "train", "evaluate"): `step` of `total`.

        Args:
            phase: Its name.
            step: Parts that are done.
            total: All parts.
            numbers: What it has reached.
        """
        numbers = numbers or Numbers()
        pace = self._paces.get(phase)
        if pace is None or step < pace.last:  # the phase began, or began again
            pace = self._paces[phase] = Pace(first=step, last=step)
        pace.see(step)
        if (panel := self._shown) is not None:
            panel.show(phase, step, total, numbers, pace)
        if panel is None or phase == "evaluate":
            parts = [f"{phase} {step}/{total}"]
            if (left := pace.left(total)) is not None:
                parts.append(f"{timedelta(seconds=math.ceil(left))} left")
            self.line("  ".join(filter(None, [*parts, numbers.line])))

    def exchange(self, title: str, said: Sequence[tuple[str, str]]) -> None:
        """Keeps an episode for the key `v`.

        Args:
            title: What it is.
            said: Who said what.
        """
        if self._panel is not None:
            self._panel.screen.exchange = title, said

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

    @property
    def _shown(self) -> Panel | None:
        """The panel, which appears now if it has not; None where lines are printed."""
        if self._panel is not None and self._panel.lost:
            self._panel.stop()
            self._panel, self._lives = None, False
        if self._panel is None and self._lives:
            self._panel = Panel(self._console)
            self._panel.start()
        return self._panel


def _wanted() -> bool:
    """Returns whether the user's environment allows a display that changes."""
    return not (os.environ.get("CI") or os.environ.get("NO_COLOR"))
