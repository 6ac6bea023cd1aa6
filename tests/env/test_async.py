"""`async def` methods and tools behave like plain ones for every caller."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import signal
import sqlite3
import sys
import textwrap
import threading

import pytest
from gymnasium.wrappers import TimeLimit

from gspo_env import TextEnv, ToolEnv, tool
from gspo_env.env.registration import make_env
from gspo_env.errors import EnvironmentContractError
from gspo_env.registry import load_module
from gspo_env.rollout.play import demonstrator, play, play_now
from gspo_env.rollout.pool import EnvPool, play_pooled
from gspo_env.runtime.loops import run_alone
from gspo_env.tools.tool import format_tool_call
from gspo_env.types import StopReason, Task

TASK = Task(env_id="test", seed=0)


class Waits(TextEnv):
    """Waits in every method."""

    async def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        await asyncio.sleep(0)
        return "begin", {}

    async def step(self, action):
        await asyncio.sleep(0)
        return "end", 1.0, True, False, {"success": action == "yes"}

    async def expert_action(self, noise=0.0):
        await asyncio.sleep(0)
        return "yes"


class Above(Waits):
    """Awaits the method of its base class."""

    async def step(self, action):
        observation, *rest = await super().step(action)
        return (observation + "!", *rest)


class Fetches(ToolEnv):
    """Has an asynchronous tool and asynchronous hooks."""

    @tool
    async def look(self, what: str) -> str:
        """Look.

        Args:
            what: The thing.
        """
        await asyncio.sleep(0)
        if what == "wall":
            raise ConnectionError("no way")
        return f"a {what}"

    async def on_tool_result(self, call, result):
        return 0.5

    async def on_final(self, text):
        return "", 1.0, True


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 3)])
@pytest.mark.parametrize("cls", [Waits, Above])
def test_async_methods_work_alone_in_wrappers_and_on_an_event_loop(cls, wrap):
    episode = play_now(wrap(cls()), TASK, demonstrator())
    assert (episode.stop_reason, episode.success) == (StopReason.TERMINATED, True)
    assert episode.final_observation == ("end" if cls is Waits else "end!")
    again = asyncio.run(play(wrap(cls()), TASK, lambda now: "no", timeout=60))
    assert (again.stop_reason, again.success) == (StopReason.TERMINATED, False)


def test_a_class_that_is_no_text_env_is_made_synchronous_when_it_is_registered(tmp_path):
    (tmp_path / "helper_of_plain.py").write_text("WORD = 'hello'\n")
    path = tmp_path / "plain.py"
    path.write_text(
        textwrap.dedent(
            """
            import gymnasium
            from gspo_env.env import UnicodeText
            import helper_of_plain

            class Plain(gymnasium.Env):
                observation_space = action_space = UnicodeText(99)

                async def reset(self, *, seed=None, options=None):
                    return helper_of_plain.WORD, {}

                async def step(self, action):
                    return "", 1.0, True, False, {}
            """
        )
    )
    before = list(sys.path)
    try:
        env = make_env(f"{path}:Plain")
        assert env.reset(seed=0)[0] == "hello"
        assert env.step("")[1] == 1.0
        assert sys.path[: len(before)] == before
        assert load_module(str(path))
    finally:
        sys.path[:] = before


def look(what):
    return format_tool_call("look", {"what": what})


def test_async_tools_and_hooks_give_their_results():
    env = Fetches()
    env.reset(seed=0)
    assert env.step(look("door"))[:2] == ("a door", 0.5)
    assert env.step("done")[1:3] == (1.0, True)


def test_a_failing_tool_is_one_line_in_the_log_however_often_it_fails(caplog):
    env = Fetches()
    with caplog.at_level(logging.WARNING):
        for seed in range(5):
            env.reset(seed=seed)
            observation = env.step(look("wall"))[0]
            assert observation == "Error: look failed: ConnectionError: no way"
    (line,) = caplog.text.splitlines()
    assert "tool look raised ConnectionError: no way (tests/env/test_async.py:" in line


def test_an_async_tool_in_an_async_step_is_refused_and_does_not_hang():
    class Both(Fetches):
        async def step(self, action):
            return super().step(action)

    env = Both()
    env.reset(seed=0)
    with pytest.raises(EnvironmentContractError, match="tool look is asynchronous"):
        env.step(look("door"))


class Orders(ToolEnv):
    """Has a connection that a plain `reset` opens and an asynchronous tool uses."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table t as select 7 as n")
        return "How many?", {}

    @tool
    async def count(self) -> int:
        """Count the orders."""
        await asyncio.sleep(0)
        return self.db.execute("select n from t").fetchone()[0]

    def on_final(self, text):
        return "", float(text == "7"), True

    def close(self):
        self.db.close()


