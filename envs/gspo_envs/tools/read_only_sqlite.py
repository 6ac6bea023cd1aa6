"""A read-only SQLite database; untrusted queries run in child processes with bounded resources."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from gspo_env.errors import ToolServerError
from gspo_envs.tools.sqlite_child import HEAD, LONG_FUNCTIONS, MOST_ROWS, receive

__all__ = ["MOST_ROWS", "Database", "Row", "SQLError", "is_short"]

Row = tuple[Any, ...]

_WALL_SECONDS = 20.0
"""Maximum time of one query, of which the CPU limit of the child leaves little on an idle machine.
It includes the start of the child."""
_KILL_SECONDS = 20.0
"""Time in which the system has to end a child that was killed."""
_MOST_REPLY = 1 << 20
_LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""The only environment variables of a child."""
_SHORT = 1000
_LONG = re.compile(rf"\|\||\b(?:with|{'|'.join(sorted(LONG_FUNCTIONS))})\b", re.IGNORECASE)


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
        if not _OPEN:  # so that the first query need not wait for the start
            _idle.append(_Child())
        _OPEN.add(self)

    def select(self, sql: str) -> list[Row]:
        """Returns all rows of a statement of ours, which runs in this process without limits."""
        return self._connection.execute(sql).fetchall()

    def query(self, sql: str, *values: str) -> tuple[list[str], list[Row]]:
        """Returns the columns and at most 201 rows; `values` replace the `?` of the statement.

        The statement may come from anyone: it runs in a child process, on a copy of the database.

        Raises:
            SQLError: It is not a single read-only statement, or it takes too much work.
            ToolServerError: No process can be started for it, or two were killed from outside.
        """
        with contextlib.nullcontext() if is_short(sql) else _LONG_QUERIES:
            reply = _ask(json.dumps([sql, values]).encode(), self._copy)
        if "error" in reply:
            raise SQLError(str(reply["error"]))
        return reply["columns"], [tuple(map(_cell, row)) for row in reply["rows"]]

    def close(self) -> None:
        """Frees the database; the last one also ends the child processes."""
        self._connection.close()
        _OPEN.discard(self)
        if not _OPEN:
            _end_idle()


def is_short(sql: str) -> bool:
    """Returns whether the limits end a query within milliseconds.

    The number of steps is limited, so only a step that can itself take long is a danger: of the
    functions that make or search text, and of preparing a statement whose tables expand.
    """
    return len(sql) <= _SHORT and _LONG.search(sql) is None


class _Child:
    """A process that answers one query at a time."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("sqlite_child.py"))
        self._line, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", program, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _LIBRARIES if name in os.environ},
            )
        except OSError as error:
            self._line.close()
            raise ToolServerError(f"no process for queries can be started: {error}") from error
        finally:
            theirs.close()

    def ask(self, request: bytes, database: bytes) -> dict[str, Any] | None:
        """Returns the reply; None if the query used up its time, or crashed the process.

        Raises:
            ToolServerError: The process ended for another reason.
        """
        self._line.settimeout(_WALL_SECONDS)
        try:
            self._line.sendall(HEAD.pack(len(request), len(database)) + request + database)
            head = receive(self._line, HEAD.size)
            size = HEAD.unpack(head)[0] if len(head) == HEAD.size else 0
            reply = receive(self._line, min(size, _MOST_REPLY))
            if reply and len(reply) == size:
                answer: dict[str, Any] = json.loads(reply)
                return answer
        except TimeoutError:
            self.end()
            return None
        except (OSError, ValueError):
            pass  # the exit code tells more
        code = self.end()
        if code in (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            return None
        raise ToolServerError(f"the process for queries ended with {code}")

    def leave(self) -> None:
        """Closes this process's end of the socket."""
        self._line.close()

    def end(self) -> int:
        """Ends the process and returns its exit code."""
        self.leave()
        try:
            return int(self._process.wait(0.2))  # it ends by itself when the socket is closed
        except subprocess.TimeoutExpired:
            self._process.kill()
            return int(self._process.wait(_KILL_SECONDS))


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()
_LONG_QUERIES = threading.BoundedSemaphore(os.cpu_count() or 1)
"""Limits the processes that may take long; a short query never waits for them."""
_idle: list[_Child] = []


def _ask(request: bytes, database: bytes) -> dict[str, Any]:
    """Asks an idle child or a new one; a query that a child did not survive is an error of it."""
    child, reply = _take(), None
    try:
        reply = child.ask(request, database)
    except ToolServerError:  # something else ended it, perhaps while it was idle
        child = _Child()
        reply = child.ask(request, database)
    if reply is None:
        return {"error": "too much work"}
    _idle.append(child)
    if not _OPEN:  # the last database was closed in the meantime
        _end_idle()
    return reply


def _take() -> _Child:
    try:
        return _idle.pop()
    except IndexError:
        return _Child()


def _end_idle() -> None:
    while _idle:
        with contextlib.suppress(IndexError):  # another thread took it
            _idle.pop().end()


def _forget() -> None:
    """Leaves the children to the process that this one was forked from."""
    global _LONG_QUERIES
    for child in _idle:
        child.leave()
    _idle.clear()
    _LONG_QUERIES = threading.BoundedSemaphore(os.cpu_count() or 1)


atexit.register(_end_idle)
os.register_at_fork(after_in_child=_forget)


def _cell(value: Any) -> Any:
    return bytes.fromhex(value["x"]) if isinstance(value, dict) else value
