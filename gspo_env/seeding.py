"""Seeds: every draw of a run follows from its seed."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from math import gcd
from typing import Any

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


def draw_index(random: np.random.Generator, seed: int | None, count: int) -> int:
    """Returns the index of one of so many tasks, for an environment with a list of them.

    Successive evaluation seeds take each index once before any twice, in a mixed order; any other
    index is drawn.
    """
    drawn = int(random.integers(count))
    if seed is None or seed < HELD_OUT:
        return drawn
    # a step that is coprime to the count meets each index; neighbours are far apart
    step = next(n for n in range(int(count * 0.618) + 1, 2 * count + 2) if gcd(n, count) == 1)
    return (seed - HELD_OUT) * step % count


@contextlib.contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restores the states of Python's and NumPy's global generators on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def generator_states() -> dict[str, Any]:
    """Returns the states of the global generators, which environments may use, as JSON."""
    import torch

    kind, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in cuda],
        "threads": torch.get_num_threads(),  # sums round in another order with another number
    }


def seed_generators(seed: int) -> None:
    """Seeds the global generators, which environments and models may use."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
