"""Progress on the terminal: one live line, or plain lines where stdout is not a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text


class _Clock:
    """Estimates the time left of one phase from the steps seen so far."""

    def __init__(self, step: int) -> None:
        self._first = self._last = step
        self._started = time.monotonic()

    def goes_on(self, step: int) -> bool:
        """Whether `step` continues this phase; a lower one means that the phase began anew."""
        return step >= self._last

    def left(self, step: int, total: int) -> float | None:
        """Seconds left after `step`, None before there is a pace to go by."""
        self._last = step
        if step >= total:
            return 0.0
        if step <= self._first:
            return None
        pace = (time.monotonic() - self._started) / (step - self._first)
        return pace * (total - step)


class Progress:
    """Shows the phase, step, success, return, tokens per second and time left.

    Example:
        with Progress() as progress:
            progress.update("train", 3, 100, success=0.5, return_=0.4, tokens_per_second=900)
            progress.line("saved runs/example/step-3")
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        """Write to `stream` (stdout by default); `live` None asks whether it is a terminal."""
        self._stream = sys.stdout if stream is None else stream
        self._clocks: dict[str, _Clock] = {}
        self._live: Live | None = None
        if self._stream.isatty() if live is None else live:
            console = Console(file=self._stream, highlight=False, force_terminal=live)
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Progress:
        """Return itself; the live line appears with the first update."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the live line away, also after an exception, and give the cursor back."""
        self.close()

    def update(
        self,
        phase: str,
        step: int,
        total: int,
        success: float | None = None,
        return_: float | None = None,
        tokens_per_second: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Show where a phase ("warm-up", "train", "evaluate") stands after `step` of `total`."""
        clock = self._clocks.get(phase)
        if clock is None or not clock.goes_on(step):
            clock = self._clocks[phase] = _Clock(step)
        parts = [f"{phase} {step}/{total}"]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        if success is not None:
            parts.append(f"success {success:.1%}")
        if return_ is not None:
            parts.append(f"return {return_:.3f}")
        if tokens_per_second is not None:
            parts.append(f"{tokens_per_second:,.0f} tokens/s")
        left = clock.left(step, total)
        if left is not None and left > 0:
            parts.append(f"{_duration(left)} left")
        self._show("  ".join(parts))

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self._live is not None and self._live.is_started:
            self._live.console.print(Text(text))
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the live line; calling it twice is harmless."""
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def _show(self, text: str) -> None:
        if self._live is None:
            print(text, file=self._stream, flush=True)
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def _duration(seconds: float) -> str:
    """Write seconds as 7s, 3m05s or 2h04m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
