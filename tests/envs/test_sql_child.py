"""Queries of SQL-v0 run in child processes: what a hostile one may cost, and who pays."""

import asyncio
import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.jails import eventually

from gspo_env import format_tool_call, make_env
from gspo_env.rollout.pool import EnvPool
from gspo_envs.tools import sqlite
from gspo_envs.tools.sqlite import Database, SQLError, is_short

PRINTF = "SELECT printf('%.2000000000c','x')"
NAMES = "abcdefghijklmnop"
CTES = "WITH a(x) AS (SELECT 1), " + ", ".join(
    f"{new}(x) AS (SELECT x FROM {old} UNION ALL SELECT x FROM {old})"
    for old, new in itertools.pairwise(NAMES)
)
COUNT = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 60000) "


@pytest.fixture
def database():
    with contextlib.closing(Database("CREATE TABLE t (x, y); INSERT INTO t VALUES (1, 'a')")) as d:
        yield d


def call(env, name, **arguments):
    return str(env.step(format_tool_call(name, arguments))[0])


def children(parent=0):
    """The processes for queries that a process started and that still run."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            own = words[-2] == str(parent or os.getpid()).encode()
            if own and b"sqlite_child.py" in words[-3]:
                found.add(int(folder.name))
    return found


def test_a_query_that_takes_seconds_in_one_operation_does_not_hold_the_event_loop():
    async def play():
        pool = EnvPool(lambda: make_env("gspo/SQL-v0"))
        async with pool.lease() as slow, pool.lease() as quick:
            for env in (slow, quick):
                await pool.call(env.reset, seed=0)
            bomb = format_tool_call("query", {"sql": PRINTF})
            running = asyncio.create_task(pool.call(slow.step, bomb))
            for _ in range(3):
                await asyncio.sleep(0)
                step = format_tool_call("query", {"sql": "SELECT 1 + 1"})
                assert (await pool.call(quick.step, step))[0] == "1 + 1\n2\n(1 row)"
                assert not running.done()
            assert (await running)[0] == "SQL error: too much work"
        pool.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        (PRINTF, "too much work"),
        (COUNT.replace("LIMIT 60000", "") + "SELECT count(*) FROM c", "too much work"),
        (f"{COUNT}SELECT count(*) FROM c WHERE instr(printf('%3900c', 'x'), "
         "printf('%1900c', 'x') || 'b' || x)", "too much work"),
        (f"{COUNT}SELECT count(*) FROM (SELECT DISTINCT x, printf('%3900c', x) FROM c)",
         "too much memory"),
        (f"{CTES} SELECT count(*) FROM p", "too much memory"),
        (f"{COUNT}SELECT x FROM c ORDER BY printf('%3900c', x) LIMIT 1", "too much work"),
        ("SELECT " + ", ".join(["printf('%4000c', 'x')"] * 60), "the result is too large"),
        (f"{COUNT}SELECT printf('%4000c', 'x') FROM c LIMIT 60", "the result is too large"),
    ],
)  # fmt: skip
def test_time_memory_and_output_of_a_query_are_bounded(database, sql, reason):
    with pytest.raises(SQLError, match=reason):
        database.query(sql)
    assert database.query("SELECT * FROM t")[1] == [(1, "a")]


def test_the_same_query_fails_in_the_same_way_each_time(database):
    def fails(n):
        rows = f"SELECT DISTINCT x, printf('%3900c', x) FROM c LIMIT {n}"
        with contextlib.suppress(SQLError):
            return not database.query(f"{COUNT}SELECT count(*) FROM ({rows})")
        return True

    sizes = range(2000, 12000, 2500)
    once = [fails(n) for n in sizes]
    assert any(once)
    assert once == [fails(n) for n in sizes]


def test_only_what_can_take_long_runs_outside_the_event_loop():
    env: Any = make_env("gspo/SQL-v0")
    for seed in range(20):
        env.reset(seed=seed)
        gold = env.unwrapped._problem.gold
        assert is_short(gold)
        for action in (
            format_tool_call("tables", {}),
            format_tool_call("query", {"sql": gold}),
            f"<answer>{gold}</answer>",
            "with no call, printf",
            '<tool_call>{"name": "query", "arguments": {"sql": 3}}</tool_call>',
        ):
            assert env.unwrapped.blocks(action) is False
    for sql in (PRINTF, "SELECT \"PrintF\"('%d', 1)", "SELECT 'a'||'b'", f"{CTES} SELECT 1",
                "SELECT 1 WHERE '' LIKE ''", "SELECT " + "+1" * 600):  # fmt: skip
        assert env.unwrapped.blocks(format_tool_call("query", {"sql": sql}))
        assert env.unwrapped.blocks(f"<answer>{sql}</answer>")
    hidden = format_tool_call("query", {"sql": PRINTF}).replace("printf", "\\u0070rintf")
    assert env.unwrapped.blocks(hidden)
    env.close()


def test_every_type_of_value_survives_the_way(database):
    sql = "SELECT 9223372036854775807, -9223372036854775808, 1e999, 0.1 + 0.2, NULL, x'00ff', "
    sql += "'é\U0001f600', CAST(x'ff' AS TEXT)"
    assert database.query(sql)[1] == [
        (2**63 - 1, -(2**63), math.inf, 0.1 + 0.2, None, b"\0\xff", "é\U0001f600", "\ufffd")
    ]


def test_a_look_alike_of_a_tables_name_is_paid_once():
    env: Any = make_env("gspo/SQL-v0")
    env.reset(seed=0)
    named: list[str] = []
    while not named:
        env.reset()
        named = [t for t in env.unwrapped._problem.tables if "k" in t]
    table = named[0].replace("k", "\N{KELVIN SIGN}")
    rewards = [env.step(format_tool_call("schema", {"table": table}))[1] for _ in range(3)]
    assert rewards == [0.1, 0.0, 0.0]
    env.close()


def test_many_environments_at_once_each_get_their_own_answer():
    def play(seed):
        env: Any = make_env("gspo/SQL-v0")
        env.reset(seed=seed)
        for _ in range(5):
            call(env, "query", sql=f"SELECT {seed}, printf('%d', {seed})")
        result = call(env, "query", sql=env.unwrapped._problem.gold)
        answer = env.step(f"<answer>{env.unwrapped._problem.gold}</answer>")[0]
        env.close()
        return f"{result} {answer}"

    alone = [play(seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(play, range(12))) == alone
    assert all(text.endswith("correct") for text in alone)


def test_the_children_end_with_the_last_database():
    for left in list(sqlite._open):  # by tests that do not close their environments
        left.close()
    first, second = make_env("gspo/SQL-v0"), make_env("gspo/SQL-v0")
    for env in (first, second):
        env.reset(seed=0)
        call(env, "query", sql="SELECT 1")
    before = children()
    assert before
    first.reset(seed=1)
    first.close()
    assert children() == before
    second.close()
    assert children() == set()
    first.reset(seed=0)
    assert call(first, "query", sql="SELECT 1") == "1\n1\n(1 row)"
    first.close()
    assert children() == set()


def test_a_child_that_is_killed_costs_nothing(database):
    for number in (signal.SIGKILL, signal.SIGTERM):
        for pid in children():
            os.kill(pid, number)
        assert database.query("SELECT * FROM t")[1] == [(1, "a")]


def test_a_query_that_crashes_its_process_is_an_error_of_the_query(database, monkeypatch):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(database.query, PRINTF)
        (pid,) = children()
        time.sleep(0.1)
        os.kill(pid, signal.SIGSEGV)
        with pytest.raises(SQLError, match="too much work"):
            running.result()


OWNER = """
import os, sys, threading, time
from gspo_envs.tools.sqlite import Database
database = Database("CREATE TABLE t (x)")
database.query("SELECT 1")
if os.fork() == 0:  # holds a copy of every descriptor
    time.sleep(8)
    os._exit(0)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_child_dies_with_its_parent_even_if_a_fork_of_it_lives():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        said, before = owner.stdout.readline(), children(owner.pid)
        owner.kill()
        assert (said, len(before)) == (b"ready\n", 1)
        assert eventually(lambda: not children(owner.pid))


def test_a_forked_process_has_children_of_its_own(database):
    database.query("SELECT 1")
    pid = os.fork()
    if pid == 0:
        good = all(database.query(f"SELECT {n}")[1] == [(n,)] for n in range(50))
        owned = len(children())
        database.close()
        os._exit(10 * good + owned)
    rows = [database.query(f"SELECT {n}")[1] for n in range(50)]
    assert rows == [[(n,)] for n in range(50)]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11


def test_a_child_cannot_write_and_sees_none_of_our_variables(database, monkeypatch):
    monkeypatch.setenv("SECRET_OF_OURS", "no")
    sqlite.end_idle()
    database.query("SELECT 1")
    (pid,) = children()
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert limits.partition("Max file size")[2].split()[:2] == ["0", "0"]
    assert limits.partition("Max address space")[2].split()[0] != "unlimited"
    assert b"SECRET_OF_OURS" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert len(os.listdir(f"/proc/{pid}/fd")) <= 4
