"""Checkpoints: all that a run needs to go on bit for bit, in folders that are whole or absent.

    RUN/checkpoints/start/        the model before training, unless a name finds it again
    RUN/checkpoints/step-000045/  manifest.json, state.json, state-00001.safetensors, ...
    RUN/checkpoints/best          a link to the best by `eval/success`, which also has `model/`
    RUN/checkpoints/lock          locked while a process trains

A folder is written beside its place, synced and renamed; its manifest has a checksum of each file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import random
import shutil
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gspo_env.config import CheckpointConfig, Config, from_dict
from gspo_env.errors import ConfigError, OutputError
from gspo_env.tracking.base import flatten
from gspo_env.training.signals import Stop

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_FORMAT = 1
_SHARE = 0.02
"""Largest share of the time that checkpoints take, if `save_every` is 0."""
_CHANGEABLE = ("steps", "checkpoints.")
"""Beginnings of the settings that a resumed run may change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are as they were written."""

    folder: Path
    numbers: Mapping[str, Any]
    """What `state.json` holds."""

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder.parent.parent

    @property
    def step(self) -> int:
        """The last step that is part of it."""
        return int(self.numbers["step"])

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return read_config(self.numbers)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors by name, one file after the other."""
        from safetensors.torch import load_file

        for file in sorted(self.folder.glob("state-*.safetensors")):
            yield from load_file(file).items()


