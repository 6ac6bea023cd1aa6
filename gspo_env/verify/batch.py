"""The neutral form of a training batch, its reader and its writer.

JSON lines: the first line is the header, `{"format": "gspo-env batch 1", ...}` with the other
fields of `Batch` but for `rows`; every other line has the fields of a `Row`. Parquet: the header
is the value of `batch` in the metadata of the schema, the fields of a row are columns. Safetensors:
the header is in the metadata too; padded tensors `ids`, `mask`, `attention`, `logprobs` and
`advantages` have the shape (B, T), `group` and `reward` (B,).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gspo_env.errors import DAMAGE, BatchError, first_line, raised_as
from gspo_env.files import regular_file

FORMAT = "gspo-env batch 1"
_MOST_BYTES = 1 << 30
"""Size of a file."""
_MOST_LINE = 1 << 26
"""Size of a row in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence of a batch, as the loss reads it; lists have a value for each id.

    Example:
        >>> Row(ids=[5, 6, 7], mask=[0, 1, 1], group="a", reward=1.0, sampled=[(1, [6, 7])]).mask
        [0, 1, 1]
    """

    ids: list[int]
    """Token ids, padding included."""
    mask: list[int]
    """1 for the tokens that the policy loss counts."""
    group: str
    """Equal for the rows that are compared with each other."""
    attention: list[int] | None = None
    """0 for padding; by default there is none."""
    logprobs: list[float | None] | None = None
    """Log-probability of each id by the policy that sampled, or the old policy of the ratio."""
    advantages: list[float | None] | None = None
    """The advantage of each token."""
    reward: float | None = None
    """The reward of the episode; None if nothing scored it."""
    sampled: list[tuple[int, list[int]]] | None = None
    """For each call of the engine: tokens of its prompt, without padding, and what it sampled."""
    text: str | None = None
    """The text of the ids without padding, as the trainer shows or scores it."""
    episode: str | None = None
    """Equal for the sequences of one episode; by default each row is an episode."""
    seed: int | None = None
    """The seed with which it was sampled."""
    failed: bool = False
    """Whether the episode was lost, as by a fault of its environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of an update, and what the trainer says of them."""

    rows: list[Row] = field(default_factory=list)
    """The sequences."""
    trainer: str = ""
    """Name and version of the trainer."""
    estimator: str = ""
    """`grpo` (centred and divided by the group's deviation), `dr_grpo` (centred) or `rloo`."""
    epsilon: float = 1e-4
    """What `grpo` adds to the deviation."""
    temperature: float = 1.0
    """Temperature of the log-probabilities."""


_ROW = TypeAdapter(Row)
_HEADER = TypeAdapter(Batch)


def write_batch(batch: Batch, path: str | Path) -> None:
    """Writes a batch as JSON lines, or as Parquet for a name that ends so."""
    header = {k: v for k, v in asdict(batch).items() if k != "rows"} | {"format": FORMAT}
    rows = [asdict(row) for row in batch.rows]
    if str(path).endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pairs = pa.list_(pa.struct([("start", pa.int64()), ("ids", pa.list_(pa.int64()))]))
        for row in rows:
            row["sampled"] = row["sampled"] and [{"start": s, "ids": i} for s, i in row["sampled"]]
        columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
        arrays = {n: pa.array(v, pairs if n == "sampled" else None) for n, v in columns.items()}
        table = pa.table(arrays).replace_schema_metadata({"batch": json.dumps(header)})
        pq.write_table(table, path)
        return
    with Path(path).open("w", encoding="utf-8") as file:
        for line in (header, *rows):
            file.write(json.dumps({k: v for k, v in line.items() if v is not None}) + "\n")


def read_batch(path: str | Path) -> Batch:
    """Reads a batch of the neutral form; nothing in the file is run.

    Raises:
        BatchError: It is of another form, is damaged, or is larger than 1 GiB.
    """
    path = Path(path)
    with raised_as(
        BatchError, f"{str(path)!r} is not a batch", OSError, *DAMAGE, reason=first_line
    ):
        regular_file(path.parent, path.name, _MOST_BYTES, links=True)
        header, rows = _READERS.get(path.suffix, _read_lines)(path)
    return _checked(header, rows, str(path))


def _checked(header: Any, rows: Iterable[Any], name: str) -> Batch:
    read = []
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BatchError(f"{name!r} has no header; expected one with the format {FORMAT!r}")
    number = 0
    try:
        batch = _HEADER.validate_python({k: v for k, v in header.items() if k != "format"})
        for number, row in enumerate(rows):  # noqa: B007 - named in the error
            read.append(_ROW.validate_python(row))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BatchError(f"{name!r}: row {number}: {place}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise BatchError(f"{name!r}: after row {number}: {error}") from None
    batch.rows.extend(read)
    return batch


def _read_lines(path: Path) -> tuple[Any, Iterator[Any]]:
    def lines() -> Iterator[Any]:
        with path.open("rb") as file:
            while line := file.readline(_MOST_LINE):
                if len(line) == _MOST_LINE:
                    raise ValueError(f"a row has more than {_MOST_LINE:,} bytes")
                if line.strip():
                    yield json.loads(line)

    rows = lines()
    return next(rows, None), rows


def _read_parquet(path: Path) -> tuple[Any, Iterator[Any]]:
    from gspo_env.episodes.schema import read_bounded

    table = read_bounded(path, _MOST_BYTES)
    header = json.loads((table.schema.metadata or {})[b"batch"])

    def rows() -> Iterator[Any]:
        for part in table.to_batches(64):
            for row in part.to_pylist():
                calls = row.get("sampled")
                row["sampled"] = calls and [(call["start"], call["ids"]) for call in calls]
                yield {name: value for name, value in row.items() if value is not None}

    return header, rows()


def _read_tensors(path: Path) -> tuple[Any, Iterator[Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {})["batch"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["group"] = [str(int(g)) for g in tensors["group"]]

    def rows() -> Iterator[Any]:
        for values in zip(*tensors.values(), strict=True):
            yield {
                n: v if isinstance(v, str) else v.tolist()
                for n, v in zip(tensors, values, strict=True)
            }

    return header, rows()


_READERS = {".parquet": _read_parquet, ".safetensors": _read_tensors}


def of_run(folder: str | Path) -> Batch:
    """Returns the last training batch that a run of ours kept.

    Raises:
        OutputError: It kept no episodes.
    """
    from gspo_env.episodes import read_episodes
    from gspo_env.episodes.restore import to_episode

    records = [r for r in read_episodes(folder, phases=["train"]) if r.trained and not r.redacted]
    last = max((record.step for record in records), default=0)
    rows: list[Row] = []
    for record in records:
        if record.step != last:
            continue
        episode = to_episode(record)
        for number, sequence in enumerate(episode.sequences):
            turns = [k for k, turn in enumerate(record.turns) if turn.sequence == number]
            values = _by_token(sequence.turn_ids.tolist(), [record.turns[k] for k in turns], turns)
            rows.append(
                Row(
                    ids=sequence.token_ids.tolist(),
                    group=record.group,
                    reward=record.outcome,
                    episode=record.episode,
                    failed=record.error is not None,
                    **values,
                )
            )
    return Batch(rows=rows, trainer="gspo-env")


def _by_token(
    places: Sequence[int], records: Sequence[Any], turns: Sequence[int]
) -> dict[str, Any]:
    """Returns the values of the tokens of a sequence, from the turns that are trained in it."""
    mask = [int(place >= 0) for place in places]
    logprobs: list[float | None] = [None] * len(places)
    advantages, sampled = list(logprobs), []
    for record, turn in zip(records, turns, strict=True):
        at = [n for n, place in enumerate(places) if place == turn]
        if at:
            sampled.append((at[0], list(record.action_ids)))
        credit = record.advantages or [None] * len(at)
        for n, value, advantage in zip(at, record.engine_logprobs, credit, strict=True):
            logprobs[n], advantages[n] = value, advantage
    return {"mask": mask, "logprobs": logprobs, "advantages": advantages, "sampled": sampled}
