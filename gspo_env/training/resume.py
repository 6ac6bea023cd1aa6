"""Resumes a run from its newest checkpoint, and says what may differ when it does."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.config import Config, from_dict, to_toml
from gspo_env.env.registration import class_of, read_members
from gspo_env.errors import DAMAGE, ConfigError, ModelError, OutputError, raised_as
from gspo_env.files import (
    MODEL,
    check_folder,
    parse_toml,
    read_file,
    regular_file,
    saved_step,
    step_folders,
)
from gspo_env.registry import BUILTIN, name_of
from gspo_env.restoring import check_types, set_generator_states
from gspo_env.runs.run import is_complete
from gspo_env.saved import (
    SavedSettings,
    check_model,
    class_name,
    parse,
    read_settings,
    replace_choices,
    saved_name,
)
from gspo_env.tracking.base import flatten
from gspo_env.training.checkpoints import (
    FORMAT,
    START,
    Checkpoints,
    begin_again,
    checksum,
    fingerprint,
    without_checkpoint,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gspo_env.training.loop import Loop

logger = logging.getLogger(__name__)

_MAX_MANIFEST, MAX_STATE = 1 << 20, 1 << 28
"""Bytes of `manifest.json` and of `state.json` that are read."""
_CHANGEABLE = (
    "steps",
    "stop_at_success",
    "checkpoints.",
    "episodes.",
    "engine.addresses",
    "rollout.workers",
    "rollout.ray_address",
    "rollout.max_worker_restarts",
)
"""Beginnings of the settings that a resumed run may change: how long, what is kept, and where it is
played."""

_FACTS: Mapping[str, Any] = {
    **{"config": "", "model": "", "dtype": "", "fingerprint": "", "failed": 0, "left_out": 0},
    **{"recorded": {"metrics": 0, "calls": 0}, "score": {}},
}
"""What a checkpoint says of its run, as an example."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are as they were written."""

    folder: Path
    numbers: Mapping[str, Any]
    """What `state.json` holds."""

    @property
    def step(self) -> int:
        """The last step that is part of it."""
        return int(self.numbers["step"])

    @property
    def in_imitation(self) -> bool:
        """Whether the run has to imitate before its first step."""
        return "imitation" in self.numbers

    @contextmanager
    def reading(self) -> Iterator[Mapping[str, Any]]:
        """Returns a context with the numbers, in which a state is restored.

        Raises:
            OutputError: It is not the state of a run.
        """
        from safetensors import SafetensorError

        problem, mend = f"{str(self.folder)!r} is damaged", "; expected the checkpoint of a run"
        causes = *DAMAGE, RuntimeError, SafetensorError
        with raised_as(OutputError, problem, *causes, mend=mend):
            yield self.numbers

    def check(self) -> None:
        """Checks that it says what a run needs.

        Raises:
            OutputError: It does not.
        """
        problem = f"{str(self.folder / 'state.json')!r} is not of a run"
        with raised_as(OutputError, problem, ValueError, mend="; start a new run"):
            check_types({name: self.numbers.get(name) for name in _FACTS}, _FACTS)

    def check_start(self, run: Path, model: Any) -> None:
        """Checks that a model is the one that the run began with.

        Raises:
            ModelError: It is another one.
        """
        if fingerprint(model) != self.numbers["fingerprint"]:
            place = "of the recipe" if self.in_imitation else "in checkpoints/start"
            source = self.numbers["model"] or place
            raise ModelError(
                f"the model {source!r} has other weights than when the run {str(run)!r} began; "
                "expected the same"
            )

    def start(self, run: Path) -> tuple[Any, Any]:
        """Returns the model before training and its tokenizer, or the name that finds both.

        The name is empty if the recipe makes the model, since the run has not imitated to the end.
        """
        name = self.numbers["model"]
        if name or self.in_imitation:
            return name, None
        return _load_start(run / "checkpoints" / START, self.numbers["dtype"])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors by name, one file after the other."""
        from safetensors.torch import load_file

        for file in sorted(self.folder.glob("state-*.safetensors")):
            yield from load_file(file).items()


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """A run that is resumed, and locked for it."""

    checkpoints: Checkpoints
    checkpoint: Checkpoint
    config: Config
    model: Any
    """The model before training, or the name that finds it; empty if the recipe makes it again."""
    tokenizer: Any

    @property
    def finished(self) -> bool:
        """Whether no step is left and the model is written."""
        checkpoint, config = self.checkpoint, self.config
        if checkpoint.in_imitation or saved_step(self.checkpoints.run / MODEL) != checkpoint.step:
            return False
        with checkpoint.reading() as numbers:
            metrics = dict(numbers["history"][-1][1]) if checkpoint.step else {}
            success = float(metrics.get("eval/success", 0.0))
            return is_complete(checkpoint.step, success, config.steps, config.stop_at_success)

    @property
    def recorded(self) -> dict[str, int]:
        """The bytes of what the run had recorded; see `gspo_env.tracking.RunInfo.resume`."""
        recorded = self.checkpoint.numbers["recorded"]
        return {name: int(recorded[name]) for name in _FACTS["recorded"] if name in recorded}

    @property
    def before(self) -> dict[str, float]:
        """The metrics of the model before the first step: as shipped, and of its imitation."""
        with self.checkpoint.reading() as numbers:
            saved = numbers.get("before", {})
            return {str(name): float(value) for name, value in saved.items()}

    def check(self, model: Any) -> None:
        """Checks that the model before training is the one that the run began with.

        Raises:
            ModelError: It is another one.
        """
        self.checkpoint.check_start(self.checkpoints.run, model)


def open_run(run: Path, config: Config | None) -> Resumed:
    """Locks a run and reads its newest undamaged checkpoint and the model that it began with.

    Args:
        run: Folder of the run.
        config: The config to resume with; None takes the saved one.

    Raises:
        ConfigError: The config changes a setting that may not change.
        OutputError: There is no such checkpoint, another version wrote it, or another process
            trains the run.
    """
    if not (run / "checkpoints").is_dir():
        raise OutputError(f"{str(run)!r} has no checkpoints; expected the folder of a run")
    check_folder(run)
    checkpoints = Checkpoints(run, (config or Config()).checkpoints)
    with ExitStack() as unlock:  # another process may train the run if this raises
        unlock.enter_context(checkpoints)
        checkpoint = newest_checkpoint(checkpoints)
        checkpoint.check()
        config = changed_config(run, checkpoint, config)
        checkpoints.settings = config.checkpoints
        checkpoints.failed = int(checkpoint.numbers["failed"])
        model, tokenizer = checkpoint.start(run)
        unlock.pop_all()
    return Resumed(
        checkpoints=checkpoints,
        checkpoint=checkpoint,
        config=config,
        model=model,
        tokenizer=tokenizer,
    )


def newest_checkpoint(checkpoints: Checkpoints) -> Checkpoint:
    """Returns the newest checkpoint whose files are undamaged; moves newer ones aside.

    Raises:
        OutputError: There is none.
    """
    problems: dict[Path, str] = {}
    for folder in reversed(step_folders(checkpoints.folder)):
        checkpoint = _read(folder)
        if isinstance(checkpoint, Checkpoint):
            checkpoints.use(folder, checkpoint.step)
            _move_aside(problems)
            return checkpoint
        problems[folder] = f"{folder.name}: {checkpoint}"
    if problems:
        raise OutputError(
            f"expected a checkpoint in {str(checkpoints.folder)!r}, found only damaged ones "
            f"({'; '.join(problems.values())}); {begin_again(checkpoints.run)}"
        )
    raise OutputError(without_checkpoint(checkpoints.run))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Returns the checkpoint in a folder.

    Raises:
        OutputError: It is damaged, or another version wrote it.
    """
    checkpoint = _read(folder)
    if isinstance(checkpoint, str):
        raise OutputError(f"{str(folder)!r} cannot be used: {checkpoint}")
    checkpoint.check()
    return checkpoint


