"""SQL, Wordle and the Python tool: correct answers, rewards, and attempts to cheat."""

import os
import string
from typing import Any

import pytest
from support.jails import require_isolation

from gspo_env import format_tool_call, make_env
from gspo_env.errors import ConfigError
from gspo_env.sandbox import Sandbox, find_missing
from gspo_envs.text.wordle import WORDS, mark
from gspo_envs.tools.sqlite import Database, SQLError


def call(env, name, **arguments):
    observation, reward, *_ = env.step(format_tool_call(name, arguments))
    return observation, reward


# SQL


@pytest.fixture
def database():
    return Database("CREATE TABLE t (x INTEGER, y TEXT); INSERT INTO t VALUES (1, 'a'), (2, 'b');")


@pytest.mark.parametrize(
    "sql",
    [
        *("INSERT INTO t VALUES (3, 'c')", "DROP TABLE t", "CREATE TEMP TABLE u (x)"),
        *("ATTACH 'other.db' AS other", "PRAGMA writable_schema = 1", "VACUUM INTO 'copy.db'"),
        *("BEGIN", "SELECT load_extension('x')", "SELECT random()", "SELECT CURRENT_TIMESTAMP"),
        *("SELECT * FROM pragma_database_list", "SELECT 1; DROP TABLE t"),
        *("WITH c AS (SELECT 1) DELETE FROM t", "", "SELECT '\0'", "SELECT '\ud800'"),
        *("SELECT zeroblob(1e9)", "SELECT * FROM nowhere"),
        "SELECT " + "(" * 1000 + "1" + ")" * 1000,
    ],
)
def test_all_but_reading_is_an_error_and_changes_nothing(database, sql, in_folder):
    with pytest.raises(SQLError):
        database.query(sql)
    assert database.query("SELECT * FROM t")[1] == [(1, "a"), (2, "b")]
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT max(x), upper(y) FROM t", [(2, "B")]),
        ("SELECT y, row_number() OVER (ORDER BY x DESC) FROM t ORDER BY y", [("a", 2), ("b", 1)]),
        ("WITH RECURSIVE c(n) AS (SELECT 1 UNION SELECT n + 1 FROM c LIMIT 3) SELECT * FROM c",
         [(1,), (2,), (3,)]),
        ("SELECT name FROM sqlite_master", [("t",)]),
        ("SELECT CAST(x'ff' AS TEXT)", [("\ufffd",)]),
        ("SELECT count(*) FROM t WHERE y LIKE '%a%a%a%a%a%a%a%a%a%b'", [(0,)]),
    ],
)  # fmt: skip
def test_reading_is_allowed(database, sql, rows):
    assert database.query(sql)[1] == rows


def test_sql_pays_each_needed_table_the_right_rows_and_the_answer_once():
    env: Any = make_env("gspo/SQL-v0")
    env.reset(seed=0)
    problem = env.unwrapped._problem
    gold, needed = problem.gold, problem.tables
    spare = next(problem.names[k] for k in ("people", "things", "links")
                 if problem.names[k] not in needed)  # fmt: skip
    listed, reward = call(env, "tables")
    assert set(listed.split(", ")) == {*needed, spare}
    assert reward == 0.0
    assert call(env, "schema", table=spare)[1] == 0.0
    assert call(env, "schema", table="x' OR 1 --") == ("no such table", 0.0)
    for table in needed:
        shown, reward = call(env, "schema", table=table.upper())
        assert shown.startswith(f"CREATE TABLE {table} (id INTEGER")
        assert reward == 0.1
        assert call(env, "schema", table=table)[1] == 0.0
    wrong = call(env, "query", sql="SELECT * FROM nowhere")
    assert wrong == ("SQL error: no such table: nowhere", 0.0)
    assert call(env, "query", sql=gold)[1] == 0.2
    assert call(env, "query", sql=gold)[1] == 0.0
    observation, reward, terminated, _, info = env.step(f"<answer>{gold}</answer>")
    assert (observation, reward, terminated) == ("correct", 1.0, True)
    assert (info["success"], info["episodic_reward"]) == (True, 1.0)


def test_a_constant_copied_from_the_shown_rows_is_no_answer():
    env: Any = make_env("gspo/SQL-v0")
    for seed in range(30):
        env.reset(seed=seed)
        rows = env.unwrapped._databases[0].query(env.unwrapped._problem.gold)[1]
        values = ", ".join(f"({', '.join(repr(cell) for cell in row)})" for row in rows)
        constant = f"SELECT * FROM (VALUES {values})"
        assert call(env, "query", sql=constant)[1] == 0.2
        observation, reward, *_ = env.step(f"<answer>{constant}</answer>")
        assert (observation, reward) == ("wrong", 0.0)


