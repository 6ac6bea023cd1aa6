"""A read-only SQLite database for queries that anyone may have written.

A query runs in a child process with limits on time, memory and output. The CPU limit kills the
child, because SQLite calls no handler within an operation such as one call of `printf`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.errors import EnvironmentCrashError, ToolServerError
from gspo_env.runtime.limited import LimitedPool
from gspo_envs.tools import sqlite_child
from gspo_envs.tools.sqlite_child import MAX_ROWS as MAX_ROWS
from gspo_envs.tools.sqlite_child import SLOW_NAMES

if TYPE_CHECKING:
    from gspo_env.sandbox.session import SandboxSession

Row = tuple[Any, ...]

_MAX_REPLY = 1 << 20
_CPU_SECONDS = 0.5
"""CPU time of one query."""
_ADDRESS_SPACE = 96 << 20
"""Bytes by which the address space of the child may grow, on Linux."""
_MAX_SHORT = 1000
_SLOW = re.compile(rf"\|\||\b(?:with|{'|'.join(SLOW_NAMES.split())})\b", re.IGNORECASE)


class SQLError(Exception):
    """A query was refused, failed or took too long; the message is for the policy."""


class Database:
    """An SQLite database in memory.

    Args:
        script: Statements that create it.
        session: A sandbox in which queries run, in place of a child process with limits.
    """

    def __init__(self, script: str, session: SandboxSession | None = None) -> None:
        """Creates the database."""
        self._session = session
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.executescript(script)
        self._copy = self._connection.serialize()
        if not _open:  # so that the first query need not wait for the start
            _children.start()
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
        if self._session is not None:
            reply = _ask_inside(self._session, json.dumps([sql, values]), self._copy)
        else:
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


_open: weakref.WeakSet[Database] = weakref.WeakSet()
_children = LimitedPool(sqlite_child.__file__, memory=_ADDRESS_SPACE, longest=_MAX_REPLY)
end_idle = _children.end_idle
_slow_queries = threading.BoundedSemaphore(os.cpu_count() or 1)
"""Limits the processes that may take long; a short query never waits for them."""


def _ask(request: bytes, database: bytes) -> dict[str, Any]:
    """Asks a child; a query that its child does not survive has an error."""
    try:
        answer = _children.ask(_CPU_SECONDS, request, database)
    except OSError as error:
        raise ToolServerError(f"no process answers the query: {error}") from error
    if not _open:  # the last database was closed in the meantime
        end_idle()
    reply: dict[str, Any] = {"error": "too much work"} if answer is None else json.loads(answer)
    return reply


def _ask_inside(session: SandboxSession, request: str, database: bytes) -> dict[str, Any]:
    """Asks in a sandbox, by the same code."""
    source = f"{Path(sqlite_child.__file__).read_text()}\n{_INSIDE}"
    result = session.exec(["python3", "-I", "-c", source, request], stdin=database, seconds=10.0)
    reply: dict[str, Any] = {"error": "too much work"}
    if result.stopped is None and result.exit_code not in (0, 137):
        raise EnvironmentCrashError(f"SQL: the sandbox has no answer: {result.stderr[-200:]}")
    return json.loads(result.stdout) if result.ok else reply


_INSIDE = """import sys
sys.stdout.buffer.write(answer(sys.argv[1].encode(), sys.stdin.buffer.read()))"""


def _forget() -> None:
    global _slow_queries
    _slow_queries = threading.BoundedSemaphore(os.cpu_count() or 1)


os.register_at_fork(after_in_child=_forget)


def _cell(value: Any) -> Any:
    return bytes.fromhex(value["x"]) if isinstance(value, dict) else value
