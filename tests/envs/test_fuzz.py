"""Random text as input of every built-in environment; `stress/fuzz.py` does it for longer."""

from __future__ import annotations

import os

import pytest

from gspo_env.env.registration import _BUILTIN
from gspo_env.sandbox import find_missing
from stress.fuzz import play


@pytest.mark.parametrize("env_id", sorted(_BUILTIN))
def test_any_actions_give_the_same_sound_episode_twice(env_id: str) -> None:
    if "Python" in env_id and find_missing() and os.environ.get("GSPO_ENV_NO_SANDBOX") == "1":
        pytest.skip("the Python tool is NOT tested, GSPO_ENV_NO_SANDBOX is set")
    if not play(env_id, count=100, seed=0):
        pytest.skip(f"{env_id} cannot be made bare")
