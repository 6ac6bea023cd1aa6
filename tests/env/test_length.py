"""The limit on an observation's length holds wherever an environment is played."""

from __future__ import annotations

import re

import pytest
from small_env import Tools

from gspo_env import tool
from gspo_env.check import check_env
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentCheckError, EnvironmentContractError
from gspo_env.rollout.play import play_now, try_out
from gspo_env.types import StopReason, Task

FILE = """
from gspo_env import TextEnv

class Book(TextEnv):
    \"\"\"Its observations have as many characters as its argument says.\"\"\"
    def __init__(self, first=10, later=10):
        super().__init__()
        self.first, self.later = first, later

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "a" * self.first, {}

    def step(self, action):
        return "a" * self.later, 1.0, True, False, {}
"""


@pytest.fixture
def book(tmp_path):
    """The name of an environment whose observations can be long."""
    (tmp_path / "book.py").write_text(FILE)
    return f"{tmp_path / 'book.py'}:Book"


def played(env):
    return play_now(env, Task(env_id="book", seed=0), lambda now: "x")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"first": 16385}, "reset() observation is 16385 characters long; expected at most 16384:"),
        ({"later": 16385}, "step() observation is 16385 characters long; expected at most 16384:"),
        ({"max_observation": 9}, "reset() observation is 10 characters long; expected at most 9:"),
        ({"first": 16384, "later": 16384}, ""),
        ({"first": 20_000, "max_observation": 20_000}, ""),
    ],
)
def test_an_observation_longer_than_the_limit_is_an_error_in_every_place(book, settings, error):
    episode = played(make_env(book, **settings))
    assert (episode.stop_reason is StopReason.INVALID) == bool(error)
    assert error in (episode.error or "")
    if error:
        with pytest.raises(EnvironmentContractError, match=re.escape(error)):
            try_out("book", make_env(book, **settings))
        with pytest.raises(EnvironmentCheckError, match=re.escape(error)):
            check_env(make_env(book, **settings))


def test_a_limit_that_is_no_number_is_refused(book):
    with pytest.raises(ConfigError, match="max_observation is 'long'; expected an integer"):
        make_env(book, max_observation="long")


def test_an_environment_in_its_own_process_has_the_same_limit(book):
    env = IsolatedEnv(book, {"first": 20_000, "max_observation": 20_000}, 60.0)
    try:
        assert played(env).error is None
    finally:
        env.close()


def test_the_answers_of_tools_are_cut_at_the_limit():
    class Reader(Tools):
        """Reads a file of unknown length."""

        @tool
        def read(self) -> str:
            """Read the file."""
            return "a" * 50_000

    env = Reader()
    env.reset(seed=0)
    call = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
    assert len(env.step(call)[0]) == 16384
