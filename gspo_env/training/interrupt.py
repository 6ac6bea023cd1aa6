"""Stops a run on SIGINT, SIGTERM and SIGHUP: after the step that runs, or at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NOTE = b"\ngspo-env: stops after this step and saves it; a second Ctrl-C stops at once\n"


@dataclass(slots=True)
class Interrupt:
    """Whether a run was asked to stop."""

    requested: bool = False
    graceful: bool = False
    """Whether there are steps that could be finished; otherwise the first signal stops at once."""

    def __call__(self, *_: object) -> None:
        """Handles a signal.

        Raises:
            KeyboardInterrupt: It is the second one, or there is no step to finish.
        """
        if self.requested or not self.graceful:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, _NOTE)  # a handler may not enter `print` again


@contextmanager
def stop_on_signals() -> Iterator[Interrupt]:
    """Handles SIGINT, SIGTERM and SIGHUP inside the context.

    A signal that is ignored or that has another handler than Python's own stays as it is, and so do
    all signals outside of the main thread, where Python allows no handler.
    """
    interrupt = Interrupt()
    usual: dict[signal.Signals, object] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {
        number: handler
        for number, handler in usual.items()
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) is handler
    }
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
