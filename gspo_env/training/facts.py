"""What a process that resumes a run needs beside the weights: facts, and the global generators."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from gspo_env.config import Config, to_toml


def run_facts(config: Config, model: Any, source: str) -> dict[str, Any]:
    """Returns what does not change in a run, and what a process that resumes it needs.

    Args:
        config: The settings.
        model: The model before training, without the adapter that training adds.
        source: The folder or the hub id of the model; empty if it was given or made.
    """
    return {
        "config": to_toml(config),
        "model": source,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "fingerprint": fingerprint(model),
    }


def fingerprint(model: Any) -> str:
    """Returns a checksum of the names, dtypes and values of a model's weights."""
    import torch

    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        values = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()


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


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Sets the global generators to the result of `generator_states`."""
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
