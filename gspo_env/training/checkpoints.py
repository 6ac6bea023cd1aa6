"""Checkpoints: all that a run needs to go on bit for bit, in folders that are whole or absent.

    RUN/checkpoints/start/        the model before training, unless a name finds it again
    RUN/checkpoints/step-000045/  manifest.json, state.json, state-00001.safetensors, ...
    RUN/checkpoints/best          a link to the best by `eval/success`, which also has `model/`
    RUN/checkpoints/lock          locked while a process trains
    RUN/failure.txt               the error that ended the run, if one did

A folder is written beside its place, synced and renamed; its manifest has a checksum of each file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gspo_env.config import CheckpointConfig, read_toml
from gspo_env.errors import ConfigError, OutputError
from gspo_env.redaction import write_text

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

START = "start"
"""The folder of the model before training."""
FAILURE = "failure.txt"
"""The file in the run's folder that says which error ended the run; gone when the run goes on."""
_FORMAT = 1
_SHARE = 0.02
"""Largest share of the time that checkpoints take, if `save_every` is 0."""


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

    @property
    def how_to_resume(self) -> str:
        """The command that goes on with the run; empty if nothing is saved."""
        if self.last is None:
            return ""
        return f"Go on with: gspo-env train --resume {shlex.quote(str(self.run))}"

    @contextmanager
    def said_if_stopped(self) -> Iterator[None]:
        """Returns a context that logs how to begin again if it is stopped before a checkpoint."""
        try:
            yield
        except KeyboardInterrupt:
            if self.last is None:
                logger.warning("stopped: %s", nothing_saved(self.run))
            raise

    @contextmanager
    def named_on_failure(self) -> Iterator[None]:
        """Returns a context that logs where the last checkpoint is if it is left by an error.

        The error is also written to `failure.txt`, so that `gspo-env diagnose` finds it.
        """
        note = self.run / FAILURE
        self.attempt(FAILURE, partial(note.unlink, missing_ok=True))
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                said = f"{type(error).__name__}: {error}\n"
                text = said.encode(errors="backslashreplace").decode()  # lone surrogates
                self.attempt(FAILURE, partial(write_text, note, text))
            if self.last is not None:
                place = self.folder / f"step-{self.last:06d}"
                logger.error("the last checkpoint is %s. %s", place, self.how_to_resume)
            raise

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Writes something that training can do without; counts and logs a failure."""
        from safetensors import SafetensorError

        try:
            write()
        except (OSError, SafetensorError) as error:
            self.failed += 1
            logger.warning("cannot write %s: %s", what, error)
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

    def save_start(self, fill: Callable[[Path], None]) -> None:
        """Writes the model of the start, if anything is kept."""
        if self.settings.keep:
            self.attempt("the model of the start", lambda: self.write(START, fill))

    def newest(self) -> Checkpoint:
        """Returns the newest checkpoint that is undamaged; names and sets aside damaged ones.

        Raises:
            OutputError: There is none.
        """
        seen = []
        for folder in reversed(step_folders(self.folder)):
            if not (problem := damage(folder)):
                numbers = json.loads((folder / "state.json").read_text())
                self.last = int(numbers["step"])
                if best := numbers["best"]:
                    self.attempt("the link to the best", lambda: self._link(best["step"]))
                return Checkpoint(folder=folder, numbers=numbers)
            seen.append(f"{folder.name}: {problem}")
            logger.warning("a checkpoint is damaged, the one before it is used: %s", seen[-1])
            aside = self.folder / f"damaged-{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            self.attempt("the name of a damaged checkpoint", partial(folder.rename, aside))
        found = f"only damaged ones ({'; '.join(seen)})" if seen else "none"
        raise OutputError(
            f"expected a checkpoint in {str(self.folder)!r}, found {found}; start a new run"
        )

    def _tidy(self, best: int | None) -> None:
        """Deletes what is neither among the newest nor the best, and links the best."""
        steps = step_folders(self.folder)
        for folder in steps[: -self.settings.keep]:
            if best is None or folder.name != f"step-{best:06d}":
                shutil.rmtree(folder)
        if best is not None:
            self._link(best)

    def _link(self, best: int) -> None:
        link, target = self.folder / "best", f"step-{best:06d}"
        if link.is_dir() and not link.is_symlink():  # the run was copied without its links
            aside = self.folder / "copied-best"
            shutil.rmtree(aside, ignore_errors=True)
            link.rename(aside)
            logger.info("%s is no link to a checkpoint, as after a copy; it is now %s", link, aside)
        if not (self.folder / target).is_dir():
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != target:
            new = self.folder / ".part-best"
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            new.replace(link)


def nothing_saved(run: Path) -> str:
    """Says that a run has no checkpoint, and which command begins it again."""
    again = f"gspo-env train --config {shlex.quote(str(run / 'config.toml'))}"
    with contextlib.suppress(ConfigError):
        if read_toml(run / "config.toml").get("output"):
            again += f" --output {shlex.quote(f'{run}-again')}"
    return f"{str(run)!r} has no checkpoint to go on with; begin again with: {again}"


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
    return "" if "state.json" in files or folder.name == START else "manifest.json lacks files"


def step_folders(folder: Path) -> list[Path]:
    """Lists the folders of the steps in their order, damaged ones as well."""
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
