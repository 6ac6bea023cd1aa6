"""One loop plays every policy, and one function decides the outcome."""

import asyncio
import re

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from hypothesis import given
from hypothesis import strategies as st
from support import virtual_clock

from gspo_env.env.base import TextEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import RolloutError
from gspo_env.rollout.play import PolicyOutput, conclude, demonstrator, play, play_now
from gspo_env.types import Episode, Prompt, StepInfo, StopReason, Task, Turn

TASK = Task(env_id="test", seed=3)
CUTS = [r for r in StopReason if r not in (StopReason.TERMINATED, StopReason.TRUNCATED)]


class Script(TextEnv):
    """Gives what it was told, step by step."""

    def __init__(self, *steps, info=None):
        self.steps, self.info = steps, info or {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.system_prompt = f"You are {seed}."
        self.left = list(self.steps)
        return f"begin {options}", self.info

    def step(self, action):
        result = self.left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def go(reward=0.0, terminated=False, truncated=False, **info):
    return "on", reward, terminated, truncated, info


def yes(now):
    return "yes"


def test_an_episode_has_the_prompt_the_turns_and_the_states_as_the_policy_met_them():
    seen = []

    def policy(now):
        seen.append((now.turn, now.observation, now.role, now.prompt))
        return f"act {now.turn}"

    env = Script(
        go(0.25, state_key="b", observation_role="tool"),
        go(1.0, True, success=True),
        info={"state_key": "a", "task_key": 7},
    )
    episode = play_now(env, Task(env_id="test", seed=3, options={"x": 1}), policy)
    prompt = Prompt(system="You are 3.")
    first = "begin {'x': 1}"
    assert seen == [(0, first, "user", prompt), (1, "on", "tool", prompt)]
    assert episode.prompt == prompt
    assert [(t.text, t.observation, t.reward, t.state_key) for t in episode.turns] == [
        ("act 0", first, 0.25, "a"),
        ("act 1", "on", 1.0, "b"),
    ]
    assert (episode.outcome, episode.success, episode.terminated) == (1.25, True, True)
    assert (episode.final_observation, episode.reset.task_key) == ("on", "7")


def test_a_policy_may_answer_now_or_later():
    async def later(now):
        await asyncio.sleep(0)
        return PolicyOutput(text="yes")

    env = Script(go(), go(1.0, True))
    slow = asyncio.run(play(env, TASK, later))
    quick = play_now(env, TASK, yes)
    assert [t.text for t in slow.turns] == [t.text for t in quick.turns] == ["yes", "yes"]
    with pytest.raises(RolloutError, match="needs an event loop"):
        play_now(env, TASK, later)


def test_a_demonstrator_that_does_not_exist_is_named():
    with pytest.raises(NotImplementedError, match="no scripted demonstrator"):
        play_now(Script(go()), TASK, demonstrator())

    class Plain(gymnasium.Env):
        def reset(self, **_):
            return "begin", {}

    with pytest.raises(NotImplementedError, match=r"Plain.* has no expert_action"):
        play_now(Plain(), TASK, demonstrator())


def test_an_exception_of_the_environment_ends_the_episode_and_names_the_call():
    episode = play_now(Script(go(0.5), OSError("lost")), TASK, yes)
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.ERROR, 1)
    assert episode.error.startswith("step('yes') raised OSError: lost (")
    assert re.search(r"test_play\.py:\d+ in step\)$", episode.error)
    (fault,) = episode.faults
    assert fault.traceback.rstrip().endswith("OSError: lost")
    assert (episode.terminated, episode.truncated, episode.success) == (False, False, False)

    class Hidden(Script):
        def reset(self, **_):
            raise OSError("lost")

    episode = play_now(Hidden(), TASK, yes)
    assert episode.error.startswith("reset(seed=3) raised OSError: lost (")
    assert episode.turns == ()


def test_an_exception_of_the_policy_is_raised():
    def broken(now):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play_now(Script(go()), TASK, broken)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_limit_on_turns_cuts_unless_the_environment_ends_first(limit):
    episode = play_now(Script(go(), go(1.0, True)), TASK, yes, max_turns=limit)
    assert len(episode.turns) == min(limit, 2)
    expected = StopReason.MAX_TURNS if limit == 1 else StopReason.TERMINATED
    assert episode.stop_reason is expected


def test_a_move_that_broke_a_limit_is_a_turn_only_if_something_was_sampled():
    env = Script()
    cut = PolicyOutput(
        text="lo", action_ids=(1, 2), logprobs=(-1.0, -1.0), stop=StopReason.MAX_TURN_TOKENS
    )
    episode = play_now(env, TASK, lambda now: cut)
    assert [turn.action_ids for turn in episode.turns] == [(1, 2)]
    assert episode.turns[0].info == StepInfo()
    episode = play_now(env, TASK, lambda now: PolicyOutput(stop=StopReason.MAX_CONTEXT))
    assert (episode.turns, episode.stop_reason) == ((), StopReason.MAX_CONTEXT)


