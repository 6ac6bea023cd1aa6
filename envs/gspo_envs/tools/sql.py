"""Answer a question about a database: explore its schema, try queries, submit one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.env.base import extract_tag
from gspo_env.errors import ConfigError
from gspo_env.seeding import fingerprint
from gspo_env.tools.tool import format_tool_call, tool
from gspo_env.types import ToolCall
from gspo_envs.text.answer import AnswerEnv, probability
from gspo_envs.tools.sqlite import MAX_ROWS, Database, Row, SQLError, is_short

if TYPE_CHECKING:
    from gspo_env.sandbox.containers import Containers
    from gspo_env.sandbox.session import SandboxSession

_NAMES = "Ada Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Noa Oli Pia Quin Rosa Sam Tess"
_THINGS = "Amber Birch Cedar Delta Ember Fjord Grove Haven Iris Jade Karst Lotus Maple Nova Onyx"
_THEMES = (
    "people: customers clients buyers; trait: city town; traits: Oslo Lima Cairo Kyoto Porto; "
    "things: products articles goods; value: price cost; links: orders purchases sales; "
    "amount: quantity units pieces",
    "people: students pupils learners; trait: house team; traits: red blue green gold white; "
    "things: courses subjects lessons; value: credits hours; links: results marks grades; "
    "amount: score points",
    "people: readers members visitors; trait: district quarter; "
    "traits: north south east west harbour; things: books titles volumes; value: pages chapters; "
    "links: loans borrowings rentals; amount: days weeks",
)
"""Synonyms for the names of the tables and columns, of which each problem draws one."""
_QUESTIONS = (
    "How many {people} have the {trait} {t}? SELECT COUNT(*) FROM {people} WHERE {trait} = '{t}'",
    "What is the total {amount} in the {links} of {n}? "
    "SELECT SUM(l.{amount}) FROM {links} l JOIN {people} p ON p.id = l.{who} WHERE p.name = '{n}'",
    "Which {people} have {links} with {amount} over {k}? Give each name once. "
    "SELECT DISTINCT p.name FROM {people} p JOIN {links} l ON l.{who} = p.id "
    "WHERE l.{amount} > {k}",
    "Which one of the {things} has the highest total {amount} in the {links}? Give its name. "
    "SELECT t.name FROM {things} t JOIN {links} l ON l.{what} = t.id "
    "GROUP BY t.id ORDER BY SUM(l.{amount}) DESC LIMIT 1",
    "How many {links} belong to the {people} of each {trait} that has any? "
    "Give the {trait} and the number. "
    "SELECT p.{trait}, COUNT(*) FROM {people} p JOIN {links} l ON l.{who} = p.id "
    "GROUP BY p.{trait}",
    "Which {people} have no {links}? Give their names. "
    "SELECT name FROM {people} WHERE id NOT IN (SELECT {who} FROM {links})",
    "What is the average {value} of the {things} in the {links} of {n}? "
    "Count each of the {links} once. "
    "SELECT AVG(t.{value}) FROM {links} l JOIN {things} t ON t.id = l.{what} "
    "JOIN {people} p ON p.id = l.{who} WHERE p.name = '{n}'",
)
"""Questions, each followed by the query that answers it."""
_TABLES = """
CREATE TABLE {people} (id INTEGER PRIMARY KEY, name TEXT, {trait} TEXT);
CREATE TABLE {things} (id INTEGER PRIMARY KEY, name TEXT, {value} INTEGER);
CREATE TABLE {links} (id INTEGER PRIMARY KEY, {who} INTEGER REFERENCES {people}(id), \
{what} INTEGER REFERENCES {things}(id), {amount} INTEGER);
"""
_SCHEMA = "SELECT lower(name), sql FROM sqlite_master WHERE type = 'table'"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    question: str
    gold: str
    tables: tuple[str, ...]
    """The tables that the right query reads, in the order of the schema."""
    names: dict[str, str]


class SQLEnv(AnswerEnv):
    """Answer a question about an SQLite database with tools, then submit the query.

    The first look at each table that the answer needs earns 0.1, the first query with the right
    rows 0.2, and the right query as the answer 1.0. The answer must return the right rows on this
    database and on a hidden one with the same tables and other rows, so a constant copied from an
    observation is wrong.

    Args:
        rows: Rows of the largest table.
        max_turns: Turns before the episode is truncated.
        early_answer: Probability that the noisy demonstrator answers wrongly without trying a
            query.
        sandbox: A container for the queries, `podman:IMAGE` or `docker:IMAGE` with Python in it; by
            default they run in a child process with limits.
    """

    system_prompt = (
        "Answer the question with one SQLite query. Look at the database with the tools, one call "
        "per turn; it cannot be changed. Then answer with <answer>SELECT ...</answer>. The order "
        "of rows does not matter."
    )

    def __init__(
        self,
        rows: int = 40,
        max_turns: int = 12,
        early_answer: float = 0.6,
        sandbox: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Sets the size of the database."""
        super().__init__(max_turns)
        if not 10 <= rows <= 1000:
            raise ConfigError(f"SQL: rows is {rows}, expected 10 to 1000.")
        self.rows, self.early_answer = rows, probability("early_answer", early_answer)
        self._databases: list[Database] = []
        self._schemas: dict[str, str] = {}
        self._box: Containers | None = None
        self._session: SandboxSession | None = None
        if sandbox is not None:
            from gspo_env.sandbox.containers import read_containers

            self._box = read_containers(sandbox, "SQL: sandbox", output_kib=1024)
            self._box.check()
            self.blocking, self.max_copies = True, self._box.at_once

    def blocks(self, action: str) -> bool:
        """Returns whether a query of the action may take long."""
        calls = self.parse_calls(action)
        arguments = [call.arguments.get("sql") for call in calls if isinstance(call, ToolCall)]
        queries = arguments if calls else [extract_tag(action, "answer")]
        return not all(is_short(sql) for sql in queries if isinstance(sql, str))

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a new database and a question that has an answer."""
        self._seen: set[str] = set()
        self._queried: set[str] = set()
        self._solved = self._listed = False
        if self._box is not None:
            self._end_session()
            self._session = self._box.open()
        while not self._draw():
            pass
        return self._problem.question

    def close(self) -> None:
        """Frees the databases and ends a running episode."""
        self.end_episode()
        self._use([])
        self._end_session()

    def abandon(self) -> None:
        """Ends the container of the episode."""
        self._end_session()

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.stop()
            self._session = None

    def _use(self, databases: list[Database]) -> None:
        """Replaces the databases; the new ones exist before the old ones are freed."""
        old, self._databases = self._databases, databases
        for database in old:
            database.close()

    @tool
    def tables(self) -> str:
        """List the tables."""
        self._listed = True
        return ", ".join(self._problem.names[name] for name in ("people", "things", "links"))

    @tool
    def schema(self, table: str) -> str:
        """Show the columns of a table.

        Args:
            table: The table's name.
        """
        return self._schemas.get(table.lower(), "no such table")

    @tool
    def query(self, sql: str) -> str:
        """Run a query and show its first rows.

        Args:
            sql: One SELECT statement.
        """
        self._returned = None
        try:
            columns, rows = self._databases[0].query(sql)
        except SQLError as error:
            return f"SQL error: {error}"
        self._returned = _counted(rows)
        self._queried.add(sql)
        lines = [" | ".join(_shown(cell) for cell in row) for row in (columns, *rows[:10])]
        many = f"more than {MAX_ROWS}" if len(rows) > MAX_ROWS else str(len(rows))
        return "\n".join([*lines, f"({many} row{'s' * (many != '1')})"])

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        """Rewards the first look at a table that is needed, and the right rows."""
        if call.name == "schema":
            table = call.arguments["table"].lower()
            new = table in self._problem.tables and table not in self._seen
            if table in self._schemas:
                self._seen.add(table)
            return 0.1 * new
        if call.name != "query" or self._solved:
            return 0.0
        self._solved = self._returned == self._expected[0]
        return 0.2 * self._solved

    def is_right(self, text: str) -> bool:
        """Compares the rows of the answer on this database and on the hidden one."""
        sql = extract_tag(text, "answer") or ""
        pairs = zip(self._databases, self._expected, strict=True)
        return all(_rows(database, sql) == expected for database, expected in pairs)

    def expert_action(self, noise: float = 0.0) -> str:
        """Lists the tables, reads each, tries the query, answers; with noise, early or wrongly."""
        sql, early = self._problem.gold, self._is_early(noise)
        if early or (noise > 0.0 and self.np_random.random() < noise):
            sql = f"SELECT * FROM {self._problem.tables[0]}"
        if not self._listed:
            return format_tool_call("tables", {})
        for table in self._problem.tables:
            if table not in self._seen:
                return format_tool_call("schema", {"table": table})
        answers = self._solved or early
        return f"<answer>{sql}</answer>" if answers else format_tool_call("query", {"sql": sql})

    @property
    def _task_key(self) -> str:
        return fingerprint(self._problem.question, *self._scripts)

    @property
    def _state_key(self) -> str:
        return repr((self._listed, sorted(self._seen), sorted(self._queried)))

    def _draw(self) -> bool:
        """Draws a problem; False if its answer is empty, ambiguous, or the same on both."""
        self._problem = _draw_problem(self.np_random)
        self._scripts = [
            _draw_script(self.np_random, self._problem.names, self.rows) for _ in range(2)
        ]
        self._use([Database(script, self._session) for script in self._scripts])
        self._schemas = dict(self._databases[0].select(_SCHEMA))
        gold = self._problem.gold
        answers = [_counted(database.select(gold)) for database in self._databases]
        ambiguous = "LIMIT 1" in gold and any(_tied(d, gold) for d in self._databases)
        self._expected = [answer for answer in answers if answer]
        empty = len(self._expected) < 2 or any((None,) in answer for answer in self._expected)
        return not (empty or ambiguous or answers[0] == answers[1])


def _draw_problem(random: np.random.Generator) -> _Problem:
    def draw(words: str) -> str:
        choices = words.split()
        return choices[int(random.integers(len(choices)))]

    theme = _THEMES[int(random.integers(len(_THEMES)))]
    synonyms = dict(part.split(": ") for part in theme.split("; "))
    names = {role: draw(words) for role, words in synonyms.items() if role != "traits"}
    names |= {"who": f"{names['people'][:-1]}_id", "what": f"{names['things'][:-1]}_id"}
    names |= {"traits": synonyms["traits"]}
    values = {"t": draw(names["traits"]), "n": draw(_NAMES), "k": str(int(random.integers(5, 9)))}
    question, _, query = _QUESTIONS[int(random.integers(len(_QUESTIONS)))].partition(" SELECT ")
    query = f"SELECT {query}"
    return _Problem(
        question=question.format(**names, **values),
        gold=query.format(**names, **values),
        tables=tuple(names[k] for k in ("people", "things", "links") if f"{{{k}}} " in f"{query} "),
        names=names,
    )


def _draw_script(random: np.random.Generator, names: dict[str, str], rows: int) -> str:
    """Returns statements that create the three tables, with new rows at each call."""
    lines = [_TABLES.format(**names).strip()]

    def insert(table: str, *values: object) -> None:
        cells = ", ".join(
            f"'{value}'" if isinstance(value, str) else str(value) for value in values
        )
        lines.append(f"INSERT INTO {names[table]} VALUES ({cells});")

    people, things, traits = _NAMES.split(), _THINGS.split(), names["traits"].split()
    for index, name in enumerate(people, 1):
        insert("people", index, name, traits[int(random.integers(len(traits)))])
    for index, name in enumerate(things, 1):
        insert("things", index, name, random.integers(2, 60))
    for index in range(1, rows + 1):
        who, what = random.integers(1, len(people) + 1), random.integers(1, len(things) + 1)
        insert("links", index, who, what, random.integers(1, 11))
    return "\n".join(lines)


def _tied(database: Database, gold: str) -> bool:
    """Returns whether the two highest totals are equal."""
    order = gold.partition("ORDER BY ")[2].partition(" DESC")[0]
    totals = gold.replace("SELECT t.name", f"SELECT {order}", 1).replace("LIMIT 1", "LIMIT 2")
    rows = database.select(totals)
    return len(rows) == 2 and rows[0] == rows[1]


def _rows(database: Database, sql: str) -> Counter[Row] | None:
    """Returns the rows of a query for comparison; None if it fails or returns too many."""
    try:
        return _counted(database.query(sql)[1])
    except SQLError:
        return None


def _counted(rows: list[Row]) -> Counter[Row] | None:
    few = len(rows) <= MAX_ROWS
    return Counter(tuple(_cell(cell) for cell in row) for row in rows) if few else None


def _cell(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    text = "NULL" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