class Checkpoints:
    """The checkpoints of one run, which no other process writes while this object is open.

    Args:
        run: Folder of the run.
        settings: How often to save, and how many to keep.

    Raises:
        OutputError: Another process trains this run, or the folder cannot be written.
    """

    def __init__(self, run: Path, settings: CheckpointConfig) -> None:
        self.run, self.folder, self.settings = run, run / "checkpoints", settings
        self.failed = 0
        """Files and checkpoints of this run that could not be written."""
        self.last: int | None = None
        """Step of the last checkpoint."""
        self._saved_at, self._seconds = 0.0, 0.0
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = (self.folder / "lock").open("a+")
        except OSError as error:
            raise OutputError(f"cannot write to {str(self.folder)!r}: {error.strerror}") from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            process = self._lock.read().strip() or "unknown"
            raise OutputError(
                f"the run {str(run)!r} is still running, in process {process}; expected a run that "
                "has stopped"
            ) from None
        with contextlib.suppress(OSError):  # the lock counts, not the note, on a full disk
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
        for part in self.folder.glob(".part-*"):  # of a process that was killed
            shutil.rmtree(part, ignore_errors=True)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets other processes train the run."""
        self._lock.close()

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Writes something that training can do without; counts and logs a failure."""
        from safetensors import SafetensorError

        try:
            write()
        except (OSError, SafetensorError) as error:
            self.failed += 1
            logger.warning("cannot write %s, training goes on: %s", what, error)
            return False
        return True

    def due(self, step: int) -> bool:
        """Returns whether the settings ask for a checkpoint after a step."""
        if every := self.settings.save_every:
            return step % every == 0
        return (time.monotonic() - self._saved_at) * _SHARE >= self._seconds

    def save(
        self,
        numbers: Mapping[str, Any],
        tensors: Iterable[tuple[str, Tensor]],
        write_model: Callable[[Path], None] | None = None,
    ) -> bool:
        """Writes the checkpoint of a step and deletes those that are no longer kept.

        Args:
            numbers: What `state.json` holds, with the entries `step` and `best`.
            tensors: The tensors by name.
            write_model: Writes the model as well, since this is the best checkpoint.

        Returns:
            False if it could not be written; the older ones are as they were.
        """
        from safetensors.torch import save_file

        from gspo_env.model.export import shards

        if not self.settings.keep:
            return False
        step, begun = int(numbers["step"]), time.monotonic()

        def fill(part: Path) -> None:
            for number, shard in enumerate(shards(tensors), 1):
                save_file(shard, part / f"state-{number:05d}.safetensors")
            (part / "state.json").write_text(json.dumps(numbers))
            if write_model is not None:
                write_model(part / "model")

        name = f"step-{step:06d}"
        saved = self.attempt(f"the checkpoint {name}", lambda: self.write(name, fill))
        if saved:
            self.last = step
            best = numbers.get("best") or {}
            self.attempt("the newest checkpoints", lambda: self._tidy(best.get("step")))
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - begun
        return saved

    def write(self, name: str, fill: Callable[[Path], None]) -> None:
        """Writes a folder of `checkpoints`, all or nothing."""
        part = self.folder / f".part-{name}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            fill(part)
            files = {str(f.relative_to(part)): _sum(f) for f in _files(part)}
            manifest = {"format": _FORMAT, "files": files}
            (part / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for path in (*part.rglob("*"), part):
                _sync(path)
            shutil.rmtree(self.folder / name, ignore_errors=True)
            part.rename(self.folder / name)
            _sync(self.folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def newest(self) -> Checkpoint:
        """Returns the newest checkpoint that is undamaged; names and sets aside damaged ones.

        Raises:
            OutputError: There is none.
        """
        seen = []
        for folder in reversed(_steps(self.folder)):
            if not (problem := damage(folder)):
                numbers = json.loads((folder / "state.json").read_text())
                self.last = int(numbers["step"])
                if best := numbers["best"]:
                    self.attempt("the link to the best", lambda: self._link(best["step"]))
                return Checkpoint(folder=folder, numbers=numbers)
            seen.append(f"{folder.name}: {problem}")
            logger.warning("checkpoint %s is damaged, the one before it is used: %s", *seen[-1:])
            aside = self.folder / f"damaged-{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            self.attempt("the name of a damaged checkpoint", lambda: folder.rename(aside))
        found = f"only damaged ones ({'; '.join(seen)})" if seen else "none"
        raise OutputError(
            f"expected a checkpoint in {str(self.folder)!r}, found {found}; start a new run"
        )

    def _tidy(self, best: int | None) -> None:
        """Deletes what is neither among the newest nor the best, and links the best."""
        steps = _steps(self.folder)
        for folder in steps[: -self.settings.keep]:
            if best is None or folder.name != f"step-{best:06d}":
                shutil.rmtree(folder)
        if best is not None:
            self._link(best)

    def _link(self, best: int) -> None:
        link, target = self.folder / "best", f"step-{best:06d}"
        if not (self.folder / target).is_dir():
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != target:
            new = self.folder / ".part-best"
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            new.replace(link)


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


def damage(folder: Path) -> str:
    """Returns which file of a folder differs from its manifest and how; empty if none does."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        found, files = manifest["format"], dict(manifest["files"])
        if found != _FORMAT:
            return f"manifest.json has format {found}; expected {_FORMAT}"
        for name, (size, digest) in files.items():
            actual = _sum(folder / name)
            if actual[0] != size:
                return f"{name} has {actual[0]} bytes; expected {size}"
            if actual[1] != digest:
                return f"{name} has other contents than when it was written (SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return "manifest.json is no manifest"
    return "" if "state.json" in files or folder.name == "start" else "manifest.json lacks files"


def read_config(numbers: Mapping[str, Any]) -> Config:
    """Returns the settings in a checkpoint; the only place that reads those of a run."""
    return from_dict(tomllib.loads(numbers["config"]))


def newest_config(run: str | Path) -> Config:
    """Returns the settings of a run, from its newest checkpoint that can be read.

    Raises:
        OutputError: There is none.
    """
    for folder in reversed(_steps(Path(run) / "checkpoints")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return read_config(json.loads((folder / "state.json").read_text()))
    raise OutputError(
        f"{str(run)!r} has no checkpoint that can be read; expected the folder of a run, such as "
        "runs/Lookup-v0-seed0-1"
    )


def changed_config(saved: Checkpoint, wanted: Config) -> Config:
    """Returns the wanted config, if it differs from the saved one only where it may.

    Raises:
        ConfigError: Another setting differs, or the run has done more steps already.
    """
    old, new = flatten(saved.config), flatten(wanted)
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name) and not name.startswith(_CHANGEABLE):
            raise ConfigError(
                f"{name} is {new.get(name)!r}, and {old.get(name)!r} in the run that goes on; only "
                "steps, save_every and keep may change: start a new run for another value"
            )
    if wanted.steps < saved.step:
        raise ConfigError(f"steps is {wanted.steps}; expected at least {saved.step}, which are done")
    return wanted


def fingerprint(model: Any) -> str:
    """Returns a checksum of the names, dtypes and values of a model's weights."""
    import torch

    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        values = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()


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


def _steps(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sum(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
