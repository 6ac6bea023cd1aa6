"""Checkpoints: all that a run needs to resume bit for bit, in folders that are whole or absent.

    RUN/checkpoints/start/        the model before training, unless a name finds it again
    RUN/checkpoints/step-000045/  manifest.json, state.json, state-00001.safetensors, ...
    RUN/checkpoints/step-000000/  at first, that of a long imitation before the first step
    RUN/checkpoints/best          a link to the best by `eval/success`, which also has `model/`
    RUN/checkpoints/lock          locked while a process trains
    RUN/batches/step-000045/      the state before the update of a step, with what it trains on
    RUN/failure.txt               the error that ended the run, if one did

A folder is written beside its place, synced and renamed; its manifest has a checksum of each file.
A run resumes from the newest folder whose files are those of its manifest.
"""

from __future__ import annotations

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

from gspo_env.config import CheckpointConfig, Config, to_toml
from gspo_env.errors import OutputError, raised_as
from gspo_env.files import (
    BATCHES,
    FAILURE,
    MODEL,
    lock,
    part_of,
    remove_parts,
    step_folders,
    write_file,
)
from gspo_env.redaction import write_text
from gspo_env.runs.run import CONFIG
from gspo_env.training.interrupt import Interrupt

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

START = "start"
"""The folder of the model before training."""
FORMAT = 2
"""Number of the contents that a checkpoint has; another one is of another version."""
_SHARE = 0.02
"""Largest share of the time that checkpoints take, if `save_every` is 0."""
_PAUSE = 180.0
"""Seconds before the first checkpoint of an imitation, and between two, at least."""

