"""Messages between processes: JSON with its length before it, read until a deadline."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_HEAD = struct.Struct("!Q")
MOST_BYTES = 64 * 2**20
"""Maximum size of a message."""
_SLICE = 0.5
"""Seconds between two looks at whether the other process still runs."""


def send(descriptor: int, message: object) -> None:
    """Writes a message.

    Raises:
        OSError: Nobody reads.
    """
    data = json.dumps(message, default=_plain).encode()
    view = memoryview(_HEAD.pack(len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(
    descriptor: int, timeout: float | None = None, alive: Callable[[], bool] = lambda: True
) -> Any:
    """Reads a message.

    Args:
        descriptor: The end of a pipe.
        timeout: Seconds that it may take.
        alive: Whether the writer still runs; asked now and then.

    Raises:
        EOFError: The writer ended.
        TimeoutError: It took longer.
        ValueError: The message is too long or no JSON.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    (size,) = _HEAD.unpack(_read(descriptor, _HEAD.size, deadline, alive))
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_read(descriptor, size, deadline, alive))


def _read(descriptor: int, size: int, deadline: float | None, alive: Callable[[], bool]) -> bytes:
    data = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(data) < size:
        left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError
        if poll.poll(1000 * left):
            part = os.read(descriptor, min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        elif not alive():
            raise EOFError
    return bytes(data)


def _plain(value: Any) -> Any:
    """Returns what JSON can write of a value; an object without such a form is its `repr`."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return list(value)
    return repr(value)[:1000]