def _read(folder: Path) -> Checkpoint | str:
    """Returns the checkpoint in a folder, or what is wrong with it."""
    if problem := damage(folder):
        return problem
    with contextlib.suppress(ValueError, RecursionError):
        numbers = json.loads(read_file(folder, "state.json", MAX_STATE))
        if isinstance(numbers, dict) and isinstance(numbers.get("step"), int):
            return Checkpoint(folder=folder, numbers=numbers)
    return "state.json has no step"


def _move_aside(problems: Mapping[Path, str]) -> None:
    """Renames damaged folders, which no later step may count as checkpoints."""
    for folder, problem in problems.items():
        aside = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        logger.warning("a checkpoint cannot be used and is now %s: %s", aside, problem)


def damage(folder: Path) -> str:
    """Returns which file of a folder differs from its manifest and how; empty if none does."""
    try:
        manifest = json.loads(read_file(folder, "manifest.json", _MAX_MANIFEST))
        number, files = manifest["format"], dict(manifest["files"])
        if number != FORMAT:
            return f"another version of gspo-env wrote it (format {number}, not {FORMAT})"
        for name, (size, digest) in files.items():
            path = regular_file(folder, name, sys.maxsize)
            if (actual := path.stat().st_size) != size:  # a large file takes long to read
                return f"{name} has {actual} bytes; expected {size}"
            if checksum(path)[1] != digest:
                return f"{name} has other contents than when it was written (SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: it {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "manifest.json is not a manifest"
    return "" if "state.json" in files or folder.name == START else "manifest.json lacks files"


def saved_settings(run: str | Path) -> SavedSettings:
    """Returns the settings of a run as data; `open_run` compares them with its checkpoint.

    Raises:
        ConfigError: There are none, or they are not valid.
    """
    path = Path(run, "config.toml")
    if not path.is_file():
        raise OutputError(
            f"{str(run)!r} has no config.toml; expected the folder of a run, such as "
            "runs/Lookup-v0-seed0-1"
        )
    check_folder(path.parent)
    return read_settings(path)


