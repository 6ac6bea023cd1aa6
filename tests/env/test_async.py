"""`async def` methods and tools behave like plain ones for every caller."""

from __future__ import annotations

import asyncio
import logging
import sys
import textwrap

import gymnasium
import pytest
from gymnasium.wrappers import TimeLimit

from gspo_env import TextEnv, ToolEnv, tool
from gspo_env.check import check_env
from gspo_env.env.registration import make_env
from gspo_env.env.tools import format_tool_call
from gspo_env.errors import EnvironmentContractError
from gspo_env.importing import load_module
from gspo_env.rollout.play import demonstrator, play, play_now
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
        return b"\x89PNG" if what == "picture" else f"a {what}"

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


def test_check_env_accepts_async_methods():
    assert check_env(Waits()).score == "turns"


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


def test_a_result_that_is_no_text_is_refused_by_the_name_of_the_tool():
    episode = play_now(Fetches(), TASK, lambda now: look("picture"))
    assert episode.stop_reason is StopReason.INVALID
    assert "tool look: its result is of type bytes, expected text" in episode.error


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


def test_a_plain_environment_is_not_touched():
    assert gymnasium.Env.step is TextEnv.step or TextEnv.step is not None
    assert not asyncio.iscoroutinefunction(ToolEnv.step)
