"""A cache of a function's results that is bounded in bytes."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

R = TypeVar("R")

_ENTRY = 600
"""Bytes of an entry besides its arguments and result."""
_NUMBER = 40
"""Bytes of an integer in a tuple, its place included."""
_SHARE = 8
"""An entry has at most this part of the cache, so that one does not push out all others."""


class BoundedCache(Generic[R]):
    """Calls a function and keeps its last results, as many as fit.

    Args:
        function: A function of positional, hashable arguments.
        most: Bytes of all arguments and results that are kept.
    """

    def __init__(self, function: Callable[..., R], most: int) -> None:
        self._function, self._most = function, most
        self._entries: OrderedDict[Any, tuple[R, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0
        """Estimated bytes of the entries."""

    def __call__(self, *args: Any) -> R:
        """Returns the result for the arguments."""
        with self._lock:
            if args in self._entries:
                self._entries.move_to_end(args)
                return self._entries[args][0]
        result = self._function(*args)
        size = _ENTRY + _size(args) + _size(result)
        if size * _SHARE > self._most:
            return result
        with self._lock:
            if args not in self._entries:
                self._entries[args] = result, size
                self.bytes += size
            while self.bytes > self._most:
                self.bytes -= self._entries.popitem(last=False)[1][1]
        return result


def _size(value: Any) -> int:
    """Returns about the bytes of texts, numbers, and tuples and records of them."""
    if isinstance(value, (tuple, frozenset)):
        if value and all(type(item) is int for item in value):
            return sys.getsizeof(value) + _NUMBER * len(value)
        return sys.getsizeof(value) + sum(map(_size, value))
    if dataclasses.is_dataclass(value):
        return sum(_size(getattr(value, f.name)) for f in dataclasses.fields(value))
    return sys.getsizeof(value)
