"""A read-only SQLite database for queries that anyone may have written.

A query runs in a child process with limits on time, memory and output. The child is this file as a
program, which uses the standard library only: `python -I -S`, the process id of its parent as the
argument, and a socket as standard input. A request brings the query and the database, so nothing
survives from one query to the next. The CPU limit kills the child, because SQLite calls no handler
within an operation such as one call of `printf`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

if __name__ != "__main__":
    from gspo_env.errors import ToolServerError

Row = tuple[Any, ...]

MAX_ROWS = 200
_MAX_CHARACTERS = 1 << 16
"""Maximum size of a result: the characters of its cells and column names."""
_MAX_REPLY = 1 << 20
_CPU_SECONDS = 0.5
"""CPU time of one query."""
_WALL_SECONDS = 20.0
"""Wall-clock time of one query, including the start of the child."""
_KILL_SECONDS = 20.0
"""Time that the system has to end a child that was killed."""
_MAX_STEPS = 500_000
"""Steps of SQLite's virtual machine per query."""
_HEAP = 32 << 20
"""Bytes that SQLite may allocate, so that the same query always fails at the same place."""
_ADDRESS_SPACE = 96 << 20
"""Bytes by which the address space of the child may grow, on Linux."""
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
_SLOW_NAMES = """
char format glob group_concat hex instr like ltrim printf quote replace rtrim string_agg substr
substring trim
"""
"""Functions of which one call can take long, or return long text."""
_OTHER_NAMES = """
abs avg coalesce count cume_dist dense_rank first_value ifnull lag last_value lead length lower max
min nth_value ntile nullif percent_rank rank round row_number sign sum total typeof unicode upper
"""
_FUNCTIONS = {*_SLOW_NAMES.split(), *_OTHER_NAMES.split(), "iif"}  # codespell:ignore iif
"""The allowed functions. All are deterministic: no clock, no randomness, no files."""
_MAX_SHORT = 1000
_SLOW = re.compile(rf"\|\||\b(?:with|{'|'.join(_SLOW_NAMES.split())})\b", re.IGNORECASE)
_LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""The only environment variables of a child."""


class SQLError(Exception):
    """A query was refused, failed or took too long; the message is for the policy."""


class Database:
    """An SQLite database in memory.

    Args:
        script: Statements that create it.
    """

    def __init__(self, script: str) -> None:
        """Creates the database."""
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.executescript(script)
        self._copy = self._connection.serialize()
        if not _open:  # so that the first query need not wait for the start
            _idle.append(_Child())
        _open.add(self)

    def select(self, sql: str) -> list[Row]:
        """Returns all rows of a trusted statement, which runs in this process without limits."""
        return self._connection.execute(sql).fetchall()

    def query(self, sql: str, *values: str) -> tuple[list[str], list[Row]]:
        """Returns the columns and at most 201 rows; `values` replace the `?` of the statement.

        The statement may come from anyone: it runs in a child process, on a copy of the database.

        Raises:
            SQLError: It is not a single read-only statement, or it takes too much work.
            ToolServerError: No process can be started for it, or two were killed from outside.
        """
        with contextlib.nullcontext() if is_short(sql) else _slow_queries:
            reply = _ask(json.dumps([sql, values]).encode(), self._copy)
        if "error" in reply:
            raise SQLError(str(reply["error"]))
        return reply["columns"], [tuple(map(_cell, row)) for row in reply["rows"]]

    def close(self) -> None:
        """Frees the database; the last one also ends the child processes."""
        self._connection.close()
        _open.discard(self)
        if not _open:
            end_idle()


def is_short(sql: str) -> bool:
    """Returns whether the limits end a query within milliseconds.

    The number of steps is limited, so only a single step can take long: functions that make or
    search text, and preparing a statement whose tables expand.
    """
    return len(sql) <= _MAX_SHORT and _SLOW.search(sql) is None


class _Child:
    """A process that answers one query at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={name: os.environ[name] for name in _LIBRARIES if name in os.environ},
                )
            except OSError as error:
                raise ToolServerError(f"no process for queries can be started: {error}") from error

    def ask(self, request: bytes, database: bytes) -> dict[str, Any] | None:
        """Returns the reply; None if the query used up its time, or crashed the process.

        Raises:
            ToolServerError: The process ended for another reason.
        """
        with contextlib.suppress(EOFError, OSError, ValueError):  # the exit code tells more
            self.connection.send_bytes(request)
            self.connection.send_bytes(database)
            if not self.connection.poll(_WALL_SECONDS):
                self.end()
                return None
            reply: dict[str, Any] = json.loads(self.connection.recv_bytes(_MAX_REPLY))
            return reply
        code = self.end()
        if code in (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            return None
        raise ToolServerError(f"the process for queries ended with {code}")

    def end(self) -> int:
        """Ends the process and returns its exit code."""
        self.connection.close()
        try:
            return int(self._process.wait(0.2))  # it exits when the socket is closed
        except subprocess.TimeoutExpired:
            self._process.kill()
            return int(self._process.wait(_KILL_SECONDS))


_open: weakref.WeakSet[Database] = weakref.WeakSet()
_idle: list[_Child] = []
_slow_queries = threading.BoundedSemaphore(os.cpu_count() or 1)
"""Limits the processes that may take long; a short query never waits for them."""


def _ask(request: bytes, database: bytes) -> dict[str, Any]:
    """Asks an idle child or a new one; a query that its child does not survive has an error."""
    child = _take() or _Child()
    try:
        reply = child.ask(request, database)
    except ToolServerError:  # something else ended it, perhaps while it was idle
        child = _Child()
        reply = child.ask(request, database)
    if reply is None:
        return {"error": "too much work"}
    _idle.append(child)
    if not _open:  # the last database was closed in the meantime
        end_idle()
    return reply


def _take() -> _Child | None:
    with contextlib.suppress(IndexError):
        return _idle.pop()
    return None


def end_idle() -> None:
    """Ends the child processes that no query uses."""
    while child := _take():
        child.end()


def _forget() -> None:
    """Leaves the children to the process that this one was forked from."""
    global _slow_queries
    _slow_queries = threading.BoundedSemaphore(os.cpu_count() or 1)
    while child := _take():
        child.connection.close()


os.register_at_fork(after_in_child=_forget)


def _cell(value: Any) -> Any:
    return bytes.fromhex(value["x"]) if isinstance(value, dict) else value


def main() -> NoReturn:
    """Answers requests in a child until the parent closes its end of the socket or dies."""
    connection, parent = Connection(0), int(sys.argv[1])
    sources: list[Any] = [connection]
    with contextlib.suppress(AttributeError, OSError):  # before Linux 5.3 the socket's end must do
        sources.append(os.pidfd_open(parent))  # type: ignore[attr-defined,unused-ignore]
    _set_limits()
    while os.getppid() == parent and wait(sources) == [connection]:
        try:
            request, database = json.loads(connection.recv_bytes()), connection.recv_bytes()
        except (EOFError, OSError):
            break
        signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
        reply = json.dumps(_reply(database, *request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.send_bytes(reply)
    os._exit(0)


def _set_limits() -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + _ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    connection = sqlite3.connect(":memory:")
    connection.execute(f"PRAGMA hard_heap_limit = {_HEAP}")
    connection.close()


def _reply(database: bytes, sql: str, values: Sequence[str]) -> dict[str, Any]:
    """Runs a query on a copy of the database."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        steps = iter(range(_MAX_STEPS // 1000))
        connection.deserialize(database)
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(lambda: next(steps, None) is None, 1000)
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        try:
            return _fetch(connection.execute(sql, values))
        except MemoryError:
            return {"error": "too much memory"}
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            interrupted = getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT"
            return {"error": "too much work" if interrupted else str(error)}


def _fetch(cursor: sqlite3.Cursor) -> dict[str, Any]:
    """Returns the columns and at most 201 rows, with bytes as `{"x": hex}`."""
    if cursor.description is None:
        raise ValueError("the statement is empty")
    columns = [column[0] for column in cursor.description]
    rows: list[list[Any]] = []
    size = sum(map(len, columns))
    while len(rows) <= MAX_ROWS and (row := cursor.fetchone()) is not None:
        rows.append([{"x": c.hex()} if isinstance(c, bytes) else c for c in row])
        size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
        if size > _MAX_CHARACTERS:
            raise ValueError("the result is too large")
    return {"columns": columns, "rows": rows}


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    reads = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
    calls = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS
    return sqlite3.SQLITE_OK if reads or calls else sqlite3.SQLITE_DENY


if __name__ == "__main__":
    main()