def checkpoint_config(run: Path, checkpoint: Checkpoint, config: Config | None) -> Config:
    """Returns the config of a checkpoint.

    Args:
        run: Folder of the run.
        checkpoint: The checkpoint.
        config: A config of the user's; what it has as well needs no trust in the folder.

    Raises:
        ConfigError: The checkpoint names something that the user has to give; see
            `gspo_env.saved`.
    """
    text, model = checkpoint.numbers["config"], checkpoint.numbers["model"]
    check_model(run, model, "" if config is None else config.model)
    problem = f"the settings in a checkpoint of {str(run)!r} are damaged"
    with raised_as(OutputError, problem, *DAMAGE):
        saved = parse(run / "config.toml", text)
    requested = {} if config is None else flatten(tomllib.loads(to_toml(config)))
    same = {name: value for name, value in saved.untrusted.items() if requested.get(name) == value}
    moved = config is not None and moved_only(saved.env, config.env)
    tree = parse_toml(text)
    for kind in BUILTIN if config is not None else ():
        name = name_of(kind, getattr(config, kind))
        if class_name(name) and class_name(name) == class_name(saved_name(tree, kind)):
            tree, same[f"{kind}.name"] = replace_choices(tree, {kind: name}), name
    saved.settings(same, env=config.env if config is not None and moved else "")
    return from_dict(tree)


def changed_config(
    run: Path,
    checkpoint: Checkpoint,
    config: Config | None,
    may_change: Callable[[str], bool] = lambda name: name.startswith(_CHANGEABLE),
    hint: str = (
        "in the run that is resumed; only steps, stop_at_success, what is kept, addresses and "
        "workers may change: start a new run for another value"
    ),
) -> Config:
    """Returns a config, or else that of a checkpoint, if the two differ only where they may.

    Args:
        run: Folder of the run.
        checkpoint: The checkpoint.
        config: The config.
        may_change: Whether a setting may differ.
        hint: The end of the error: where the other value is, and which settings may differ.

    Raises:
        ConfigError: Another setting differs, the run has done more steps already, or the
            checkpoint names something that the user has to give; see `gspo_env.saved`.
    """
    model = checkpoint.numbers["model"]
    before = checkpoint_config(run, checkpoint, config)
    if config is None:
        return before
    # `auto` is what the run has decided, which its config.toml has
    if config.credit.score in ("auto", checkpoint.numbers["score"].get("score")):
        config = replace(config, credit=replace(config.credit, score=before.credit.score))
    if config.eval_tasks in (0, "all"):
        config = replace(config, eval_tasks=before.eval_tasks)
    old, new = flatten(before), flatten(config)
    for name in sorted({*old, *new}):
        allowed = may_change(name) or (name == "env" and moved_only(before.env, config.env))
        allowed = allowed or (name == "model" and new.get(name) == model)
        if old.get(name) != new.get(name) and not allowed:
            raise ConfigError(f"{name} is {new.get(name)!r}, and {old.get(name)!r} {hint}")
    if config.steps < checkpoint.step:
        raise ConfigError(
            f"steps is {config.steps}; expected at least {checkpoint.step}, which are done"
        )
    return config


def _load_start(folder: Path, dtype: str) -> tuple[Any, Any]:
    from gspo_env.model.load import load_model

    if problem := damage(folder):
        raise OutputError(f"{str(folder)!r} is damaged: {problem}; start a new run")
    model, tokenizer = load_model(str(folder), dtype)
    for weight in model.parameters():
        # memory of a mapped file is aligned in another way, and kernels may round in another order
        weight.data = weight.data.clone()
    return model, tokenizer


def moved_only(old: str | Sequence[str], new: str | Sequence[str]) -> bool:
    """Returns whether environments differ at most in where their classes are defined."""

    def parts(env: str | Sequence[str]) -> Iterator[tuple[str, float, str]]:
        for member in read_members(env):
            file, _, name = member.spec.rpartition(":")
            name = name if file.endswith(".py") else class_of(member.spec)
            yield member.name, member.weight, f"class {name}" if name else member.spec

    return list(parts(old)) == list(parts(new))


def restore(loop: Loop, checkpoint: Checkpoint) -> None:
    """Restores the state of a loop from a checkpoint of the same run.

    Raises:
        OutputError: It is not the state of a run.
    """
    with checkpoint.reading() as state:
        check_types(state, loop.state())
        loop.step, loop.episodes_played = int(state["step"]), float(state["played"])
        if not 0 <= loop.step <= loop.config.steps:
            raise ValueError(f"step is {loop.step}")
        check_types(state["best"], {"step": 0, "success": 0.0})
        loop.best = dict(state["best"])
        loop.history = [(int(step), dict(metrics)) for step, metrics in state["history"]]
        loop.tasks.state = dict(state["curriculum"])
        loop.buffer.restore(state["buffer"], loop.step)
        loop.scores.restore(state["score"])
        if loop.imitation is not None:
            loop.imitation.restore(state["interleaved"])
        loop.learner.restore(checkpoint.tensors(), state["learner"])
        set_generator_states(state["generators"])
