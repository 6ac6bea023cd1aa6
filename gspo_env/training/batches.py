"""Batches that a run keeps: what one update trains on, with the state of the run before it.

    RUN/batches/step-000045/    manifest.json, state.json, state-00001.safetensors, episodes.parquet

The folder is a checkpoint with the weights, the optimiser and the generators from before the update
of that step, and with all groups of the update. What the schema of episodes has no column for is in
`state.json`. An episode that looks as if it had a secret loses its tokens, so a batch with one is
not kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.config import Config
from gspo_env.episodes.records import Episodes
from gspo_env.episodes.restore import to_groups
from gspo_env.episodes.schema import read_table
from gspo_env.episodes.writer import to_table
from gspo_env.errors import DAMAGE, OutputError, raised_as
from gspo_env.files import BATCHES, check_folder, read_file, step_folders
from gspo_env.learner.settings import Trainer
from gspo_env.redaction import redact_text
from gspo_env.saved import SavedSettings, parse
from gspo_env.tracking.console import part
from gspo_env.training.checkpoints import CheckpointWriter, LearnerState, write_state
from gspo_env.training.resume import MAX_STATE, Checkpoint, read_checkpoint
from gspo_env.types import Episode, Group, StepInfo, Turn

if TYPE_CHECKING:
    from gspo_env.training.loop import Loop

logger = logging.getLogger(__name__)

KeepBatches = Literal["none", "all", "last"] | int
"""See `EpisodesConfig.keep_batches`."""
EPISODES = "episodes.parquet"
_INFO = ("state_key", "token_mask", "token_advantages", "extra")
"""What credit and the loss may read of a step's `info` and the schema of episodes leaves out."""
_STATE_BYTES = 12
"""Bytes of a trained weight: the float32 master and the two moments of AdamW."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one update trains on."""

    groups: Sequence[Group]
    samples: Sequence[Sample]
    """The training sequences of the groups, with their credit."""
    metrics: Mapping[str, float]
    """The metrics of the step before its update."""
    seed: int
    """The seed of the split into minibatches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptBatch:
    """A batch that was read."""

    run: Path
    checkpoint: Checkpoint
    """The state before the update; its step is that of the update."""
    groups: Sequence[Group]
    metrics: Mapping[str, float]
    seed: int
    digest: str
    """See `digest_of`; empty if an episode was edited."""


def write_batch(
    writer: CheckpointWriter,
    numbers: Mapping[str, Any],
    learner: LearnerState,
    batch: Batch,
    keep: KeepBatches,
) -> None:
    """Writes a batch, unless a text in it looks like a secret.

    Args:
        writer: Writes the checkpoints of the run.
        numbers: The state of the loop.
        learner: Returns the state of the learner.
        batch: The batch.
        keep: Which batches the run keeps.
    """
    import pyarrow.parquet as pq

    step = int(numbers["step"])
    table = to_table(step, "train", dict(enumerate(batch.groups)), {})
    rest = json.dumps([_rest(e) for group in batch.groups for e in group.episodes], default=repr)
    if any(table["redacted"].to_pylist()) or redact_text(rest) != rest:
        logger.warning("the batch of step %d is not kept: a text looks like a secret", step)
        return
    state, tensors = writer.state(numbers, learner)
    state["batch"] = {
        "metrics": dict(batch.metrics),
        "seed": batch.seed,
        "digest": digest_of(batch.samples),
        "episodes": json.loads(rest),
    }

    checkpoints = writer.checkpoints
    folder, name, count = checkpoints.run / BATCHES, f"step-{step:06d}", newest(keep)

    def fill(part: Path) -> None:
        write_state(part, state, tensors)
        pq.write_table(table, part / EPISODES, compression="zstd", compression_level=1)

    def write() -> None:
        folder.mkdir(exist_ok=True)
        checkpoints.write(folder / name, fill)
        for old in step_folders(folder)[:-count] if count else ():
            shutil.rmtree(old)

    checkpoints.try_write(f"the batch {name}", write)


async def keep_batch(loop: Loop, writer: CheckpointWriter, step: int, batch: Batch) -> None:
    """Keeps what the update of a step trains on, with the state before it; see `write_batch`."""
    state = loop.state() | {"step": step}
    keep = loop.config.episodes.keep_batches
    with part("saving"):
        await loop.buffer.run(partial(write_batch, writer, state, loop.learner.state, batch, keep))


def newest(keep: KeepBatches) -> int:
    """Returns how many of the newest batches a run keeps; 0 keeps all."""
    return keep if isinstance(keep, int) else int(keep == "last")


def digest_of(samples: Sequence[Sample]) -> str:
    """Returns a checksum of all that an update reads, in the precision in which it reads it."""
    digest = hashlib.sha256()
    for sample in samples:
        engine = sample.engine_logprobs
        for values, kind in (
            *((sample.token_ids, np.int64), (sample.turn_ids, np.int64)),
            *((sample.advantages, np.float32), (() if engine is None else engine, np.float32)),
        ):
            array = np.asarray(values, kind)
            digest.update(repr(array.shape).encode() + array.tobytes())
    return digest.hexdigest()


def announcement(config: Config, learner: Trainer, run: Path) -> str:
    """Says before training what the batches take on the disk."""
    weights = sum(p.numel() for p in learner.policy.parameters() if p.requires_grad)
    each, keep = weights * _STATE_BYTES / 1e6, config.episodes.keep_batches
    count = min(newest(keep) or config.steps, config.steps)
    free = shutil.disk_usage(run).free / 1e6
    return (
        f"batches: {count} of {config.steps} are kept, each of about {each:,.1f} MB and its "
        f"episodes, {each * count:,.0f} MB together in {run / BATCHES} ({free:,.0f} MB are free)"
    )


def find_batch(run: str | Path, step: int | None = None) -> Path:
    """Returns the folder of a batch; see `read_batch`.

    Raises:
        OutputError: The run has kept no such batch.
    """
    path = Path(run)
    folders = {int(folder.name[5:]): folder for folder in step_folders(path / BATCHES)}
    if not folders:
        lack = "has kept no batches" if path.is_dir() else "is not a folder"
        raise OutputError(
            f"{str(run)!r} {lack}; expected the folder of a run that trained with "
            "--keep-batches last, all or a number"
        )
    step = max(folders) if step is None else step
    if step not in folders:
        raise OutputError(
            f"{str(run)!r} has not kept the batch of step {step}; expected one of "
            f"{', '.join(map(str, folders))}"
        )
    check_folder(path)
    return folders[step]


def batch_settings(folder: Path) -> SavedSettings:
    """Returns the settings of a batch as data.

    Raises:
        OutputError: They are damaged.
    """
    with raised_as(OutputError, f"the settings in {str(folder)!r} are damaged", OSError, *DAMAGE):
        text = json.loads(read_file(folder, "state.json", MAX_STATE))["config"]
        return parse(folder / "state.json", text)


def read_batch(run: str | Path, step: int | None = None) -> KeptBatch:
    """Reads a batch that a run has kept, as data.

    Args:
        run: Folder of the run.
        step: The step of the update; the newest by default.

    Raises:
        OutputError: The run has kept no such batch, or it is damaged.
    """
    path, folder = Path(run), find_batch(run, step)
    checkpoint = read_checkpoint(folder)
    problem, mend = f"{str(folder)!r} is damaged", "; expected a kept batch"
    with raised_as(OutputError, problem, *DAMAGE, mend=mend):
        numbers = checkpoint.numbers["batch"]
        groups = _groups(folder / EPISODES, numbers["episodes"])
        return KeptBatch(
            run=path,
            checkpoint=checkpoint,
            groups=groups,
            metrics={str(name): float(value) for name, value in numbers["metrics"].items()},
            seed=int(numbers["seed"]),
            digest=str(numbers["digest"]),
        )


def _groups(path: Path, rest: Sequence[Mapping[str, Any]]) -> list[Group]:
    table = read_table(path)
    if table is None:
        raise ValueError(f"{path.name} cannot be read")
    groups = to_groups(Episodes(table, {}))
    if (count := sum(len(group.episodes) for group in groups)) != len(rest):
        raise ValueError(f"{path.name} has {count} episodes, and state.json {len(rest)}")
    rests = iter(rest)
    return [replace(g, episodes=tuple(_whole(e, next(rests)) for e in g.episodes)) for g in groups]


def _rest(episode: Episode) -> dict[str, Any]:
    """Returns what the schema of episodes leaves out of an episode, by turn."""
    default = StepInfo()
    turns = [
        {n: v for n in _INFO if (v := getattr(turn.info, n)) != getattr(default, n)}
        for turn in episode.turns
    ]
    return {"reset": dict(episode.reset.extra), "turns": turns}


def _whole(episode: Episode, rest: Mapping[str, Any]) -> Episode:
    """Returns an episode with its `_rest`."""

    def turn(old: Turn, values: Mapping[str, Any]) -> Turn:
        info: Any = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        for name in ("token_mask", "token_advantages"):
            if name in info and len(info[name]) != len(old.action_ids):
                raise ValueError(f"{name} has {len(info[name])} values")
        return replace(old, info=replace(old.info, **{n: info[n] for n in _INFO if n in info}))

    turns = tuple(turn(*pair) for pair in zip(episode.turns, rest["turns"], strict=True))
    reset = replace(episode.reset, extra=dict(rest["reset"]))
    return replace(episode, turns=turns, reset=reset)