def test_the_answer_may_be_written_otherwise():
    env: Any = make_env("gspo/SQL-v0")
    for seed in range(30):
        env.reset(seed=seed)
        gold = env.unwrapped._problem.gold
        other = f"WITH answer AS ({gold}) SELECT * FROM answer ORDER BY 1 DESC"
        assert env.step(f"I think <answer>\n{other};\n</answer>")[0] == "correct"


def test_long_results_are_cut():
    env: Any = make_env("gspo/SQL-v0", rows=300)
    env.reset(seed=0)
    links = env.unwrapped._problem.names["links"]
    observation, _ = call(env, "query", sql=f"SELECT * FROM {links}")
    assert observation.count("\n") == 11
    assert observation.endswith("(more than 200 rows)")
    assert len(call(env, "query", sql=f"SELECT group_concat(id) FROM {links}")[0]) < 120


# Wordle


@pytest.mark.parametrize(
    ("word", "guess", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "nacre", "YYYYG"),
        ("abide", "added", "GY-Y-"),
        ("green", "eerie", "YYY--"),
        ("level", "hello", "-GYY-"),
        ("robot", "motto", "-GY-Y"),
    ],
)
def test_letters_are_marked_no_more_often_than_the_word_has_them(word, guess, marks):
    assert mark(word, guess) == marks


def test_the_word_list_is_sound_and_the_demonstrator_finds_every_word():
    assert len(WORDS) == len(set(WORDS)) >= 380
    assert all(len(word) == 5 and set(word) <= set(string.ascii_lowercase) for word in WORDS)
    env: Any = make_env("gspo/Wordle-v0")
    for word in WORDS[::7]:
        env.reset(seed=0, options={"word": word})
        for _ in range(6):
            *_, terminated, _, info = env.step(env.unwrapped.expert_action())
            if terminated:
                break
        assert info["success"]


def test_a_place_is_paid_once_and_states_forget_the_order():
    env: Any = make_env("gspo/Wordle-v0")
    states = set()
    for guesses, paid in ((["CRIMP", "xrxxx"], [0.2, 0.0]), (["xrxxx", "crimp"], [0.1, 0.1])):
        env.reset(seed=0, options={"word": "crane"})
        steps = [env.step(f"<guess>{guess}</guess>") for guess in guesses]
        assert [step[1] for step in steps] == paid
        states.add(steps[-1][4]["state_key"])
    assert len(states) == 1
    told = "Write your guess of five letters as <guess>word</guess>."
    assert env.step("crane")[:2] == (told, 0.0)
    assert env.step("<guess>crane</guess>")[:3] == ("crane GGGGG correct", 1.0, True)


def test_the_word_list_can_be_made_the_rule():
    env: Any = make_env("gspo/Wordle-v0", words_only=True)
    env.reset(seed=0, options={"word": "crane"})
    assert env.step("<guess>xrxxx</guess>")[:2] == ("xrxxx is not in the word list.", 0.0)
    with pytest.raises(ConfigError, match="expected one of"):
        env.reset(options={"word": "xrxxx"})


# The Python tool


@pytest.fixture
def tool_env():
    require_isolation(find_missing())
    return make_env("gspo/PythonTool-v0")


def test_programs_print_what_another_way_works_out(tool_env):
    for seed in range(25):
        tool_env.reset(seed=seed)
        printed, reward = tool_env.step(tool_env.unwrapped.expert_action())[:2]
        assert reward == 0.2
        result = tool_env.step(tool_env.unwrapped.expert_action())
        assert result[:4] == ("correct", 1.0, True, False)
        assert printed == str(tool_env.unwrapped._value)


def test_failed_programs_are_observed_and_not_paid(tool_env):
    tool_env.reset(seed=0)
    observation, reward = call(tool_env, "python", code="1 / 0")
    assert "ZeroDivisionError" in observation
    assert reward == 0.0
    assert call(tool_env, "python", code="x = 1")[0] == "(no output)"
    assert call(tool_env, "python", code="'a' * 3")[0] == "'aaa'"
    assert "ended with exit code 3" in call(tool_env, "python", code="exit(3)")[0]
    assert tool_env.step("no idea")[:3] == ("wrong", 0.0, True)


def test_endless_programs_are_cut():
    short, patient = (
        make_env("gspo/PythonTool-v0", sandbox=Sandbox(seconds=seconds)) for seconds in (0.5, 20.0)
    )
    for env in (short, patient):
        env.reset(seed=0)
    assert call(short, "python", code="while True: pass")[0] == "stopped after 0.5 seconds"
    flood, _ = call(patient, "python", code="while True: print('x' * 99)")
    assert flood.endswith("stopped after 64 KiB of output")
    assert len(flood) < 2200
