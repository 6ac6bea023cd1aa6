"""Calls whose results are futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """Gives a future the result of a call, or what it raises; a cancelled one needs no call."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # for whoever waits
        future.set_exception(error)
        del future  # this frame, which the error keeps, would keep the error
    else:
        future.set_result(result)


def run_in_daemon(call: Callable[[], T], name: str) -> Future[T]:
    """Runs a call in a daemon thread, whose end the process does not wait for."""
    future: Future[T] = Future()
    threading.Thread(target=fulfil, args=(future, call), name=name, daemon=True).start()
    return future
