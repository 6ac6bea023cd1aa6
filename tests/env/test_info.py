"""What `reset` and `step` return is read once; every fault is one clear sentence."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_env import TextEnv, tool
from gspo_env.env.info import parse_reset, parse_step, read_prompt
from gspo_env.errors import EnvironmentContractError
from gspo_env.rollout.play import try_out
from gspo_env.tools.tool import as_tool
from gspo_env.types import Message, Prompt, ResetInfo, StepInfo, ToolCall

ROOT = Path(__file__).resolve().parents[2]


def step(info: Any, tokens: int | None = None) -> StepInfo:
    return parse_step("shop", ("a", 0.0, False, False, info), tokens)[4]


def reset(info: Any) -> ResetInfo:
    return parse_reset("shop", ("a", info))[1]


@tool
def look(where: str) -> str:
    """Look somewhere."""
    return where


@pytest.mark.parametrize(
    "reward", [1, 1.0, np.float32(1), np.int64(1), np.array(1.0)], ids=lambda r: type(r).__name__
)
def test_any_real_reward_becomes_a_python_float(reward):
    result = parse_step("x", ("a", reward, np.bool_(True), False, {}))
    assert result == ("a", 1.0, True, False, StepInfo())
    assert type(result[1]) is float
    assert type(result[2]) is bool


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (("a", 1.0, False, False), "step() result"),
        ((b"a", 1.0, False, False, {}), "step() observation is b'a' of type bytes, expected a str"),
        (("a", True, False, False, {}), "step() reward is True of type bool"),
        (("a", math.nan, False, False, {}), "expected a finite number"),
        (("a", 10**400, False, False, {}), "expected a finite number"),
        (("a", -1e39, False, False, {}), "is -1e+39 of type float, expected a finite number up to"),
        (("a", "1", False, False, {}), "step() reward is '1' of type str"),
        (("a", 1.0, 0, False, {}), "step() terminated is 0 of type int, expected a bool"),
        (("a", 1.0, False, None, {}), "step() truncated"),
        (("a", 1.0, False, False, None), "step() info is None"),
    ],
)
def test_a_broken_step_is_named_in_one_sentence(result, message):
    with pytest.raises(EnvironmentContractError) as caught:
        parse_step("shop/Shop-v0", result)
    assert message in str(caught.value)
    assert str(caught.value).startswith("shop/Shop-v0: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("result", ["ab", ("a",), (1, {}), ("a", [])])
def test_a_broken_reset_is_an_error(result):
    with pytest.raises(EnvironmentContractError, match=r"reset\(\)"):
        parse_reset("x", result)
    assert parse_reset("x", ("a", {})) == ("a", ResetInfo())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("episodic_reward", math.nan, "a finite number up to 1e+15 in size"),
        ("episodic_reward", "1", "a finite number up to 1e+15 in size"),
        ("episodic_reward", 1e39, "a finite number up to 1e+15 in size"),
        ("success", "yes", "a bool"),
        ("state_key", (1, 2), "a str or an int"),
        ("observation_role", "system", "'user' or 'tool'"),
        ("observation_role", np.array(["user", "tool"]), "'user' or 'tool'"),
        *(
            ("reward_parts", parts, "a dict of finite numbers by name, up to 1e+15 in size")
            for parts in ({"a": math.inf}, {1: 1.0}, {"b": -1e16}, {"a": 1.0, "b": None})
        ),
        ("token_advantages", [1.0, math.nan], "one finite number per sampled token"),
        ("token_advantages", [1.0, -1e39], "one finite number per sampled token"),
        ("token_advantages", [[1.0], [2.0]], "one finite number per sampled token"),
        ("token_mask", 3, "one finite number per sampled token"),
        ("malformed_calls", -1, "an int of at least 0"),
        ("agent", 3, "a str"),
        ("agent", "a" * 1_000_001, "at most 1,000,000 characters"),
    ],
)
def test_an_impossible_value_of_a_step_is_named(key, value, expected):
    with pytest.raises(EnvironmentContractError) as caught:
        step({key: value})
    assert str(caught.value).startswith(f"shop: step() info[{key!r}] is ")
    assert str(caught.value).endswith(f"expected {expected}.")


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("messages", "hello"),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [CHAT[0], CHAT[0], CHAT[1]]),
        ("messages", [*CHAT, {"role": "system", "content": "s"}]),
        ("messages", [{"role": "tool", "content": "s"}, CHAT[1]]),
        ("tools", ["look"]),
        ("tools", as_tool(look)),
        ("task_key", 1.5),
        ("state_key", b"a"),
    ],
)
def test_an_impossible_value_of_a_reset_is_named(key, value):
    with pytest.raises(EnvironmentContractError, match=rf"shop: reset\(\) info\['{key}'\] is "):
        reset({key: value})


def test_token_judgements_need_one_value_for_each_sampled_token():
    info = {"token_mask": np.array([1, 0, 1]), "token_advantages": (np.float32(0.5), 1, -2)}
    parsed = step(info, 3)
    assert parsed.token_mask == (True, False, True)
    assert parsed.token_advantages == (0.5, 1.0, -2.0)
    assert step(info) == parsed  # a text-only policy has no tokens to compare with
    with pytest.raises(EnvironmentContractError, match="expected 4 values, one per sampled token"):
        step(info, 4)


def test_numpy_scalars_become_python_values():
    parsed = step(
        {
            "episodic_reward": np.float32(0.5),
            "success": np.bool_(True),
            "state_key": np.int64(3),
            "reward_parts": {"a": np.float64(1)},
        }
    )
    expected = StepInfo(episodic_reward=0.5, success=True, state_key="3", reward_parts={"a": 1.0})
    assert parsed == expected
    assert type(parsed.episodic_reward) is float
    assert type(parsed.success) is bool


def test_a_conversation_that_the_user_or_a_tool_ends_is_whole():
    asked = Message(role="user", content="a")
    told = Message(role="tool", content="2", tool_call_id="1")
    assert reset({"messages": [CHAT[0]]}).messages == (asked,)
    assert step({"messages": [CHAT[0], CHAT[1], told]}).messages == (
        asked,
        Message(role="assistant", content="b"),
        told,
    )
    with pytest.raises(EnvironmentContractError, match="whole conversation"):
        step({"messages": CHAT})


def test_none_means_that_a_key_is_not_given():
    names = [f.name for f in dataclasses.fields(StepInfo) if f.name != "extra"]
    assert step(dict.fromkeys(names)) == StepInfo()


def test_every_field_but_extra_is_read_and_every_other_key_is_kept():
    info = {"task_key": 1, 3: "three", "extra": 4}
    assert step(dict(info)) == StepInfo(extra=info)
    assert reset({"success": "?"}) == ResetInfo(extra={"success": "?"})


@given(st.dictionaries(st.text() | st.integers(), st.none() | st.text() | st.floats()))
def test_an_info_is_read_or_refused_and_nothing_is_lost(info):
    names = {field.name for field in dataclasses.fields(StepInfo)} - {"extra"}
    try:
        parsed = step(info)
    except EnvironmentContractError:
        assert names & set(info)
        return
    assert set(parsed.extra) == set(info) - names


class Shop(TextEnv):
    """Changes its instructions with the task."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.system_prompt = f"Sell {seed}."
        self.tools = (as_tool(look),)
        return "hello", {}


