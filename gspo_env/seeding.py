"""Seeds: every draw of a run follows from its seed."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np

HELD_OUT = 10**9
"""Seeds from here on are for evaluation; training seeds stay below."""


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed that depends on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@contextlib.contextmanager
def global_generators_kept() -> Iterator[None]:
    """Gives Python's and NumPy's global generators their states back afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
