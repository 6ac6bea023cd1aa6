"""Draws the panel in a thread of its own: the training only leaves numbers."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gspo_env.tracking.console import Numbers, Pace, Screen
from gspo_env.tracking.keyboard import Keyboard, kept
from gspo_env.tracking.system import memory

_REFRESH = 1.0
"""Seconds between two pictures, if nothing has changed."""
_FASTEST = 0.25
"""Seconds between two pictures at the least."""
_LOOK = 0.05
"""Seconds between two looks whether the panel has to go away."""
_PATIENCE = 0.5
"""Seconds to wait for the panel to go away."""
_SHOW_CURSOR = b"\x1b[?25h\n"


class Panel:
    """A panel at the bottom of the terminal; what is printed meanwhile goes above it."""

    def __init__(self, console: Console) -> None:
        """Shows nothing yet; see `start`."""
        self.lost = False
        """Whether the panel is gone for good."""
        self.screen = Screen(memory=memory)
        self._console, self._notes = console, deque[str]()
        self._live = _Above(console, self.screen)
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._keyboard = Keyboard(self)
        self._hidden, self._over, self._gone = False, False, threading.Event()
        self._thread = threading.Thread(target=self._work, name="gspo-panel", daemon=True)

    def start(self) -> None:
        """Shows the panel."""
        self.screen.keys = self._keyboard.start()
        if self._in_front:
            self._live.start()
        _panels.append(self)
        self._thread.start()

    def stop(self) -> None:
        """Restores the terminal and removes the panel."""
        self._keyboard.stop()
        if self in _panels:
            _panels.remove(self)
        self._over = True
        self.wake()
        try:
            self._thread.join(4 * _PATIENCE)
        finally:
            self._live.stop()
        self._print_notes()
        for end in (self._wakes, self._wake):
            os.close(end)

    def show(self, phase: str, step: int, total: int, numbers: Numbers, pace: Pace) -> None:
        """Takes new numbers; those of an evaluation stand beside the others."""
        screen = self.screen
        screen.phase, screen.step, screen.total = phase, step, total
        if phase == "evaluate":
            screen.evaluated = numbers
            numbers = replace(screen.numbers, best=numbers.best, best_step=numbers.best_step)
        else:
            screen.pace = pace
        screen.numbers = numbers
        self.wake()

    def say(self, text: str) -> None:
        """Prints a line above the panel; a signal handler may call it."""
        self._notes.append(text)
        self.wake()

    def wake(self) -> None:
        """Makes the thread draw."""
        with suppress(OSError):  # the pipe is full, so the thread is awake
            os.write(self._wake, b".")

    def lose(self) -> None:
        """Goes away for good, since other code reads from the terminal."""
        self.lost = True
        self.hide()

    def hide(self) -> bool:
        """Goes away until `come_back`; see `gspo_env.tracking.keyboard.Display`."""
        self._hidden = True
        self.wake()
        if threading.current_thread() is self._thread:
            return False
        return self._gone.wait(_PATIENCE)

    def come_back(self) -> None:
        """Appears again."""
        self._hidden = False
        self.wake()

    def show_cursor(self) -> None:
        """Makes the cursor visible, now, before the process ends."""
        with suppress(OSError, ValueError):
            os.write(self._console.file.fileno(), _SHOW_CURSOR)

    def _work(self) -> None:
        """Draws until the panel is over; runs in the thread."""
        try:
            while not self._over:
                if self._hidden or not self._in_front:
                    self._be_hidden()
                    if self.lost:
                        return
                self._print_notes()
                self._live.refresh()
                self._wait()
        except (OSError, ValueError):  # the terminal is gone
            self.lost = True
        finally:
            self._gone.set()

    def _wait(self) -> None:
        """Waits for news or a key."""
        keys = self._keyboard.ready()
        ready = select.select([self._wakes, *keys], [], [], _REFRESH)[0]
        if self._wakes in ready:
            os.read(self._wakes, 4096)
        pressed = any(name in ready for name in keys) and self._keyboard.key().lower() == "v"
        if pressed:
            self.screen.open = not self.screen.open
        else:
            end = time.monotonic() + _FASTEST
            while not self._hidden and not self._over and time.monotonic() < end:
                time.sleep(_LOOK)

    def _be_hidden(self) -> None:
        self._live.stop()
        self._gone.set()
        while (self._hidden or not self._in_front) and not self.lost and not self._over:
            self._keyboard.hidden()
            if select.select([self._wakes], [], [], _REFRESH)[0]:
                os.read(self._wakes, 4096)
        if not self.lost and not self._over:
            self._gone.clear()
            self._live = _Above(self._console, self.screen)
            self._live.start()

    @property
    def _in_front(self) -> bool:
        """Whether the run is in the foreground of its terminal."""
        try:
            return os.tcgetpgrp(self._console.file.fileno()) == os.getpgrp()
        except (OSError, ValueError):  # not the terminal that controls this process
            return True

    def _print_notes(self) -> None:
        while self._notes:
            self._console.print(Text(self._notes.popleft()), soft_wrap=True)


class _Above(Live):
    """A live display; the handlers of loggers that were made before also write above it."""

    def __init__(self, console: Console, screen: Screen) -> None:
        super().__init__(screen, console=console, auto_refresh=False, transient=True)
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self, refresh: bool = False) -> None:
        """Starts."""
        before = sys.stdout, sys.stderr
        super().start(refresh)
        kept.extend((sys.stdout, sys.stderr))
        for handler in _handlers():
            if handler.stream in before:
                self._moved.append((handler, handler.setStream(sys.stderr)))

    def stop(self) -> None:
        """Stops."""
        super().stop()
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved = []


def _handlers() -> list[logging.StreamHandler[Any]]:
    """Returns the handlers of all loggers that write to a stream."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    found = {id(h): h for logger in loggers for h in getattr(logger, "handlers", ())}
    return [h for h in found.values() if isinstance(h, logging.StreamHandler)]


def note(text: str) -> None:
    """Writes a line to stderr, or above the panel; a signal handler may call it."""
    if _panels:
        _panels[-1].say(text)
    else:
        os.write(2, f"\n{text}\n".encode())


_panels: list[Panel] = []
"""Those that are shown."""
