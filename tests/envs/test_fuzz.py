"""Random text as input of every built-in environment and of the tool-call parsers.

`python stress/fuzz.py` does the same with 100,000 strings each.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_env import format_tool_call, make_env
from gspo_env.env.info import parse_step
from gspo_env.env.registration import _BUILTIN
from gspo_env.errors import ConfigError, MissingExtraError
from gspo_env.sandbox import find_missing

KWARGS: dict[str, dict[str, Any]] = {
    "gspo/Dataset-v0": {"data": [{"prompt": f"What is {n} + 1?"} for n in range(9)], "max_turns": 3}
}
"""Arguments of the environments that need them."""


def make(env_id: str) -> Any:
    """The environment; skips if it needs arguments or a package that is not installed."""
    if "Python" in env_id and find_missing() and os.environ.get("GSPO_ENV_NO_SANDBOX") == "1":
        pytest.skip("the Python tool is NOT tested, GSPO_ENV_NO_SANDBOX is set")
    try:
        return make_env(env_id, **KWARGS.get(env_id, {}))
    except (MissingExtraError, ConfigError) as error:
        pytest.skip(f"{env_id} cannot be made bare: {error}")


TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def actions(tools: Any) -> st.SearchStrategy[str]:
    """Free text, tagged text, and calls of these tools with any arguments."""
    names = [tool.name for tool in tools] or ["lookup"]
    keys = [key for tool in tools for key in tool.parameters["properties"]] or ["key"]
    return (
        TEXT
        | st.builds("<{0}>{1}</{0}>".format, st.sampled_from(["answer", "guess"]), TEXT)
        | st.builds("<tool_call>{}</tool_call>".format, TEXT)
        | st.builds(
            format_tool_call,
            st.sampled_from(names) | TEXT,
            st.dictionaries(st.sampled_from(keys) | TEXT, VALUES, max_size=3),
        )
    )


@pytest.mark.parametrize("env_id", sorted(_BUILTIN))
def test_any_actions_give_the_same_sound_episode_twice(env_id: str) -> None:
    pair = [make(env_id), make(env_id)]

    @settings(max_examples=20 if pair[0].unwrapped.blocking else 50)
    @given(st.lists(actions(pair[0].unwrapped.tools), max_size=8), st.integers(0, 2**32 - 1))
    def play(texts: list[str], seed: int) -> None:
        def record(env: Any) -> list[Any]:
            steps = [env.reset(seed=seed)]
            for text in texts:
                steps.append(parse_step(env_id, env.step(text)))
                steps[-1][0].encode()
                if steps[-1][2] or steps[-1][3]:
                    break
            return steps

        assert record(pair[0]) == record(pair[1])

    play()
    for env in pair:
        env.close()
