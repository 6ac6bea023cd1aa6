"""What the live panel shows: phase, progress, success, return, speed, memory, an exchange."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gspo_env.redaction import redact_text, visible
from gspo_env.tracking.parts import running

_MEMORY_AGE = 5.0
"""Seconds after which the memory is read again."""
_MOST_TEXT = 20_000
"""Characters of an exchange."""
_ROWS, _COLUMNS = 9, 44
"""The smallest terminal that has room for the panel; others get one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What a phase has reached; None for what it does not have."""

    loss: float | None = None
    """Of the imitation."""
    success: float | None = None
    """Share of the episodes."""
    best: float | None = None
    """The best success of an evaluation so far."""
    best_step: int | None = None
    """The step of that evaluation."""
    return_: float | None = None
    """Mean return of the episodes."""
    spread: float | None = None
    """Standard deviation of the returns."""
    clipped: float | None = None
    """Share of the tokens whose ratio was clipped."""
    tokens_per_second: float | None = None
    """Sampled tokens."""
    lost: float | None = None
    """Episodes whose environment failed; shown if there are any."""

    @property
    def line(self) -> str:
        """All numbers in a line.

        Example:
            >>> Numbers(success=0.5, tokens_per_second=1234).line
            'success 50.0%  1,234 tokens/s'
        """
        values = {
            "loss {:.4f}": self.loss,
            "success {:.1%}": self.success,
            "best {:.1%}": self.best,
            "return {:.3f}": self.return_,
            "spread {:.3f}": self.spread,
            "clipped {:.1%}": self.clipped,
            "{:,.0f} tokens/s": self.tokens_per_second,
            "{:.0f} lost": self.lost or None,
        }
        return "  ".join(form.format(value) for form, value in values.items() if value is not None)


@dataclass(slots=True)
class Pace:
    """Estimates the time left from the steps since the first that it saw."""

    first: int
    last: int
    began: float = field(default_factory=lambda: time.monotonic())
    seen: float = field(default_factory=lambda: time.monotonic())

    def see(self, step: int) -> None:
        """Takes the present step."""
        self.last, self.seen = step, time.monotonic()

    def left(self, total: int, now: float | None = None) -> float | None:
        """Returns the seconds until `total` steps are done; None if that is not known.

        Args:
            total: All steps.
            now: The time, by default that of the last step.
        """
        done = self.last - self.first
        if done <= 0 or total <= self.last:
            return None
        left = (total - self.last) * (self.seen - self.began) / done
        return max(0.0, left - (0.0 if now is None else now - self.seen))


@dataclass(slots=True)
class Screen:
    """The state of the panel; a renderable."""

    memory: Callable[[], str]
    """Returns the memory that the run uses."""
    title: str = ""
    phase: str = ""
    step: int = 0
    total: int = 0
    numbers: Numbers = field(default_factory=Numbers)
    evaluated: Numbers = field(default_factory=Numbers)
    """Those of the last evaluation."""
    pace: Pace | None = None
    exchange: tuple[str, Sequence[tuple[str, str]]] = ("", ())
    """What a sample episode is, and who said what in it."""
    keys: bool = False
    """Whether a key can be pressed."""
    open: bool = False
    """Whether the exchange is shown."""
    began: float = field(default_factory=lambda: time.monotonic())
    _memory: tuple[float, str] = (-math.inf, "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the panel, or a line where there is no room for it."""
        width, height = options.max_width, console.size.height
        if width < _COLUMNS or height < _ROWS:
            yield self._fit(self._line(width), console, options)
            return
        inner = options.update(width=width - 4, max_width=width - 4)
        rows: list[RenderableType] = [self._bar(), *self._rows(inner)]
        room = height - len(rows) - 4
        if self.open and self.exchange[1] and room > 2:
            rows += ["", *self._talk(console, inner, room)]
        hint = "v hides the exchange" if self.open else "v shows an exchange"
        yield Panel(
            Group(*rows),
            title=self._fit(self.title, console, inner) if self.title else None,
            title_align="left",
            subtitle=hint if self.keys and self.exchange[1] else None,
            subtitle_align="right",
            width=width,
            border_style="dim",
        )

    def _line(self, width: int) -> str:
        left = self._left()
        parts = [f"{self.phase} {self.step}/{self.total}", *self.numbers.line.split("  ")]
        if left is not None:
            parts.insert(1, f"{duration(left)} left")
        parts.append(self._now())
        line = ""
        for part in filter(None, parts):  # only whole numbers
            if len(line) + len(part) + 2 > width:
                break
            line += f"  {part}" if line else part
        return line

    def _bar(self) -> RenderableType:
        left, elapsed = self._left(), duration(time.monotonic() - self.began)
        after = f"{duration(left)} left" if left is not None else f"{elapsed} so far"
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True, min_width=9)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True)
        row.add_row(
            Text(self.phase, style="bold"),
            ProgressBar(total=max(1, self.total), completed=self.step),
            Text(f"{self.step} of {self.total}"),
            Text(after),
        )
        return row

    def _rows(self, options: ConsoleOptions) -> list[Text]:
        numbers, held_out = self.numbers, self.evaluated
        best = "" if numbers.best is None else f"best {numbers.best:.1%}"
        if best and numbers.best_step is not None:
            best += f" after step {numbers.best_step}"
        cells = [
            [
                ("success", "-" if numbers.success is None else f"{numbers.success:.1%}"),
                ("evaluation", _share(held_out.success)),
                ("", best),
            ],
            [
                ("return", "-" if numbers.return_ is None else f"{numbers.return_:.3f}"),
                ("spread", "" if numbers.spread is None else f"{numbers.spread:.3f}"),
                ("clipped", _share(numbers.clipped)),
                ("lost", f"{numbers.lost:.0f}" if numbers.lost else ""),
            ],
            [
                ("tokens/s", _speed(numbers.tokens_per_second)),
                ("memory", self._memory_now()),
                ("now", self._now()),
            ],
        ]
        if numbers.loss is not None:
            cells = [[("loss", f"{numbers.loss:.4f}")], cells[-1][1:]]
        return [self._cells(row, options) for row in cells]

    def _cells(self, row: Sequence[tuple[str, str]], options: ConsoleOptions) -> Text:
        """Joins names and values; the first two have columns of their own."""
        text = Text(no_wrap=True, overflow="crop")
        widths = iter(((10, 10), (11, 10)))
        for name, value in row:
            if not value:
                continue
            for_name, for_value = next(widths, (0, 0))
            label = f"{name} ".ljust(for_name) if name else ""
            if text.cell_len + len(label) + len(value) > options.max_width:
                break
            text.append(label, style="dim").append(value.ljust(for_value)).append("  ")
        text.rstrip()
        text.truncate(options.max_width, overflow="crop")
        return text

    def _talk(self, console: Console, options: ConsoleOptions, room: int) -> list[Text]:
        """Returns the last lines of the exchange that fit."""
        title, said = self.exchange
        lines: list[Text] = []
        for who, words in said:
            shown = _plain(f"{who}: {words[-_MOST_TEXT:]}", console)
            lines += list(Text(shown).wrap(console, options.max_width, overflow="fold"))
        over = len(lines) - (room - 2)
        if over > 0:
            lines = [Text(f"({over} lines before)", style="dim"), *lines[over + 1 :]]
        head = self._fit(title.replace("\n", " "), console, options, "bold")
        return [head, *islice(lines, max(0, room - 2))]

    def _fit(self, text: str, console: Console, options: ConsoleOptions, style: str = "") -> Text:
        line = Text(_plain(text, console), style=style, no_wrap=True, overflow="crop")
        line.truncate(options.max_width, overflow="crop")
        return line

    def _left(self) -> float | None:
        return None if self.pace is None else self.pace.left(self.total, time.monotonic())

    def _now(self) -> str:
        """Returns the part of a step that runs, and for how long."""
        part = running()
        return "" if part is None else f"{part.name} {duration(time.monotonic() - part.began)}"

    def _memory_now(self) -> str:
        now = time.monotonic()
        if now > self._memory[0] + _MEMORY_AGE:
            self._memory = now, self.memory()
        return self._memory[1]


def duration(seconds: float) -> str:
    """Returns a time in its two largest units.

    Example:
        >>> [duration(s) for s in (5, 65, 3700, 90000)]
        ['5 s', '1 min 05 s', '1 h 01 min', '1 d 1 h']
    """
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _plain(text: str, console: Console) -> str:
    """Returns a text that acts on no terminal, in the characters that this one has."""
    text = visible(redact_text(text)).replace("\t", "    ")
    return text.encode(console.encoding, "replace").decode(console.encoding)
