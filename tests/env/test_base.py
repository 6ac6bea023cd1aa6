"""The environment contract."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_env.env.base import TextEnv, UnicodeText, clean, extract_tag
from gspo_env.errors import ConfigError, EnvironmentContractError


class Counts(TextEnv):
    """Ends after three turns, or when it is told to."""

    max_turns = 3

    def step(self, action: str) -> Any:
        self.require_episode()
        terminated, truncated = self.end_turn(action == "end")
        return "", 0.0, terminated, truncated, {}


def test_a_step_outside_an_episode_is_refused() -> None:
    env = Counts()
    for _ in range(2):
        with pytest.raises(EnvironmentContractError, match=r"Counts: step\(\) was called outside"):
            env.step("")
        env.reset(seed=0)
        assert env.step("end")[2:4] == (True, False)


def test_an_argument_replaces_the_limit_of_the_class_and_one_below_1_is_refused() -> None:
    assert [Counts().max_turns, Counts(5).max_turns] == [3, 5]
    with pytest.raises(ConfigError, match="Counts: max_turns is 0, expected at least 1"):
        Counts(0)


def test_the_limit_on_turns_truncates_unless_the_turn_ends_the_episode() -> None:
    env = Counts()
    for last, flags in (("go", (False, True)), ("end", (True, False))):
        env.reset(seed=0)
        assert [env.step("go")[2:4] for _ in range(2)] == [(False, False)] * 2
        assert env.step(last)[2:4] == flags


@given(st.text() | st.text(st.characters(categories=["Cs", "L"])))
def test_a_cleaned_text_can_be_encoded_and_sound_text_stays(text: str) -> None:
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
def test_the_last_whole_tag_is_read(text: str, content: str | None) -> None:
    assert extract_tag(text, "a") == content


@given(st.text(max_size=50))
def test_any_unicode_up_to_the_length_is_contained(text: str) -> None:
    assert UnicodeText(50).contains(text)


@pytest.mark.parametrize(
    ("value", "inside"), [("", False), ("é", True), ("abcd", False), (3, False)]
)
def test_bounds_are_inclusive_and_only_text_is_contained(value: object, inside: bool) -> None:
    assert UnicodeText(3, 1).contains(value) is inside


def test_samples_are_seeded_short_and_contained() -> None:
    first, second = UnicodeText(16384, seed=7), UnicodeText(16384, seed=7)
    samples = [first.sample() for _ in range(50)]
    assert samples == [second.sample() for _ in range(50)]
    assert all(len(text) <= 32 and text.isascii() and text in first for text in samples)
