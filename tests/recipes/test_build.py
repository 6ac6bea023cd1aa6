"""The tiny model: one token a word, imperfect demonstrations, a warm-up that learns."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_engine import Scripted
from support.small_env import Shown, Tools

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines.base import Transformers
from gspo_env.env.base import TextEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, RolloutError
from gspo_env.recipes.babble import babble
from gspo_env.recipes.build import (
    build,
    build_tokenizer,
    demonstrate,
    imitation_samples,
    warm_up,
)
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.tool import format_tool_call, tool
from gspo_env.types import StopReason, Task, ToolCall


@given(st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text


IDS = ["Lookup", "Calculator", "GuessNumber", "SQL", "Wordle"]


@pytest.mark.parametrize("env_id", [f"gspo/{name}-v0" for name in IDS])
def test_demonstrations_of_every_built_in_environment_are_imperfect_and_repeatable(env_id):
    env = make_env(env_id)
    tasks = [Task(env_id=env_id, seed=n) for n in range(12)]

    def played(slips):
        every = demonstrate(env, tasks, slips)
        return [[(t.observation, t.text, t.reward) for t in e.turns] for e in every]

    assert played(0.5) == played(0.5)
    assert played(0.5) != played(0.0)


class Patient(TextEnv):
    """Its instructions and its earlier messages change with the task."""

    blocking = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(100, 999))
        self.system_prompt = f"Your number is {self.number}."
        self.left = 2
        told = ({"role": "user", "content": "river"}, {"role": "assistant", "content": "stone"})
        return "Say it.", {"messages": told if seed % 2 else ()}

    def step(self, action):
        self.left -= 1
        return "Again.", 1.0, self.left == 0, False, {"observation_role": "tool"}

    def expert_action(self, noise=0.0):
        return str(self.number)


def rolled_out(env, task, actions, chat):
    """The token ids of a rollout in which the policy samples these actions."""
    left = iter(actions)
    engine = Scripted(lambda *_: (*chat.encode(next(left)), chat.end_of_turn))
    limits = RolloutConfig(max_context=4096)
    running = Collector(engine, chat, EnvPool(lambda: env), limits)
    (group,) = asyncio.run(running.collect([task], seed=0, group_size=1))
    return group.episodes[0].sequences[0].token_ids.tolist()


ROWS = [
    {
        "messages": [
            {"role": "system", "content": f"You count in {n}s."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": str(n)},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": str(2 * n)},
        ]
    }
    for n in range(40)
]


@pytest.mark.parametrize("name", ["Lookup", "SQL", "GuessNumber", "Patient", "Dataset"])
def test_a_demonstration_has_the_ids_that_a_rollout_of_its_actions_has(name, chat):
    if name == "Patient":
        env = Patient()
    elif name == "Dataset":
        env = make_env("gspo/Dataset-v0", data=ROWS)
    else:
        env = make_env(f"gspo/{name}-v0")
    for seed in range(6):
        task = Task(env_id="test", seed=seed)
        demonstrations = demonstrate(env, [task], 0.0)
        (sample,) = imitation_samples(demonstrations, chat)
        actions = [turn.text for turn in demonstrations[0].turns]
        assert sample.token_ids.tolist() == rolled_out(env, task, actions, chat)
        assert sample.mask.sum() == sum(len(chat.encode(text)) + 1 for text in actions)


def test_the_tokenizer_knows_the_prompt_of_every_task():
    config = Tiny(hidden_size=32, demonstrations=30)
    env = Patient()
    _, tokenizer, demonstrations = build({"test": env}, config, 0)
    numbers = {episode.prompt.system.split()[-1].strip(".") for episode in demonstrations}
    assert len(numbers) > 20
    for word in (*numbers, "river", "stone"):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1


def test_demonstrations_that_fail_are_left_out_and_too_many_are_an_error(caplog):
    class Fragile(Patient):
        every = 3

        def step(self, action):
            if self.number % self.every == 0:
                raise OSError("socket closed")
            return super().step(action)

    tasks = [Task(env_id="test", seed=n) for n in range(60)]
    played = demonstrate(Fragile(), tasks, 0.0)
    assert 20 < len(played) < 60
    assert f"{60 - len(played)} of 60 demonstrations failed" in caplog.text
    Fragile.every = 1
    with pytest.raises(RolloutError, match=r"60 of 60 episodes failed.*socket closed"):
        demonstrate(Fragile(), tasks, 0.0)


def test_a_tool_without_parameters_has_a_model_too():
    env = make_env("gspo/SQL-v0")
    config = Tiny(hidden_size=32, demonstrations=5)
    _, tokenizer, demonstrations = build({"gspo/SQL-v0": env}, config, 0)
    assert len(demonstrations) == 5
    call = '<tool_call>{"name": "tables", "arguments": {}}</tool_call>'
    assert len(tokenizer.encode(call, add_special_tokens=False)) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [({"hidden_size": 30}, "even size for each head"), ({"min_reward": 0.5}, "min_reward is 0.5")],
)
def test_an_impossible_value_is_named(values, words):
    with pytest.raises(ConfigError, match=words):
        Tiny(**values)


class Endless(Shown):
    """It never ends an episode."""

    def step(self, action):
        return "on", 0.0, False, False, {}


TASKS = [Task(env_id="endless", seed=n) for n in range(3)]


def test_a_demonstrator_that_never_ends_is_cut_at_the_turns_of_the_rollout_and_shown():
    shown = []
    limits = RolloutConfig(max_turns=5)
    played = demonstrate(Endless(), TASKS, 0.0, limits, lambda *args: shown.append(args))
    assert [episode.stop_reason for episode in played] == [StopReason.MAX_TURNS] * 3
    assert [len(episode.turns) for episode in played] == [5] * 3
    assert shown == [("demonstrations", n, 3) for n in (1, 2, 3)]


def test_turns_that_do_not_fit_the_context_are_not_imitated(chat):
    demonstrations = demonstrate(Endless(), TASKS, 0.0, RolloutConfig(max_turns=9))
    whole = imitation_samples(demonstrations, chat)
    cut = imitation_samples(demonstrations, chat, 40)
    for long, short in zip(whole, cut, strict=True):
        assert len(short.token_ids) <= 40 < len(long.token_ids)
        assert short.turn_ids.max() >= 0
        assert short.token_ids.tolist() == long.token_ids[: len(short.token_ids)].tolist()
    assert imitation_samples(demonstrations, chat, 3) == []


class Mute(Patient):
    """It has no demonstrator, and a tool."""

    def expert_action(self, noise=0.0):
        raise NotImplementedError


@pytest.mark.parametrize(("rate", "restarts"), [(1e-2, 0), (1e-9, 2)])
def test_a_warm_up_whose_loss_has_not_fallen_by_its_middle_begins_again(rate, restarts):
    steps = {"imitation_steps": 40, "imitation_batch": 8, "imitation_learning_rate": rate}
    config = Tiny(hidden_size=32, layers=1, demonstrations=64, **steps)
    model, tokenizer, demonstrations = build({"test": Patient()}, config, 0)
    samples = imitation_samples(demonstrations, ChatTokenizer(tokenizer))
    steps = []
    warm_up(model, samples, config, 0, lambda step, loss: steps.append(step))
    assert steps == [*range(1, 21)] * restarts + [*range(1, 41)]


@pytest.mark.slow
def test_without_a_demonstrator_the_model_learns_to_end_its_turns():
    config = Tiny(hidden_size=32, demonstrations=200, imitation_steps=60)
    env = Mute()
    model, tokenizer, _ = build({"test": env}, config, 0)
    chat = ChatTokenizer(tokenizer)
    samples = imitation_samples(babble(env, "test", 200, 0), chat)
    assert len(samples) == 200
    warm_up(model, samples, replace(config, imitation_learning_rate=1e-2), 0, lambda *_: None)
    limits = RolloutConfig(max_turns=1, max_turn_tokens=24, max_context=512)
    engine = Transformers().start(model, max_slots=32, max_context=512)
    collector = Collector(engine, chat, EnvPool(Mute), limits)
    tasks = [Task(env_id="test", seed=n) for n in range(32)]
    groups = asyncio.run(collector.collect(tasks, seed=0, group_size=1))
    cut = [g.episodes[0].stop_reason is StopReason.MAX_TURN_TOKENS for g in groups]
    assert sum(cut) <= 8


def test_babble_calls_tools_in_their_format_and_repeats():
    class WithTool(Tools):
        """It has a tool and no demonstrator."""

        @tool
        def lookup(self, key: str) -> str:
            """Look a key up."""
            return key

    texts = [e.turns[0].text for e in babble(WithTool(), "test", 64, 0)]
    calls = [text for text in texts if text.startswith("<tool_call>")]
    assert 10 < len(calls) < 54
    assert all(isinstance(parse_tool_calls(text)[0], ToolCall) for text in calls)
    assert texts == [e.turns[0].text for e in babble(WithTool(), "test", 64, 0)]


class Slips(Tools):
    """Its tool raises at a word that it does not know, which only a slip names."""

    name = "look"

    @tool
    def look(self, word: str) -> str:
        """Look a word up."""
        return {"tea": "hot"}[word]

    def expert_action(self, noise=0.0):
        slips = noise > 0 and self.np_random.random() < noise
        return format_tool_call(self.name, {"word": "tee" if slips else "tea"})


class Fails(Slips):
    """Its tool raises in a call that is no slip."""

    name = "find"

    @tool
    def find(self, word: str) -> str:
        """Find a word."""
        return {}[word]


@pytest.mark.parametrize(("kind", "slips", "told"), [(Slips, 0.5, 0), (Fails, 0.0, 1)])
def test_a_slip_of_the_demonstrator_is_no_warning_and_any_other_error_is(caplog, kind, slips, told):
    tasks = [Task(env_id="x", seed=seed) for seed in range(8)]
    episodes = demonstrate(kind(), tasks, slips, RolloutConfig(max_turns=2))
    assert any(f"{kind.name} failed: KeyError" in e.final_observation for e in episodes)
    assert caplog.text.count(f"tool {kind.name} raised KeyError") == told
    env = kind()
    env.reset(seed=0)
    env.step(format_tool_call(kind.name, {"word": "again"}))
    assert caplog.text.count(f"tool {kind.name} raised KeyError") == 1


def test_a_word_of_a_million_characters_is_bytes_and_crashes_nothing():
    long, short = build_tokenizer(["x" * 1_000_000, "yes or no"]), build_tokenizer(["yes or no"])
    assert len(long) == len(short)
    assert len(long.encode("x" * 2000)) == 2000
