"""A cache of a function's results that is bounded in bytes."""

from __future__ import annotations

import dataclasses
import sys
import threading
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

    The results are in two generations. A full young generation becomes the old one, and the old one
    is dropped; what is used again moves back to the young one. So a frequent result is found
    without a lock.

    Args:
        function: A function of positional, hashable arguments.
        most: Bytes of all arguments and results that are kept.
    """

    def __init__(self, function: Callable[..., R], most: int) -> None:
        self._function, self._most = function, most
        self._young: dict[Any, tuple[R, int]] = {}
        self._old: dict[Any, tuple[R, int]] = {}
        self._lock = threading.Lock()
        self._bytes = [0, 0]

    @property
    def bytes(self) -> int:
        """Estimated bytes of the entries."""
        return sum(self._bytes)

    def __call__(self, *args: Any) -> R:
        """Returns the result for the arguments."""
        found = self._young.get(args)
        if found is not None:
            return found[0]
        found = self._old.get(args)
        if found is None:
            result = self._function(*args)
            found = result, _ENTRY + _size(args) + _size(result)
        if found[1] * _SHARE <= self._most:
            with self._lock:
                self._keep(args, found)
        return found[0]

    def _keep(self, args: Any, entry: tuple[R, int]) -> None:
        if args in self._young:
            return
        if 2 * (self._bytes[0] + entry[1]) > self._most:
            self._young, self._old = {}, self._young
            self._bytes = [0, self._bytes[0]]
        self._young[args] = entry
        self._bytes[0] += entry[1]
        if self._old.pop(args, None) is not None:
            self._bytes[1] -= entry[1]


def _size(value: Any) -> int:
    """Returns about the bytes of texts, numbers, and tuples and records of them."""
    if isinstance(value, (tuple, frozenset)):
        if value and all(type(item) is int for item in value):
            return sys.getsizeof(value) + _NUMBER * len(value)
        return sys.getsizeof(value) + sum(map(_size, value))
    if dataclasses.is_dataclass(value):
        return sum(_size(getattr(value, f.name)) for f in dataclasses.fields(value))
    return sys.getsizeof(value)
