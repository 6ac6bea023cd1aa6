"""Episodes that a run keeps: their schema and their files; `gspo_env.episodes.records` reads them.

    RUN/episodes/000010-eval.parquet    the episodes of one phase of one step, one row a turn
    RUN/episodes/tokens.json            the text of each token id in them

A row has the fields of `EpisodeRecord`, but for `turns`, then those of `TurnRecord`.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gspo_env.files import left_out, read_file, regular_file

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "episodes"
"""Name of the folder in the run's folder."""
TOKENS = "tokens.json"
PAGE = "view.html"
"""Name of the page in the folder of a run."""

Phase = Literal["train", "eval", "greedy"]
PHASES: tuple[Phase, ...] = typing.get_args(Phase)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """One turn. Texts that JSON is written in are None where there is nothing to write."""

    turn: int | None
    """Index of the turn; None in the only row of an episode without turns."""
    parent: int | None
    """The turn whose tokens this turn's prompt continues; None where a sequence begins."""
    fork: str | None
    """Why the turn adds a sequence: a value of `gspo_env.types.Fork`; None if it does not."""
    sequence: int | None
    """Index of the token sequence in which the turn is trained."""
    kind: str
    """A value of `gspo_env.types.Turn.kind`: `action`, or `summary`, which no environment sees."""
    role: str
    """Source of the observation: `user` or `tool`."""
    observation: str
    """The observation before the action."""
    action: str
    """The action as the environment received it."""
    tool_calls: str | None
    """JSON list of the action's tool calls: `name` and `arguments`, or `error` if malformed."""
    reward: float
    """The reward of the turn."""
    reward_parts: str | None
    """JSON object of the named parts of the reward."""
    messages: str | None
    """JSON list of the messages before the first observation; at a later turn the whole
    conversation, where the environment gave it anew."""
    tools: str | None
    """JSON list of the tools' schemas, at the first turn and where they change."""
    agent: str | None
    """Name of the agent that acted, where an environment has several."""
    state_key: str | None
    """Name of the state in which the policy acted."""
    weights_version: int
    """The training steps that the policy had behind it."""
    generate_seconds: float
    """Wall-clock time of the sampling."""
    step_seconds: float
    """Wall-clock time of the environment's step."""
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt behind those of the parent."""
    action_ids: tuple[int, ...]
    """Token ids that were sampled. The next columns have a value for each of them."""
    engine_logprobs: tuple[float, ...]
    """Log-probability by the engine that sampled the token (natural log)."""
    token_versions: tuple[int, ...] | None
    """The training steps that the policy had behind it, where they changed within the action; None
    if `weights_version` sampled every token."""
    trainer_logprobs: tuple[float | None, ...] | None
    """Log-probability by the trainer before the update; this and the next columns are None in
    episodes that were not trained on, and hold None for tokens that were not."""
    advantages: tuple[float | None, ...] | None
    """Advantage."""
    ratios: tuple[float | None, ...] | None
    """Importance ratio in the loss, when the token's minibatch was computed."""
    clipped: tuple[bool | None, ...] | None
    """Whether the clip blocked the token's policy gradient."""
    entropies: tuple[float | None, ...] | None
    """Entropy of the trainer's distribution in nats."""

    @property
    def text(self) -> str:
        """The action, by the name that `gspo_env.types.Turn` has for it."""
        return self.action


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """One episode."""

    episode: str
    """Id: the group's id and the index of the episode in its group."""
    group: str
    """Id of the group: phase, step and index. Its episodes play the same task."""
    phase: str
    """`train`, `eval` (sampled at the training temperature) or `greedy` (the same tasks)."""
    step: int
    """The training step that the episode is part of, or after which it was played."""
    env: str
    """Id of the environment."""
    seed: int
    """Seed of the task."""
    options: str | None
    """JSON object of the options of `reset`."""
    task_key: str | None
    """Name of the task, if the environment gives one."""
    num_turns: int
    """Number of turns."""
    num_sequences: int
    """Number of token sequences that the turns form."""
    total_reward: float
    """The return: the sum of the turns' rewards."""
    outcome: float
    """The episodic reward."""
    own_outcome: bool
    """Whether the environment gave the outcome; if not, it is the sum of the turns' rewards."""
    success: bool
    """Whether it succeeded."""
    stop_reason: str
    """How it ended: a value of `gspo_env.types.StopReason`."""
    terminated: bool
    """Whether the environment reached a terminal state."""
    truncated: bool
    """Whether the episode was cut."""
    trained: bool
    """Whether the episode was trained on."""
    redacted: bool
    """Whether a text looked like a secret: it is replaced, and the token ids are left out."""
    error: str | None
    """How the environment failed."""
    final_observation: str
    """The observation after the last action."""
    turns: tuple[TurnRecord, ...] = ()
    """The turns in order of time."""
    messages: str | None = None
    """Those of the first row, which an episode without turns has, too."""
    tools: str | None = None
    """Those of the first row."""


TURN_FIELDS = tuple(f.name for f in dataclasses.fields(TurnRecord))
_OF_ROWS = ("turns", "messages", "tools")
EPISODE_FIELDS = tuple(f.name for f in dataclasses.fields(EpisodeRecord) if f.name not in _OF_ROWS)


