"""What a checkpoint says of a run, and what may differ when the run goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.config import Config, from_dict
from gspo_env.errors import ConfigError, OutputError
from gspo_env.tracking.base import flatten
from gspo_env.training.checkpoints import START, Checkpoint, Checkpoints, damage, step_folders
from gspo_env.training.signals import Stop

if TYPE_CHECKING:
    from torch import Tensor

_CHANGEABLE = ("steps", "checkpoints.")
"""Beginnings of the settings that a resumed run may change."""
FACTS = ("env", "model", "dtype", "fingerprint", "left_out")
"""The entries of `run_facts`."""


@dataclass(slots=True)
class Keeper:
    """Saves a training loop into checkpoints, and says when it should stop."""

    checkpoints: Checkpoints
    stop: Stop
    facts: Callable[[], Mapping[str, Any]]
    """What a checkpoint says of the run besides the state of its loop."""
    write_model: Callable[[Path], None]
    """Writes the trained model into a folder."""

    def keep(
        self,
        step: int,
        state: Callable[[], tuple[Mapping[str, Any], Iterable[tuple[str, Tensor]]]],
        *,
        must: bool,
        best: bool,
    ) -> bool:
        """Saves the state after a step if it must be or if it is due; returns whether it did."""
        if not (must or self.checkpoints.due(step)):
            return False
        numbers, tensors = state()
        write_model = self.write_model if best else None
        return self.checkpoints.save({**self.facts(), **numbers}, tensors, write_model)


def read_config(numbers: Mapping[str, Any]) -> Config:
    """Returns the settings in a checkpoint; the only place that reads those of a run."""
    return from_dict(tomllib.loads(numbers["config"]))


def newest_config(run: str | Path) -> Config:
    """Returns the settings of a run, from its newest checkpoint that can be read.

    Raises:
        OutputError: There is none.
    """
    for folder in reversed(step_folders(Path(run) / "checkpoints")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return read_config(json.loads((folder / "state.json").read_text()))
    raise OutputError(
        f"{str(run)!r} has no checkpoint that can be read; expected the folder of a run, such as "
        "runs/Lookup-v0-seed0-1"
    )


def changed_config(saved: Checkpoint, wanted: Config | None) -> Config:
    """Returns the wanted config, or else the saved one, if the two differ only where they may.

    Raises:
        ConfigError: Another setting differs, or the run has done more steps already.
    """
    config = read_config(saved.numbers)
    if wanted is None:
        return config
    old, new = flatten(config), flatten(wanted)
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name) and not name.startswith(_CHANGEABLE):
            raise ConfigError(
                f"{name} is {new.get(name)!r}, and {old.get(name)!r} in the run that goes on; only "
                "steps, save_every and keep may change: start a new run for another value"
            )
    if wanted.steps < saved.step:
        raise ConfigError(
            f"steps is {wanted.steps}; expected at least {saved.step}, which are done"
        )
    return wanted


def run_facts(model: Any, source: str, env: str, left_out: int) -> dict[str, Any]:
    """Returns what does not change in a run, and what a process that goes on with it needs.

    Args:
        model: The model before training, without the adapter that training adds.
        source: The folder or the hub id of the model; empty if it was given or made.
        env: The environment as the user named it.
        left_out: Demonstrations that the warm-up left out.
    """
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    values = env, source, dtype, fingerprint(model), left_out
    return dict(zip(FACTS, values, strict=True))


def fingerprint(model: Any) -> str:
    """Returns a checksum of the names, dtypes and values of a model's weights."""
    import torch

    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        values = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()


def load_start(checkpoints: Checkpoints, dtype: str) -> tuple[Any, Any]:
    """Loads the model and the tokenizer that a run began with.

    Raises:
        OutputError: They are missing or damaged.
    """
    from gspo_env.model.load import load_model

    folder = checkpoints.folder / START
    if problem := damage(folder):
        raise OutputError(f"{str(folder)!r} is damaged: {problem}; start a new run")
    model, tokenizer = load_model(str(folder / "model"), dtype)
    for weight in model.parameters():
        # memory of a mapped file is aligned in another way, and kernels may round in another order
        weight.data = weight.data.clone()
    return model, tokenizer


def generators() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the states of the global generators, which environments may use."""
    import torch

    kind, keys, *rest = np.random.get_state()
    numbers = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
    tensors = {"generators.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states = enumerate(torch.cuda.get_rng_state_all())
        tensors |= {f"generators.cuda{n}": state for n, state in states}
    return numbers, tensors


def set_generators(numbers: Mapping[str, Any], named: Iterable[tuple[str, Tensor]]) -> None:
    """Sets the global generators to states of `generators`."""
    import torch

    version, keys, gauss = numbers["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, *rest = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    for name, state in named:
        if name == "generators.cpu":
            torch.set_rng_state(state)
        elif name.startswith("generators.cuda"):
            torch.cuda.set_rng_state(state, int(name.removeprefix("generators.cuda")))
