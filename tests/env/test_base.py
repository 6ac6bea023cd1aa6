"""The environment contract."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_env import Tools

from gspo_env import tool
from gspo_env.check import check_env
from gspo_env.env.base import TextEnv, UnicodeText, extract_tag
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentCheckError, EnvironmentContractError
from gspo_env.redaction import clean
from gspo_env.rollout.play import play_now, try_out
from gspo_env.types import StopReason, Task


class Counts(TextEnv):
    """Ends after three turns, or when it is told to."""

    max_turns = 3

    def step(self, action: str) -> Any:
        self.require_episode()
        terminated, truncated = self.end_turn(action == "end")
        return "", 0.0, terminated, truncated, {}


def test_a_step_outside_an_episode_is_refused():
    env = Counts()
    for _ in range(2):
        with pytest.raises(EnvironmentContractError, match=r"Counts: step\(\) was called outside"):
            env.step("")
        env.reset(seed=0)
        assert env.step("end")[2:4] == (True, False)


def test_turns_that_no_reset_of_the_base_class_begins_are_refused():
    class Forgets(Counts):
        def reset(self, *, seed=None, options=None):
            return "", {}

    env = Forgets()
    env.reset(seed=0)
    with pytest.raises(EnvironmentContractError, match=r"Forgets: end_turn.*super\(\)\.reset\("):
        env.end_turn(False)
    with pytest.raises(
        EnvironmentContractError, match=r"call reset\(\) first, .*super\(\)\.reset\("
    ):
        env.require_episode()


def test_an_argument_replaces_the_limit_of_the_class_and_one_below_1_is_refused():
    assert [Counts().max_turns, Counts(5).max_turns] == [3, 5]
    with pytest.raises(ConfigError, match="Counts: max_turns is 0, expected at least 1"):
        Counts(0)


def test_the_limit_on_turns_truncates_unless_the_turn_ends_the_episode():
    env = Counts()
    for last, flags in (("go", (False, True)), ("end", (True, False))):
        env.reset(seed=0)
        assert [env.step("go")[2:4] for _ in range(2)] == [(False, False)] * 2
        assert env.step(last)[2:4] == flags


@given(st.text() | st.text(st.characters(categories=["Cs", "L"])))
def test_a_cleaned_text_can_be_encoded_and_sound_text_stays(text):
    cleaned = clean(text)
    cleaned.encode()
    assert len(cleaned) == len(text)
    assert clean(cleaned) == cleaned


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
def test_the_last_whole_tag_is_read(text, content):
    assert extract_tag(text, "a") == content


@given(st.text(max_size=50))
def test_any_unicode_up_to_the_length_is_contained(text):
    assert UnicodeText(50).contains(text)


@pytest.mark.parametrize(
    ("value", "inside"), [("", False), ("é", True), ("abcd", False), (3, False)]
)
def test_bounds_are_inclusive_and_only_text_is_contained(value, inside):
    assert UnicodeText(3, 1).contains(value) is inside


def test_samples_are_seeded_short_and_contained():
    first, second = UnicodeText(16384, seed=7), UnicodeText(16384, seed=7)
    samples = [first.sample() for _ in range(50)]
    assert samples == [second.sample() for _ in range(50)]
    assert all(len(text) <= 32 and text.isascii() and text in first for text in samples)


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