@cache
def schema() -> pa.Schema:
    """Returns the columns of the files with their types; numbers of tokens have 32 bits."""
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    token = {int: pa.int32(), float: pa.float32(), bool: pa.bool_()}
    fields = []
    for cls, names in ((EpisodeRecord, EPISODE_FIELDS), (TurnRecord, TURN_FIELDS)):
        hints = typing.get_type_hints(cls)
        for name in names:
            options = typing.get_args(hints[name]) if _is_union(hints[name]) else (hints[name],)
            kind = next(option for option in options if option is not type(None))
            if typing.get_origin(kind) is tuple:
                inner = typing.get_args(kind)[0]
                inner = typing.get_args(inner)[0] if _is_union(inner) else inner
                column_type = pa.list_(token[inner])
            else:
                column_type = types[kind]
            fields.append(pa.field(name, column_type, nullable=type(None) in options))
    return pa.schema(fields)


def _is_union(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeFile:
    """One file of episodes."""

    path: Path
    step: int
    phase: Phase
    size: int
    """Bytes."""


def episode_files(run: str | Path) -> list[EpisodeFile]:
    """Lists the files of a run by step; a step's training comes before its evaluation."""
    listed = []
    for path in Path(run, FOLDER).glob("*-*.parquet"):
        step, _, phase = path.stem.partition("-")
        if step.isdigit() and phase in PHASES:
            with left_out(path):  # or gone, since a resumed run thins its files out
                path = regular_file(Path(run), f"{FOLDER}/{path.name}", _MAX_UNPACKED)
                size = path.stat().st_size
                listed.append(EpisodeFile(path=path, step=int(step), phase=phase, size=size))
    return sorted(listed, key=lambda file: (file.step, PHASES.index(file.phase)))


_MAX_UNPACKED = 1 << 31
"""Bytes of a file of episodes, packed and unpacked."""
_UNPACKED, _UNPACKED_PER_BYTE, _VALUE_BYTES = 1 << 24, 512, 32
"""Bytes that a file of Parquet may take as Python objects, further ones for each of its bytes, and
those of a value beside its data."""
_MAX_TOKENS = 1 << 26
"""Bytes of the file with the texts of tokens."""


def first_rows(table: pa.Table) -> list[int]:
    """Returns the first row of each episode, and the number of rows."""
    import numpy as np

    if not table.num_rows:
        return [0]
    names = np.asarray(table["episode"].combine_chunks().dictionary_encode().indices)
    return [0, *(np.flatnonzero(np.diff(names)) + 1).tolist(), table.num_rows]


def read_table(path: Path) -> pa.Table | None:
    """Reads one file; None and a warning if it is damaged, None if it has just been deleted."""
    import pyarrow as pa

    with left_out(path, pa.ArrowException):
        return read_bounded(path, _MAX_UNPACKED).select(schema().names).cast(schema())
    return None


def read_bounded(path: Path, max_bytes: int) -> pa.Table:
    """Reads a Parquet file that may be untrusted: a small one takes little memory.

    Args:
        path: The file.
        max_bytes: Bytes to which any file may unpack.

    Raises:
        ValueError: It would unpack to more. Its own metadata may lie, so what is unpacked counts,
            in batches of which one cannot be large.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    most = _UNPACKED + _UNPACKED_PER_BYTE * path.stat().st_size
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        chunks = [[group.column(n) for n in range(group.num_columns)] for group in groups]
        values = sum(chunk.num_values for group in chunks for chunk in group)
        largest = max((sum(c.total_uncompressed_size for c in g) for g in chunks), default=0)
        if values * _VALUE_BYTES > most or largest > min(most, max_bytes):
            raise ValueError(
                f"it unpacks to more than {most:,} bytes: it has {values:,} values, of up to "
                f"{largest:,} bytes together"
            )
        # a dictionary may hold one long text that every row repeats, in each of the columns
        rows = max(1, min(1 << 16, min(most, max_bytes) // 4 // max(1, largest)))
        batches, size, objects = [], 0, 0
        for batch in file.iter_batches(batch_size=rows):
            size += batch.nbytes
            objects += batch.nbytes + _VALUE_BYTES * sum(map(_count, batch.columns))
            if size > max_bytes or objects > most:
                raise ValueError(f"it unpacks to more than {min(most, max_bytes):,} bytes")
            batches.append(batch)
        return pa.Table.from_batches(batches, file.schema_arrow)


def _count(array: pa.Array) -> int:
    """Returns the number of values in a column, those of nested ones included."""
    if not array.type.num_fields:
        return len(array)
    inner = array.flatten()
    return sum(map(_count, inner)) if isinstance(inner, list) else len(array) + _count(inner)


def read_tokens(run: str | Path) -> dict[int, str]:
    """Reads the text of each token id in the episodes of a run; empty if it is not known."""
    name = f"{FOLDER}/{TOKENS}"
    with left_out(f"{name} of {run}"):
        texts = json.loads(read_file(Path(run), name, _MAX_TOKENS)).items()
        return {int(number): str(text) for number, text in texts}
    return {}