def test_the_clock_cuts_a_policy_that_waits_and_keeps_the_turns_before():
    async def stuck(now):
        await asyncio.sleep(60 * now.turn)
        return "yes"

    episode = virtual_clock.run(play(Script(go(0.5), go()), TASK, stuck, timeout=50))
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.TIMEOUT, 1)


def test_a_timeout_of_the_policy_itself_is_raised():
    async def broken(now):
        raise TimeoutError("the engine is gone")

    with pytest.raises(TimeoutError, match="engine"):
        asyncio.run(play(Script(go()), TASK, broken, timeout=60))


def test_a_timeout_of_the_environment_itself_is_its_error():
    episode = asyncio.run(play(Script(TimeoutError("late")), TASK, yes, timeout=60))
    assert episode.error.startswith("step('yes') raised TimeoutError: late (")


@pytest.mark.parametrize(
    ("name", "value"), [("system_prompt", 5), ("tools", ["look"]), ("tools", 3)]
)
def test_a_prompt_that_is_none_is_an_error_of_its_episode(name, value):
    class Told(Script):
        def reset(self, **options):
            result = super().reset(**options)
            setattr(self, name, value)
            return result

    episode = play_now(Told(go()), TASK, yes)
    assert (episode.stop_reason, episode.turns) == (StopReason.INVALID, ())
    assert f"Told: {name} is {value!r} of type" in episode.error


def turn(reward, **info):
    return Turn(text="", observation="", reward=reward, info=StepInfo(**info))


def test_a_cut_look_up_does_not_score_more_than_a_wrong_answer():
    env = make_env("gspo/Lookup-v0")
    task = Task(env_id="gspo/Lookup-v0", seed=0, options={"hops": 4})
    cut = play_now(env, task, demonstrator(), max_turns=3)
    assert cut.rewards.tolist() == [0.2, 0.2, 0.2]
    wrong = play_now(env, task, lambda now: "<answer>nothing</answer>")
    assert (cut.outcome, cut.success) == (wrong.outcome, wrong.success) == (0.0, False)
    limited = play_now(TimeLimit(env, 3), task, demonstrator())
    assert (limited.stop_reason, limited.outcome) == (StopReason.TRUNCATED, 0.0)


def ended(turns, *arguments):
    """The outcome and the success of an episode with these turns."""
    task = Task(env_id="test", seed=0)
    episode = Episode(task=task, turns=tuple(turns), ending=conclude(turns, *arguments))
    return episode.outcome, episode.success


@pytest.mark.parametrize("stop", CUTS)
def test_a_cut_episode_gets_what_the_environment_declares_or_its_sum(stop):
    turns = [turn(0.25), turn(0.5, episodic_reward=9.0, success=True)]
    assert ended(turns, stop, True, -1.0) == (-1.0, False)
    assert ended(turns, stop, False, -1.0) == (0.75, False)
    assert ended([], stop, True, -1.0) == (-1.0, False)


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("stop", [StopReason.TERMINATED, StopReason.TRUNCATED])
def test_a_finished_episode_keeps_what_its_last_step_says_or_has_the_sum(stop, gives):
    assert ended([turn(0.5, episodic_reward=-2.0)], stop, gives, 0.0) == (-2.0, False)
    said = [turn(0.5, episodic_reward=-2.0, success=True)]
    assert ended(said, stop, gives, 0.0) == (-2.0, True)
    without = [turn(0.5), turn(0.25)]
    assert ended(without, StopReason.TERMINATED, gives, 0.0) == (0.75, True)


@given(
    st.lists(st.floats(-1, 1), max_size=6),
    st.sampled_from(list(StopReason)),
    st.booleans(),
    st.none() | st.floats(-1, 1),
    st.none() | st.booleans(),
)
def test_every_end_has_a_finite_outcome_and_a_verdict(rewards, stop, gives, outcome, success):
    turns = [turn(reward) for reward in rewards]
    if turns:
        turns[-1] = turn(rewards[-1], episodic_reward=outcome, success=success)
    result, verdict = ended(turns, stop, gives, 0.0)
    assert np.isfinite(result)
    assert type(verdict) is bool
    assert not (verdict and stop in CUTS)


@pytest.mark.parametrize(
    "env_id",
    [
        *("Additive", "Calculator", "GuessNumber", "KeyDoor", "Lookup", "SQL"),
        *("VariableLength", "Wordle"),
    ],
)
def test_what_an_environment_declares_of_its_outcomes_is_true(env_id):
    env = make_env(f"gspo/{env_id}-v0")
    for policy in (demonstrator(0.5), lambda now: "nonsense"):
        episode = play_now(env, TASK, policy)
        given = episode.turns[-1].info.episodic_reward is not None
        assert given == env.get_wrapper_attr("gives_outcome")
