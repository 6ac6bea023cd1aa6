"""What a checkpoint says of a run, and what may differ when the run goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.config import Config, from_dict, to_toml
from gspo_env.errors import ConfigError, ModelError, OutputError
from gspo_env.rollout.mix import moved_only
from gspo_env.tracking.base import MODEL, flatten
from gspo_env.training.checkpoints import (
    START,
    Checkpoint,
    Checkpoints,
    damage,
    nothing_saved,
    step_folders,
)
from gspo_env.training.interrupt import Stop
from gspo_env.trust import SavedSettings, parse

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = ("config", "gives_outcome", "score", "supply")
"""Parts of a state that older checkpoints lack or have in another form."""
_CHANGEABLE = (
    "steps",
    "checkpoints.",
    "episodes.",
    "engine.addresses",
    "rollout.workers",
    "rollout.ray_address",
    "rollout.max_worker_restarts",
)
"""Beginnings of the settings that a resumed run may change: how long, what is kept, and where it is
played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The state of a training loop at one moment.

    Episodes and global generators go on while it is written; the learner does not.
    """

    numbers: Mapping[str, Any]
    """What JSON can hold, which nothing changes any more."""
    tensors: Mapping[str, Tensor]
    """Copies, by name."""
    learner: Callable[[], tuple[Mapping[str, Any], Iterable[tuple[str, Tensor]]]]
    """Returns the state of the learner; see `gspo_env.learner.Trainer.state`."""


@dataclass(slots=True)
class CheckpointWriter:
    """Saves a training loop into checkpoints, and says when it should stop."""

    checkpoints: Checkpoints
    stop: Stop
    facts: Mapping[str, Any]
    """The result of `run_facts`."""
    tracker_ids: Callable[[], Mapping[str, str]]
    """Returns the id of the run in each tracker, as far as it is known."""
    write_model: Callable[[Path], None]
    """Writes the trained model into a folder."""

    def keep(self, state: State, *, best: bool) -> Callable[[], bool]:
        """Returns what writes a state, in any thread, and returns whether it could.

        Args:
            state: The state of the loop.
            best: Whether the model is written as well, since this is the best checkpoint.
        """
        now = {"tracker": self.tracker_ids(), "failed": self.checkpoints.failed}
        write_model = self.write_model if best else None

        def write() -> bool:
            learner, tensors = state.learner()
            numbers = {**self.facts, **now, **state.numbers, "learner": learner}
            every = chain(tensors, state.tensors.items())
            return self.checkpoints.save(numbers, every, write_model)

        return write


def read_config(run: Path, numbers: Mapping[str, Any], wanted: Config | None) -> Config:
    """Returns the settings in a checkpoint.

    Args:
        run: Folder of the run.
        numbers: What the checkpoint says.
        wanted: Settings of the user, which name what those of another person's run name, too.

    Raises:
        ConfigError: They name something that the user has to give; see `gspo_env.trust`.
    """
    saved = parse(run / "config.toml", numbers["config"])
    given = {} if wanted is None else flatten(tomllib.loads(to_toml(wanted)))
    same = {name: value for name, value in saved.untrusted.items() if given.get(name) == value}
    moved = wanted is not None and moved_only(saved.env, wanted.env)
    saved.settings(same, env=wanted.env if wanted is not None and moved else "")
    return from_dict(tomllib.loads(numbers["config"]))


def newest_settings(run: str | Path) -> SavedSettings:
    """Returns the settings of a run, from its newest checkpoint that can be read, as data.

    Raises:
        ConfigError: They are not valid.
        OutputError: There is none.
    """
    for folder in reversed(step_folders(Path(run) / "checkpoints")):
        with contextlib.suppress(OSError, KeyError, json.JSONDecodeError, tomllib.TOMLDecodeError):
            numbers = json.loads((folder / "state.json").read_text())
            return parse(Path(run, "config.toml"), numbers["config"])
    if Path(run, "config.toml").is_file() and not step_folders(Path(run) / "checkpoints"):
        raise OutputError(nothing_saved(Path(run)))
    raise OutputError(
        f"{str(run)!r} has no checkpoint that can be read; expected the folder of a run, such as "
        "runs/Lookup-v0-seed0-1"
    )


def changed_config(run: Path, saved: Checkpoint, wanted: Config | None) -> Config:
    """Returns the wanted config, or else the saved one, if the two differ only where they may.

    Raises:
        ConfigError: Another setting differs, or the run has done more steps already.
    """
    config = read_config(run, saved.numbers, wanted)
    if wanted is None:
        return config
    # `auto` is what the run has decided, which its config.toml has
    if wanted.credit.score in ("auto", saved.numbers["score"]["score"]):
        wanted = replace(wanted, credit=replace(wanted.credit, score=config.credit.score))
    old, new = flatten(config), flatten(wanted)
    for name in sorted({*old, *new}):
        moved = name == "env" and moved_only(config.env, wanted.env)
        if old.get(name) != new.get(name) and not (moved or name.startswith(_CHANGEABLE)):
            raise ConfigError(
                f"{name} is {new.get(name)!r}, and {old.get(name)!r} in the run that goes on; only "
                "steps, what is kept, addresses and workers may change: start a new run for "
                "another value"
            )
    if wanted.steps < saved.step:
        raise ConfigError(
            f"steps is {wanted.steps}; expected at least {saved.step}, which are done"
        )
    return wanted


def run_facts(config: Config, model: Any, source: str, left_out: int) -> dict[str, Any]:
    """Returns what does not change in a run, and what a process that goes on with it needs.

    Args:
        config: The settings.
        model: The model before training, without the adapter that training adds.
        source: The folder or the hub id of the model; empty if it was given or made.
        left_out: Demonstrations that the warm-up left out.
    """
    return {
        "config": to_toml(config),
        "model": source,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "fingerprint": fingerprint(model),
        "left_out": left_out,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """A run that goes on."""

    checkpoints: Checkpoints
    saved: Checkpoint
    config: Config
    model: Any
    """The model before training, or the name that finds it."""
    tokenizer: Any

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the model is written."""
        return self.saved.step >= self.config.steps and (self.checkpoints.run / MODEL).is_dir()

    def tracker_ids(self, trackers: Iterable[str]) -> dict[str, str]:
        """Returns the id of the run in each tracker, empty where a tracker had not given one."""
        return {name: self.saved.numbers["tracker"].get(name, "") for name in trackers}

    def check(self, model: Any) -> None:
        """Checks that the model before training is the one that the run began with.

        Raises:
            ModelError: It is another one.
        """
        if fingerprint(model) != self.saved.numbers["fingerprint"]:
            source = self.saved.numbers["model"] or "in checkpoints/start"
            raise ModelError(
                f"the model {source!r} has other weights than when the run "
                f"{str(self.checkpoints.run)!r} began; expected the same"
            )