def asks(now):
    return "7" if now.turn else format_tool_call("count", {})


async def pooled(make, policy):
    pool = EnvPool(make)
    try:
        return await play_pooled(pool, TASK, policy, timeout=60)
    finally:
        pool.close()


@pytest.mark.parametrize("declared", [None, False])
def test_an_async_tool_uses_the_connection_that_a_plain_reset_opened(declared):
    make = type("Declared", (Orders,), {"blocking": declared})
    alone = play_now(make(), TASK, asks)
    together = asyncio.run(pooled(make, asks))
    for episode in (alone, together):
        assert [turn.observation for turn in episode.turns] == ["How many?", "7"]
        assert episode.success


def test_what_an_environment_started_goes_on_while_the_policy_thinks():
    heard = threading.Event()

    class Listens(Waits):
        async def reset(self, *, seed=None, options=None):
            self.listening = asyncio.create_task(self.listen())
            return await super().reset(seed=seed)

        async def listen(self):
            await asyncio.sleep(0.01)
            heard.set()

    async def thinks(now):
        return "yes" if await asyncio.to_thread(heard.wait, 30) else "no"

    assert asyncio.run(pooled(Listens, thinks)).success


@pytest.mark.parametrize("fault", [SystemExit(3), asyncio.CancelledError(), StopIteration(1)])
def test_an_async_step_that_would_end_its_loop_costs_its_episode_alone(fault):
    class Ends(Waits):
        async def step(self, action):
            if action == "end":
                raise fault
            return await super().step(action)

    async def main():
        pool = EnvPool(Ends)
        async with pool.lease() as env:
            both = [
                await play(env, TASK, lambda now, word=word: word, timeout=60, call=pool.call)
                for word in ("end", "yes")
            ]
        pool.close()
        return both

    for bad, good in (
        asyncio.run(main()),
        [play_now(Ends(), TASK, lambda now, w=w: w) for w in ("end", "yes")],
    ):
        assert bad.stop_reason is StopReason.ERROR
        assert (good.stop_reason, good.success) == (StopReason.TERMINATED, True)


def test_a_task_that_would_end_the_loop_between_two_calls_is_logged(caplog):
    class Exits(Waits):
        async def reset(self, *, seed=None, options=None):
            self.task = asyncio.create_task(self.exit())
            return await super().reset(seed=seed)

        async def exit(self):
            await asyncio.sleep(0.01)
            sys.exit(4)

    async def thinks(now):
        await asyncio.sleep(0.1)
        return "yes"

    assert asyncio.run(pooled(Exits, thinks)).success
    assert "SystemExit: 4" in caplog.text


def test_a_coroutine_runs_alone_also_where_an_event_loop_runs():
    place = contextvars.ContextVar("place", default="none")

    async def work(loops):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.001)
        if place.get() == "wrong":
            raise ValueError("no such place")
        return place.get()

    async def notebook():
        loops = [asyncio.get_running_loop()]
        place.set("cell")
        first = run_alone(work(loops))
        assert run_alone(work(loops)) == first
        place.set("wrong")
        with pytest.raises(ValueError, match="no such place"):
            run_alone(work(loops))
        assert len(set(loops)) == 4
        assert all(loop.is_closed() for loop in loops[1:])
        return first

    assert run_alone(work([])) == "none"
    assert asyncio.run(notebook()) == "cell"


def test_a_signal_that_another_thread_got_reaches_the_main_thread_of_a_notebook():
    ends = []

    async def work():
        await asyncio.sleep(0.3)  # the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # this loop's thread
        await asyncio.sleep(30)
        ends.append("by itself")

    async def notebook():
        run_alone(work())

    loop = asyncio.new_event_loop()  # `asyncio.run` has a handler of its own
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(notebook())
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert ends == []