def test_the_prompt_is_read_through_wrappers_after_the_reset():
    env = gymnasium.wrappers.TimeLimit(Shop(), 3)
    env.reset(seed=7)
    assert read_prompt(env) == Prompt(system="Sell 7.", tools=(as_tool(look),))


def test_what_reset_says_replaces_what_the_environment_says():
    env = Shop()
    env.reset(seed=7)
    system = {"role": "system", "content": "Buy."}
    told = read_prompt(env, reset({"messages": [system, *CHAT], "tools": []}))
    messages = (Message(role="user", content="a"), Message(role="assistant", content="b"))
    assert told == Prompt(system="Buy.", tools=(), messages=messages)


def test_an_environment_without_instructions_has_an_empty_prompt():
    class Plain(gymnasium.Env[str, str]):
        pass

    assert read_prompt(Plain()) == Prompt()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("key", ["token_advantages", "token_mask"])
def test_a_wrong_number_of_values_for_tokens_is_found_before_training(key, count):
    class Judge(TextEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return "begin", {}

        def step(self, action: str) -> Any:
            return "", 0.0, True, False, {key: [0.0] * count}

    with pytest.raises(EnvironmentContractError, match=rf"{key}'\] is .*one per sampled token"):
        try_out("x", Judge())


def test_calls_in_messages_may_be_dictionaries():
    call = {"name": "look", "arguments": {"where": "here"}, "id": "1"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    read = step({"messages": messages}).messages
    assert read[1].tool_calls == (ToolCall(**call),)


def test_results_are_in_the_order_of_the_calls():
    calls = [{"name": "buy", "arguments": {"item": i}, "id": i} for i in ("ca", "cb")]
    asked = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    told = [{"role": "tool", "content": f"of {i}", "tool_call_id": i} for i in ("cb", "ca")]
    for messages in ([*asked, *told], [*asked, told[0], CHAT[0], told[1]]):
        read = step({"messages": messages}).messages
        assert [m.content for m in read if m.role == "tool"] == ["of ca", "of cb"]
        assert [m.role for m in read] == [m["role"] for m in messages]
    unnamed = [{"role": "tool", "content": c} for c in "ba"]
    assert [m.content for m in step({"messages": [*asked, *unnamed]}).messages[2:]] == ["b", "a"]
    mixed = {"role": "tool", "content": "of ca"}
    read = step({"messages": [*asked, told[0], mixed]}).messages
    assert [m.content for m in read[2:]] == ["of ca", "of cb"]
    refused = {"role": "tool", "content": "no call"}  # of a call that could not be read
    read = step({"messages": [*asked, told[0], refused, told[1]]}).messages
    assert [m.content for m in read[2:]] == ["of ca", "no call", "of cb"]
    with pytest.raises(EnvironmentContractError, match=r"'cx'; expected one of \['ca', 'cb'\]"):
        step({"messages": [*asked, {**told[0], "tool_call_id": "cx"}]})


def test_a_key_that_is_nearly_another_is_named_once(caplog):
    for _ in range(3):
        for env_id in ("first", "second"):
            parse_step(env_id, ("", 0.0, True, False, {"reward_part": {}, "score": 1, 7: 8}))
            parse_reset(env_id, ("", {"message": "hi", "tool_choice": "any"}))
    assert [record.getMessage() for record in caplog.records] == [
        f"{env_id}: {method}() info has the key {key!r}, which training does not read; do you mean "
        f"{meant!r}?"
        for env_id in ("first", "second")
        for method, key, meant in (
            ("step", "reward_part", "reward_parts"),
            ("reset", "message", "messages"),
        )
    ]
