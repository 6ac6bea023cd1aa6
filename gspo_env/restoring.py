"""Restores what a checkpoint has, which may be damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def check_types(value: Any, like: Any, name: str = "state") -> None:
    """Checks that JSON from an untrusted file has the types of other JSON.

    Only what both have is compared, and no items of lists.

    Raises:
        ValueError: A value has another type, or is a number that no count and no time can be.
    """
    if isinstance(like, dict) and isinstance(value, dict):
        for key in (key for key in like if key in value):
            check_types(value[key], like[key], f"{name}.{key}")
    elif like is not None:
        number = isinstance(like, (int, float))
        kinds = (int, float) if number else (list, tuple) if isinstance(like, tuple) else type(like)
        right = isinstance(value, kinds)
        if not right or (number and not abs(value) <= 2**53):
            raise ValueError(f"{name} is {value!r:.80}")


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Sets the global generators to the result of `gspo_env.seeding.generator_states`."""
    import torch

    if "threads" in states and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(states["threads"], os.cpu_count() or 1)))
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    for device, state in enumerate(states["cuda"]):
        torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8), device)
