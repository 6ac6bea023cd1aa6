"""The environment contract."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gspo_env.env.base import TextEnv, check_reset, check_step, extract_tag
from gspo_env.errors import EnvironmentContractError


def test_defaults_of_an_environment() -> None:
    env = TextEnv()
    assert env.system_prompt is None
    assert env.tools == ()
    assert env.blocking is None
    assert "é" * 16384 in env.observation_space
    with pytest.raises(NotImplementedError, match="no scripted demonstrator"):
        env.expert_action()


@pytest.mark.parametrize(
    "reward", [1, 1.0, np.float32(1), np.int64(1), np.array(1.0)], ids=lambda r: type(r).__name__
)
def test_any_real_reward_becomes_a_python_float(reward: Any) -> None:
    result = check_step("x", ("a", reward, np.bool_(True), False, {}))
    assert result == ("a", 1.0, True, False, {})
    assert type(result[1]) is float
    assert type(result[2]) is bool


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (("a", 1.0, False, False), "step() result"),
        (None, "step() result"),
        ((b"a", 1.0, False, False, {}), "step() observation is b'a' of type bytes, expected a str"),
        (("a", True, False, False, {}), "step() reward is True of type bool"),
        (("a", math.nan, False, False, {}), "expected a finite number"),
        (("a", math.inf, False, False, {}), "expected a finite number"),
        (("a", 10**400, False, False, {}), "expected a finite number"),
        (("a", "1", False, False, {}), "step() reward is '1' of type str"),
        (("a", 1.0, 0, False, {}), "step() terminated is 0 of type int, expected a bool"),
        (("a", 1.0, False, None, {}), "step() truncated"),
        (("a", 1.0, False, False, None), "step() info is None"),
    ],
)
def test_a_broken_step_is_named_in_one_sentence(result: object, message: str) -> None:
    with pytest.raises(EnvironmentContractError) as caught:
        check_step("shop/Shop-v0", result)
    assert message in str(caught.value)
    assert str(caught.value).startswith("shop/Shop-v0: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("result", ["ab", ("a",), (1, {}), ("a", [])])
def test_a_broken_reset_is_an_error(result: object) -> None:
    with pytest.raises(EnvironmentContractError, match=r"reset\(\)"):
        check_reset("x", result)
    assert check_reset("x", ("a", {})) == ("a", {})


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<a>1</a>", "1"),
        ("<a>1</a> then <a> 2 </a>", "2"),
        ("<a><a>1</a>", "1"),
        ("</a><a>", None),
        ("<a>1", None),
        ("", None),
    ],
)
def test_the_last_whole_tag_is_read(text: str, content: str | None) -> None:
    assert extract_tag(text, "a") == content