LearnerState = Callable[[], tuple[Mapping[str, Any], Iterable[tuple[str, "Tensor"]]]]
"""Returns the numbers and the tensors of a learner; see `gspo_env.learner.Trainer.state`."""


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
        self.flags = ""
        """What a resume needs besides the folder."""
        self.failed = 0
        """Files and checkpoints of this run that could not be written."""
        self.last: int | None = None
        """Step of the last checkpoint."""
        self._good: list[str] = []
        """Names of the undamaged checkpoints: the one that was resumed, and those written since."""
        self._saved_at, self._seconds = time.monotonic(), 0.0
        with raised_as(OutputError, f"cannot write to {str(self.folder)!r}", OSError):
            self.folder.mkdir(exist_ok=True)
            self._lock = lock(self.folder / "lock", f"the run {str(run)!r}")
            remove_parts(run.rglob(".*.part"))

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets other processes train the run."""
        self._lock.close()

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return f"gspo-env train --resume {shlex.quote(str(self.run))} {self.flags}".rstrip()

    def stopped(self, step: int, steps: int) -> str:
        """Returns the sentence that a run stopped, what it has to repeat, and how to resume it."""
        text = f"Stopped after step {step} of {steps}"
        if self.last is None:
            return f"{text}. {without_checkpoint(self.run)}"
        if lost := step - self.last:
            text += f"; the last checkpoint has step {self.last}, resuming repeats {lost} steps"
        return f"{text}. Resume with: {self.resume_command}"

    @contextmanager
    def report_failure(self) -> Iterator[None]:
        """Returns a context that, where an error leaves it, logs how to resume or begin again.

        The error is also written to `failure.txt`, so that `gspo-env diagnose` finds it.
        """
        note = self.run / FAILURE
        self.try_write(FAILURE, partial(note.unlink, missing_ok=True))
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                text = f"{type(error).__name__}: {error}\n"
                text = text.encode(errors="backslashreplace").decode()  # lone surrogates
                self.try_write(FAILURE, partial(write_text, note, text))
            if self.last is not None:
                place = self.folder / f"step-{self.last:06d}"
                logger.error(
                    "the last checkpoint is %s. Resume with: %s", place, self.resume_command
                )
            elif isinstance(error, KeyboardInterrupt):
                logger.warning("stopped: %s", without_checkpoint(self.run))
            raise

    def try_write(self, what: str, write: Callable[[], object]) -> bool:
        """Writes something that training can do without; counts and logs a failure."""
        from safetensors import SafetensorError

        try:
            write()
        except Exception as error:
            # what is written in Rust has its own error, or no more than Exception
            if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
                raise
            self.failed += 1
            logger.warning("cannot write %s: %s", what, error)
            return False
        return True

    def due(self, step: int) -> bool:
        """Returns whether the settings ask for a checkpoint after a step."""
        if every := self.settings.save_every:
            return step % every == 0
        return (time.monotonic() - self._saved_at) * _SHARE >= self._seconds

    @property
    def due_in_imitation(self) -> bool:
        """Whether it is time for a checkpoint of an imitation."""
        return time.monotonic() - self._saved_at >= max(_PAUSE, self._seconds / _SHARE)

    def save(
        self,
        numbers: Mapping[str, Any],
        tensors: Iterable[tuple[str, Tensor]],
        write_model: Callable[[Path, int], None] | None = None,
    ) -> bool:
        """Writes the checkpoint of a step and deletes those that are no longer kept.

        Args:
            numbers: What `state.json` holds, with the entries `step` and `best`.
            tensors: The tensors by name.
            write_model: Writes the model as well, since this is the best checkpoint.

        Returns:
            False if it could not be written; the older ones are as they were.
        """
        if not self.settings.keep:
            return False
        step, begun = int(numbers["step"]), time.monotonic()

        def fill(part: Path) -> None:
            write_state(part, numbers, tensors)
            if write_model is not None:
                write_model(part / MODEL, step)

        name = f"step-{step:06d}"
        path = self.folder / name
        saved = self.try_write(f"the checkpoint {name}", lambda: self.write(path, fill))
        if saved:
            self.last = step
            self._good = [*(good for good in self._good if good != name), name]
            best = numbers.get("best") or {}
            self.try_write("the newest checkpoints", lambda: self._tidy(best.get("step")))
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - begun
        return saved

    def save_start(self, fill: Callable[[Path], None], *, must: bool = False) -> None:
        """Writes the model of the start, if it must be written or anything is kept."""
        if must or self.settings.keep:
            path = self.folder / START
            self.try_write("the model of the start", lambda: self.write(path, fill))

    def delete_batches(self, step: int) -> None:
        """Deletes the batches that a run kept after the step from which it is resumed."""
        for folder in step_folders(self.run / BATCHES):
            if int(folder.name[5:]) > step:
                self.try_write(f"{BATCHES}/{folder.name}", partial(shutil.rmtree, folder))

    def use(self, checkpoint: Path, step: int) -> None:
        """Takes an undamaged checkpoint as the last one."""
        self.last, self._good = step, [checkpoint.name]

    def write(self, path: Path, fill: Callable[[Path], None]) -> None:
        """Writes a folder with a manifest, all or nothing.

        Args:
            path: The folder.
            fill: Writes its files into the folder that it gets.
        """
        part, old = part_of(path), part_of(path.with_name(f"old-{path.name}"))
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            fill(part)
            files = {str(f.relative_to(part)): checksum(f) for f in part.rglob("*") if f.is_file()}
            manifest = {"format": FORMAT, "files": files}
            (part / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
            for each in (*part.rglob("*"), part):
                _sync(each)
            if path.exists():
                path.rename(old)
            part.rename(path)
            _sync(path.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def _tidy(self, best: int | None) -> None:
        """Deletes what is neither among the newest good ones nor the best, and links the best."""
        name = f"step-{best:06d}" if best is not None else ""
        newest = self._good[-self.settings.keep :]
        for folder in step_folders(self.folder) if len(newest) == self.settings.keep else ():
            if folder.name not in (*newest, name):
                shutil.rmtree(folder)
        if name:
            link = self.folder / "best"
            if link.is_dir() and not link.is_symlink():  # the run was copied without its links
                shutil.rmtree(link)
            write_file(self.folder, link.name, lambda part: part.symlink_to(name))


@dataclass(slots=True)
class CheckpointWriter:
    """Writes the state of a training loop, with the facts of its run, into checkpoints."""

    checkpoints: Checkpoints
    interrupt: Interrupt
    """Whether the loop should stop."""
    facts: dict[str, Any]
    """See `run_facts`."""
    recorded: Callable[[], Mapping[str, int]]
    """Returns the bytes of what the run has recorded; see `RunInfo.resume`."""
    write_model: Callable[[Path, int], None]
    """Writes the trained model into a folder, as that of a step."""

    @property
    def due_in_imitation(self) -> bool:
        """Whether an imitation should be saved, as it takes long or should stop."""
        return self.interrupt.requested or self.checkpoints.due_in_imitation

    def save(self, numbers: Mapping[str, Any], learner: LearnerState, best: bool) -> bool:
        """Writes a checkpoint, from any thread; returns whether it could.

        Args:
            numbers: The state of the loop, which nothing changes any more.
            learner: Returns the state of the learner, which rests meanwhile.
            best: Whether the model is written as well, since this is the best checkpoint.
        """
        state, tensors = self.state(numbers, learner)
        return self.checkpoints.save(state, tensors, self.write_model if best else None)

    def state(
        self, numbers: Mapping[str, Any], learner: LearnerState
    ) -> tuple[dict[str, Any], Iterable[tuple[str, Tensor]]]:
        """Returns what a checkpoint has of the run, the loop and the learner."""
        more = {"recorded": self.recorded(), "failed": self.checkpoints.failed}
        learner_numbers, tensors = learner()
        return {**self.facts, **more, **numbers, "learner": learner_numbers}, tensors


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
        "left_out": 0,  # demonstrations of held-out tasks, before they are counted
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


def without_checkpoint(run: Path) -> str:
    """Returns the sentence that a run has no checkpoint, with the command that begins it again."""
    return f"{str(run)!r} has no checkpoint to resume from; {begin_again(run)}"


def begin_again(run: Path) -> str:
    """Returns the words with the command that begins a run again, in another folder."""
    config, output = shlex.quote(str(run / CONFIG)), shlex.quote(f"{run}-again")
    return f"begin again with: gspo-env train --config {config} --output {output}"


def checksum(path: Path) -> list[Any]:
    """Returns the size and the digest of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def write_state(
    folder: Path, numbers: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Writes `state.json` and the tensors into a folder."""
    from safetensors.torch import save_file

    from gspo_env.model.save import shards

    for number, shard in enumerate(shards(tensors), 1):
        save_file(shard, folder / f"state-{number:05d}.safetensors")
    (folder / "state.json").write_text(json.dumps(numbers))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