def open_run(run: Path, wanted: Config | None) -> Resumed:
    """Locks a run and reads its newest undamaged checkpoint and the model that it began with.

    Args:
        run: Folder of the run.
        wanted: The config to go on with; None takes the saved one.

    Raises:
        ConfigError: The config changes a setting that may not change.
        OutputError: There is no such checkpoint, another version wrote it, or another process
            trains the run.
    """
    if not (run / "checkpoints").is_dir():
        raise OutputError(f"{str(run)!r} has no checkpoints; expected the folder of a run")
    checkpoints = Checkpoints(run, (wanted or Config()).checkpoints)
    saved = checkpoints.newest()
    _check_parts(saved)
    config = changed_config(run, saved, wanted)
    checkpoints.settings, checkpoints.failed = config.checkpoints, int(saved.numbers["failed"])
    model, tokenizer = saved.numbers["model"], None
    if not model:
        model, tokenizer = _load_start(checkpoints, saved.numbers["dtype"])
    return Resumed(
        checkpoints=checkpoints, saved=saved, config=config, model=model, tokenizer=tokenizer
    )


def _check_parts(saved: Checkpoint) -> None:
    """Refuses a checkpoint that another version wrote, before anything is loaded."""
    numbers = saved.numbers
    lacks = [name for name in _PARTS if name not in numbers]
    if not lacks and not isinstance(numbers["gives_outcome"], Mapping):
        lacks = ["gives_outcome of each environment"]
    if lacks:
        raise OutputError(
            f"the checkpoint {str(saved.folder)!r} is of another version of gspo-env: it lacks "
            f"{', '.join(lacks)}; go on with the version that wrote it, or start a new run"
        )


def _load_start(checkpoints: Checkpoints, dtype: str) -> tuple[Any, Any]:
    from gspo_env.model.load import load_model

    folder = checkpoints.folder / START
    if problem := damage(folder):
        raise OutputError(f"{str(folder)!r} is damaged: {problem}; start a new run")
    model, tokenizer = load_model(str(folder), dtype)
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
