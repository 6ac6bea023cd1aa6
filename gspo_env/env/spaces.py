"""The space of all Unicode text."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from gymnasium.spaces import Text
from numpy.typing import NDArray

_SAMPLE_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
_SAMPLE_LENGTH = 32


class UnicodeText(Text):
    """Any Unicode text from `min_length` to `max_length` characters.

    `gymnasium.spaces.Text` holds only text over a listed character set. Here `characters` is the
    printable ASCII that `sample` draws from; `contains` checks only the length.

    Args:
        max_length: Maximum length in characters, inclusive.
        min_length: Minimum length in characters, inclusive.
        seed: Seed of `sample`.
    """

    def __init__(
        self, max_length: int, min_length: int = 0, *, seed: int | np.random.Generator | None = None
    ) -> None:
        """Sets the bounds."""
        super().__init__(max_length, min_length=min_length, charset=_SAMPLE_CHARACTERS, seed=seed)

    def sample(
        self,
        mask: tuple[int | None, NDArray[np.int8] | None] | None = None,
        probability: tuple[int | None, NDArray[np.float64] | None] | None = None,
    ) -> str:
        """Draws a short printable text; `mask` and `probability` work as in `Text.sample`."""
        if mask is None and probability is None:
            longest = max(self.min_length, min(self.max_length, _SAMPLE_LENGTH))
            mask = (int(self.np_random.integers(self.min_length, longest + 1)), None)
        return super().sample(mask, probability)

    def contains(self, x: Any) -> bool:
        """Returns whether `x` is text of an allowed length."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def __eq__(self, other: object, /) -> bool:
        """Returns whether `other` contains the same texts."""
        return (
            isinstance(other, UnicodeText)
            and self.min_length == other.min_length
            and self.max_length == other.max_length
        )

    def __hash__(self) -> int:
        """Hashes the bounds, which `__eq__` compares."""
        return hash((UnicodeText, self.min_length, self.max_length))

    def __repr__(self) -> str:
        """Shows the bounds."""
        return f"UnicodeText({self.max_length}, min_length={self.min_length})"
