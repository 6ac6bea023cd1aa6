"""Answers queries in a child process; `gspo_env.runtime.limited` loads this file.

It uses the standard library only. A request brings the query and the database, so nothing survives
from one query to the next.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Sequence
from typing import Any

MAX_ROWS = 200
_MAX_CHARACTERS = 1 << 16
"""Maximum size of a result: the characters of its cells and column names."""
_MAX_STEPS = 500_000
"""Steps of SQLite's virtual machine per query."""
_HEAP = 32 << 20
"""Bytes that SQLite may allocate, so that the same query always fails at the same place."""
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
SLOW_NAMES = """
char format glob group_concat hex instr like ltrim printf quote replace rtrim string_agg substr
substring trim
"""
"""Functions of which one call can take long, or return long text."""
_OTHER_NAMES = """
abs avg coalesce count cume_dist dense_rank first_value ifnull lag last_value lead length lower max
min nth_value ntile nullif percent_rank rank round row_number sign sum total typeof unicode upper
"""
_FUNCTIONS = {*SLOW_NAMES.split(), *_OTHER_NAMES.split(), "iif"}  # codespell:ignore iif
"""The allowed functions. All are deterministic: no clock, no randomness, no files."""


def answer(request: bytes, database: bytes) -> bytes:
    """Returns the reply to a query and its values, in JSON."""
    return json.dumps(_reply(database, *json.loads(request))).encode()


def _reply(database: bytes, sql: str, values: Sequence[str]) -> dict[str, Any]:
    """Runs a query on a copy of the database."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"PRAGMA hard_heap_limit = {_HEAP}")
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
