"""Seeds: every draw of a run follows from its seed."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np

HELD_OUT = 10**9
"""The first evaluation seed; training seeds are below it."""


SEEDS = 2**63
"""Seeds of a user are below this, so that TOML and every generator take them."""


def derive_seed(*parts: int | str) -> int:
    """Returns a 64-bit seed that depends on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def fingerprint(*parts: int | str) -> str:
    """Returns a short name of the parts, such as a task key: equal only for equal parts."""
    return f"{derive_seed(*parts):016x}"


@contextlib.contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restores the states of Python's and NumPy's global generators on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
