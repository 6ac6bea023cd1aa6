"""Reads single keys from the terminal while nothing else does, and leaves it as it was.

Keys are read only in the foreground. When other code of this process uses `sys.stdin`, or another
program changes the terminal's settings, the terminal is theirs: no key is read from then on.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

_ENDS = ("SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that end the process at once, unless the program handles them."""
_FLAGS = 3
"""Index of the local flags in what `tcgetattr` returns."""


kept: list[object] = []
"""What stood in for the standard streams. Python's `input` owns no reference to them: it would read
freed memory if they were replaced and freed while it asks for `fileno`."""


class Display(Protocol):
    """What is shown on the terminal."""

    def lose(self) -> None:
        """Goes away for good, since other code reads from the terminal."""

    def hide(self) -> bool:
        """Goes away before the process is stopped by Ctrl-Z; returns whether it has gone.

        It cannot go while the code that a signal has interrupted prints.
        """

    def come_back(self) -> None:
        """Appears again."""

    def show_cursor(self) -> None:
        """Makes the cursor visible, now, before the process ends."""


class Keyboard:
    """The keys of the terminal that is `sys.stdin`, in the main thread's process."""

    def __init__(self, display: Display) -> None:
        """Changes nothing yet; see `start`."""
        self._display = display
        self._pid, self._fd = os.getpid(), -1
        self._saved: list[Any] | None = None
        """The terminal's settings before the first key."""
        self._own: list[Any] = []
        """The flags while keys are read."""
        self._stdin: Any = None
        self._signals: dict[int, Any] = {}
        self._lock = threading.RLock()
        self._held = False
        """Whether a signal is about to end or stop the process, so that no key is read."""
        self._late = deque[int]()
        """The signal that stops the process once the display has gone; who takes it, stops."""

    def start(self) -> bool:
        """Begins to read keys; returns whether there is a keyboard."""
        here = threading.current_thread() is threading.main_thread()
        if termios is None or not here or not _is_terminal(sys.stdin):
            return False
        self._fd, self._stdin = sys.stdin.fileno(), sys.stdin
        sys.stdin = _Watched(self._stdin, self.lose)
        kept.append(sys.stdin)
        wanted = [(getattr(signal, name), self._end) for name in _ENDS]
        for number, handler in [*wanted, (signal.SIGTSTP, self._stop)]:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handler)
                self._signals[number] = handler
        return True

    def ready(self) -> list[int]:
        """Returns what to `select` for keys: nothing in the background."""
        with self._lock:
            if self._held or self._stdin is None or not self._foreground():
                return []
            if self._saved is None and not self._take():
                return []
            return [self._fd]

    def key(self) -> str:
        """Returns the next key; empty if there is none, or the terminal is another program's."""
        with self._lock:
            if not self.ready() or not select.select([self._fd], [], [], 0)[0]:
                return ""
            if termios.tcgetattr(self._fd)[:4] != self._own:
                self.lose()
                return ""
            found = os.read(self._fd, 1).decode("latin-1")
        if not found:  # the terminal was closed
            self.lose()
        return found

    def lose(self) -> None:
        """Reads no key any more, since other code reads from the terminal."""
        if self._stdin is None or os.getpid() != self._pid:
            return
        self.stop()
        self._display.lose()

    def stop(self) -> None:
        """Restores the terminal, `sys.stdin` and the signals."""
        with self._lock:
            self.release()
            if isinstance(sys.stdin, _Watched):
                sys.stdin = self._stdin or sys.stdin
            self._stdin = None
        if threading.current_thread() is not threading.main_thread():
            return  # the handlers do no harm, and only the main thread can remove them
        for number, handler in self._signals.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.SIG_DFL)
        self._signals = {}

    def release(self) -> None:
        """Restores the terminal's settings; `ready` takes it again."""
        saved, self._saved = self._saved, None
        if saved is not None and os.getpid() == self._pid and self._foreground():
            try:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, saved)
            except termios.error:  # the terminal is gone
                return

    def _take(self) -> bool:
        """Makes the terminal give single keys and not echo them; Ctrl-C and the like still work."""
        try:
            saved = termios.tcgetattr(self._fd)
            mine = [*saved]
            mine[_FLAGS] = saved[_FLAGS] & ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(self._fd, termios.TCSADRAIN, mine)
        except termios.error:
            return False
        self._saved, self._own = saved, termios.tcgetattr(self._fd)[:4]
        return True

    def _foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def _end(self, number: int, *_: object) -> None:
        """Restores the terminal, then does what the signal does without a handler."""
        if os.getpid() == self._pid:
            self._give_back()
            self._display.show_cursor()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _stop(self, number: int, *_: object) -> None:
        """Takes the display away and stops, as without a handler; goes on when continued."""
        mine = os.getpid() == self._pid
        if mine:
            if not self._display.hide() and not self._late:
                self._late.append(number)
                return
            self._late.clear()
            self._give_back()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        if mine and number in self._signals:  # continued
            signal.signal(number, self._stop)
            self._held = False
            self._display.come_back()

    def hidden(self) -> None:
        """Stops the process if Ctrl-Z waits for the display, which has gone now."""
        with suppress(IndexError):
            os.kill(self._pid, self._late.pop())

    def _give_back(self) -> None:
        """Restores the terminal's settings for good, also while another thread asks for a key."""
        self._held = True
        free = self._lock.acquire(timeout=1.0)  # a terminal that is halted holds the other thread
        self.release()
        if free:
            self._lock.release()


class _Watched:
    """`sys.stdin`, and a note when somebody is going to read from it."""

    _READS = frozenset(
        {"read", "readline", "readlines", "fileno", "buffer", "detach", "__iter__", "__next__"}
    )

    def __init__(self, stream: Any, used: Callable[[], None]) -> None:
        self._stream, self._used = stream, used

    def __getattr__(self, name: str) -> Any:
        if name in self._READS:
            self._used()
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        self._used()
        return iter(self._stream)

    def __next__(self) -> Any:
        self._used()
        return next(self._stream)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty()) and stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
