"""The program that runs a policy's queries; uses the standard library only.

`read_only_sqlite` starts it with `python -I -S`, the process id of its parent as the
argument, and a socket as standard input. A request has a database and a query, so nothing is kept
from one query to the next. The CPU limit kills the process, because no handler of SQLite runs in
the middle of an operation such as one call of `printf`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sqlite3
import struct
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

HEAD = struct.Struct("!II")
"""Lengths of the request and of the database that follow; a reply has only the first."""
CPU_SECONDS = 0.5
"""CPU time of one query."""
MOST_ROWS = 200
MOST_CHARACTERS = 1 << 16
"""Maximum size of a result: the characters of its cells and column names."""
_LONG_NAMES = """
char format glob group_concat hex instr like ltrim printf quote replace rtrim string_agg substr
substring trim
"""
LONG_FUNCTIONS = frozenset(_LONG_NAMES.split())
"""Functions of which one call can take long, or return long text."""

# Deterministic functions only: no clock, no randomness, no files.
_FUNCTION_NAMES = """
abs avg coalesce count cume_dist dense_rank first_value ifnull lag last_value lead length lower max
min nth_value ntile nullif percent_rank rank round row_number sign sum total typeof unicode upper
"""
_FUNCTIONS = LONG_FUNCTIONS.union((*_FUNCTION_NAMES.split(), "iif"))  # codespell:ignore iif
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 4096,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4096,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 64,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 64,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 16,
    sqlite3.SQLITE_LIMIT_COLUMN: 64,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 20_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
_STEPS = 500_000
"""Maximum steps of SQLite's virtual machine per query."""
_HEAP = 32 << 20
"""Bytes that SQLite may allocate, so that the same query always fails at the same place."""
_SPACE = 96 << 20
"""Bytes by which the address space of the process may grow, on Linux."""


def main() -> NoReturn:
    """Answers requests until the parent closes its end of the socket or dies."""
    line = socket.socket(fileno=0)
    events = _watch(line, int(sys.argv[1]))
    _set_limits()
    while True:
        ready = events.poll()
        if any(fd != 0 for fd, _ in ready) or not (head := receive(line, HEAD.size)):
            os._exit(0)
        size, length = HEAD.unpack(head)
        request = json.loads(receive(line, size))
        database = receive(line, length)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = json.dumps(_reply(database, *request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        line.sendall(HEAD.pack(len(reply), 0) + reply)


def receive(line: socket.socket, size: int) -> bytes:
    """Reads a number of bytes; fewer only if the other side closed the socket."""
    data = bytearray()
    while len(data) < size and (part := line.recv(size - len(data))):
        data += part
    return bytes(data)


def _watch(line: socket.socket, parent: int) -> select.poll:
    """Returns a poll object that reports requests and the end of the parent."""
    events = select.poll()
    events.register(line, select.POLLIN)
    with contextlib.suppress(AttributeError, OSError):  # before Linux 5.3 the socket's end must do
        events.register(os.pidfd_open(parent), select.POLLIN)  # type: ignore[attr-defined,unused-ignore]
    if os.getppid() != parent:
        os._exit(0)
    return events


def _set_limits() -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _SPACE, used + _SPACE))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    connection = sqlite3.connect(":memory:")
    connection.execute(f"PRAGMA hard_heap_limit = {_HEAP}")
    connection.close()


def _reply(database: bytes, sql: str, values: Sequence[str]) -> dict[str, Any]:
    try:
        with contextlib.closing(_Query(database)) as query:
            columns, rows = query.run(sql, values)
    except MemoryError:
        return {"error": "too much memory"}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return {"error": str(error)}
    return {"columns": columns, "rows": rows}


class _Query:
    """A connection to a copy of a database, for one query."""

    def __init__(self, database: bytes) -> None:
        self._connection = sqlite3.connect(":memory:")
        self._connection.deserialize(database)
        self._connection.execute("PRAGMA temp_store = MEMORY")
        self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
        self._connection.set_authorizer(_authorize)
        self._connection.set_progress_handler(self._count, 1000)
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._left = _STEPS // 1000

    def close(self) -> None:
        self._connection.close()

    def run(self, sql: str, values: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
        """Returns the columns and at most 201 rows, with bytes as `{"x": hex}`."""
        try:
            cursor = self._connection.execute(sql, values)
            if cursor.description is None:
                raise ValueError("the statement is empty")
            columns = [column[0] for column in cursor.description]
            rows: list[list[Any]] = []
            size = sum(map(len, columns))
            while len(rows) <= MOST_ROWS and (row := cursor.fetchone()) is not None:
                rows.append([{"x": c.hex()} if isinstance(c, bytes) else c for c in row])
                size += sum(len(cell) for cell in row if isinstance(cell, (str, bytes)))
                if size > MOST_CHARACTERS:
                    raise ValueError("the result is too large")
        except sqlite3.Error as error:
            if self._left < 0:
                raise ValueError("too much work") from error
            raise
        return columns, rows

    def _count(self) -> int:
        self._left -= 1
        return int(self._left < 0)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


if __name__ == "__main__":
    main()
