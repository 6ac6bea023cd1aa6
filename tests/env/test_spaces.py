"""The text space."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Text
from gymnasium.vector.utils import batch_space, create_empty_array
from hypothesis import given
from hypothesis import strategies as st

from gspo_env.env.base import UnicodeText


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


def test_a_mask_sets_the_length() -> None:
    assert len(UnicodeText(100, seed=1).sample(mask=(60, None))) == 60


def test_equality_is_by_kind_and_bounds() -> None:
    assert UnicodeText(5) == UnicodeText(5)
    assert hash(UnicodeText(5)) == hash(UnicodeText(5))
    assert UnicodeText(5) != UnicodeText(6)
    assert UnicodeText(5) != Text(5, min_length=0)
    assert repr(UnicodeText(5)) == "UnicodeText(5, min_length=0)"


def test_it_batches_as_gymnasium_text_does() -> None:
    batched = batch_space(UnicodeText(9), 3)
    assert isinstance(batched, gymnasium.spaces.Tuple)
    empty = create_empty_array(UnicodeText(9), 3, fn=np.zeros)
    assert isinstance(empty, tuple)
    assert len(empty) == 3
