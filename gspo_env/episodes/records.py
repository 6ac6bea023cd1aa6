"""The kept episodes of a run as records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.episodes.schema import (
    EPISODE_FIELDS,
    PHASES,
    TURN_FIELDS,
    EpisodeRecord,
    Phase,
    TurnRecord,
    episode_files,
    first_rows,
    read_table,
    read_tokens,
    schema,
)
from gspo_env.errors import OutputError
from gspo_env.types import Episode, Group

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 256


class Episodes(Sequence[EpisodeRecord]):
    """Episodes that were read; a sequence of records, and a table with one row a turn."""

    def __init__(self, table: pa.Table, tokens: Mapping[int, str]) -> None:
        self.table, self.tokens = table, tokens
        """The columns of the page `docs/reference.md`, and the text of each token id."""
        self._starts = first_rows(table)

    def __len__(self) -> int:
        """Returns the number of episodes."""
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        """Returns an episode, or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self._some(place, place + 1)[0]

    def __iter__(self) -> Iterator[EpisodeRecord]:
        """Yields the episodes; reads some hundreds of them at once."""
        for start in range(0, len(self), _AT_ONCE):
            yield from self._some(start, min(len(self), start + _AT_ONCE))

    def _some(self, start: int, stop: int) -> list[EpisodeRecord]:
        first = self._starts[start]
        rows = self.table.slice(first, self._starts[stop] - first).to_pylist()
        places = self._starts[start : stop + 1]
        return [_record(rows[a - first : b - first]) for a, b in pairwise(places)]

    def to_pandas(self) -> Any:
        """Returns the table as a `pandas.DataFrame`, one row a turn."""
        return self.table.to_pandas()


def _record(rows: Sequence[Mapping[str, Any]]) -> EpisodeRecord:
    turns = [row for row in rows if row["turn"] is not None]
    return EpisodeRecord(
        **{name: rows[0][name] for name in (*EPISODE_FIELDS, "messages", "tools")},
        turns=tuple(
            TurnRecord(**{name: _tuple(row[name]) for name in TURN_FIELDS}) for row in turns
        ),
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def read_episodes(
    run: str | Path, *, phases: Collection[str] = PHASES, steps: Collection[int] | None = None
) -> Episodes:
    """Reads the episodes that a run has kept, also while it is running.

    Args:
        run: Folder of the run.
        phases: One or several of `train`, `eval` and `greedy`.
        steps: The steps to read; all by default.

    Raises:
        OutputError: The run has kept no episodes, or a phase is unknown.
    """
    import pyarrow as pa

    phases = {phases} if isinstance(phases, str) else set(phases)
    if unknown := phases - set(PHASES):
        raise OutputError(f"phases has {sorted(unknown)}; expected some of {', '.join(PHASES)}")
    if not (files := episode_files(run)):
        lack = "has kept no episodes" if Path(run).is_dir() else "is not a folder"
        raise OutputError(
            f"{str(run)!r} {lack}; expected the folder of a run that trained without "
            "`--keep-episodes none`"
        )
    files = [f for f in files if f.phase in phases and (steps is None or f.step in steps)]
    tables = [table for file in files if (table := read_table(file.path)) is not None]
    return Episodes(pa.concat_tables([schema().empty_table(), *tables]), read_tokens(run))


def to_record(episode: Episode, phase: Phase, step: int) -> EpisodeRecord:
    """Returns an episode as `gspo_env.episodes.read_episodes` gives one that was played so.

    Args:
        episode: The episode.
        phase: How it was played.
        step: The training step after which it was played.
    """
    from gspo_env.episodes.writer import to_table

    turns = (replace(t, weights_version=step, weights_versions=()) for t in episode.turns)
    group = Group(task=episode.task, episodes=(replace(episode, turns=tuple(turns)),))
    record: EpisodeRecord = Episodes(to_table(step, phase, {0: group}, {}), {})[0]
    return record
