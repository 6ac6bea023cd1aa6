"""A read-only SQLite database with bounded work per query."""

from __future__ import annotations

import sqlite3
from typing import Any

# Deterministic functions only: no clock, no randomness, no files.
_FUNCTION_NAMES = """
abs avg char coalesce count cume_dist dense_rank first_value format glob group_concat hex ifnull
instr lag last_value lead length like lower ltrim max min nth_value ntile nullif percent_rank printf
quote rank replace round row_number rtrim sign string_agg substr substring sum total trim typeof
unicode upper
"""
_FUNCTIONS = frozenset((*_FUNCTION_NAMES.split(), "iif"))  # codespell:ignore iif
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
MOST_ROWS = 200

Row = tuple[Any, ...]


class SQLError(Exception):
    """A query was refused, failed or took too long; the message is for the policy."""


class Database:
    """An SQLite database in memory that is read-only after its creation.

    Args:
        script: Statements that create it.
    """

    def __init__(self, script: str) -> None:
        """Creates the database, then makes it read-only."""
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
        self._connection.executescript(script)
        self._connection.set_authorizer(_authorize)
        self._connection.set_progress_handler(self._count, 1000)
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._left = 0

    def query(self, sql: str, *values: str) -> tuple[list[str], list[Row]]:
        """Returns the columns and at most 201 rows; `values` replace the `?` of the statement.

        Raises:
            SQLError: It is not a single read-only statement, or it takes too much work.
        """
        self._left = _STEPS // 1000
        try:
            cursor = self._connection.execute(sql, values)
            rows = cursor.fetchmany(MOST_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            raise SQLError("too much work" if self._left < 0 else str(error)) from error
        if cursor.description is None:
            raise SQLError("the statement is empty")
        cursor.close()
        return [column[0] for column in cursor.description or ()], rows

    def close(self) -> None:
        """Frees the database."""
        self._connection.close()

    def _count(self) -> int:
        self._left -= 1
        return int(self._left < 0)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY
