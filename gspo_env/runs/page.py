"""The page that `gspo-env view` shows: a run's metrics and episodes in one HTML file.

The page is `viewer/`, bundled. The data are in elements that no browser runs, deflated and in
base64, so no text of a policy or an environment is part of the HTML:

    index      the run, its metrics, and one column for each property of the episodes
    NAME.N     the turns of some episodes of the file NAME, which are read when one is opened
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.episodes.schema import EpisodeFile, episode_files, first_rows, read_table, read_tokens
from gspo_env.episodes.writer import surplus
from gspo_env.files import BATCHES, step_folders, write_file
from gspo_env.runs.run import Run, read_text
from gspo_env.tracking.base import SUMMARY

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_MAX_PART = 1 << 29
"""Bytes of the episodes of a file before they are deflated for the page."""
_BLOCK = 32
"""Episodes of a block."""
_COLUMNS = (
    *("phase", "step", "env", "seed", "options", "task_key", "num_turns", "num_sequences"),
    *("total_reward", "outcome", "success", "stop_reason", "trained", "redacted"),
)
_TEXTS = ("phase", "env", "options", "task_key", "stop_reason")
"""The columns that the index has as numbers of distinct texts."""
_NAME = re.compile(r"\w+-\d+-(?P<group>\d{1,15})-(?P<member>\d{1,15})")
"""The id of an episode; see `gspo_env.episodes.writer.to_table`."""
_ADDED = ("group", "member", "tokens", "block")
_OF_BLOCK = ("episode", "error", "final_observation")
_OF_TURN = (
    *("turn", "parent", "fork", "sequence", "role", "observation", "action", "tool_calls"),
    *("reward", "reward_parts", "messages", "tools", "agent", "state_key", "weights_version"),
    *("generate_seconds", "step_seconds"),
)
_OF_TOKENS = (
    *("prompt_ids", "action_ids", "engine_logprobs", "trainer_logprobs", "advantages", "ratios"),
    *("clipped", "entropies", "token_versions"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The episodes of one file, as the page has them."""

    name: str
    columns: Mapping[str, Sequence[Any]]
    """A value for each episode; see `_COLUMNS`."""
    blocks: tuple[bytes, ...]
    """Deflated JSON."""

    @property
    def size(self) -> int:
        """Bytes in the page."""
        return sum(map(len, self.blocks)) * 4 // 3


def read_part(file: EpisodeFile) -> Part | None:
    """Reads a file; None if it is damaged, or its episodes have other ids than a run gives."""
    table = read_table(file.path)
    if table is None or not len(table):
        return None
    if table.nbytes > _MAX_PART:
        logger.warning("%s is left out of the page: it has %d bytes", file.path, table.nbytes)
        return None
    starts = first_rows(table)
    firsts = table.take(starts[:-1])
    columns: dict[str, list[Any]] = {name: firsts[name].to_pylist() for name in _COLUMNS}
    names = firsts["episode"].to_pylist()
    places = [_NAME.fullmatch(name) for name in names]
    if strange := [name for name, place in zip(names, places, strict=True) if not place]:
        logger.warning("%s is left out: %.80r is not an id of an episode", file.path, strange[0])
        return None
    columns["group"] = [int(place["group"]) for place in places if place]
    columns["member"] = [int(place["member"]) for place in places if place]
    rows = np.asarray(table["action_ids"].combine_chunks().value_lengths())
    sums = np.concatenate([[0], np.cumsum(rows)])
    columns["tokens"] = np.diff(sums[starts]).tolist()
    edges = [*range(0, len(starts) - 1, _BLOCK), len(starts) - 1]
    blocks = [_block(table, starts[a : b + 1]) for a, b in pairwise(edges)]
    return Part(name=file.path.stem, columns=columns, blocks=tuple(blocks))


def _block(table: pa.Table, starts: Sequence[int]) -> bytes:
    """Returns the turns of neighbouring episodes as deflated JSON.

    Args:
        table: The rows of a file.
        starts: The first row of each episode, and the end.
    """
    rows = table.slice(starts[0], starts[-1] - starts[0])
    first = [start - starts[0] for start in starts[:-1]]
    heads = rows.take(first)
    tree = {
        "starts": [start - starts[0] for start in starts],
        **{name: heads[name].to_pylist() for name in _OF_BLOCK},
        **{name: rows[name].to_pylist() for name in _OF_TURN},
        **{name: _tokens(rows[name].combine_chunks()) for name in _OF_TOKENS},
    }
    return zlib.compress(json.dumps(tree, separators=(",", ":")).encode(), 1)


def _tokens(column: Any) -> dict[str, Any]:
    """Returns the number of values of each row, and all values in one list.

    Fractions are in millionths, because whole numbers are written to JSON much faster.
    """
    lengths = column.value_lengths().fill_null(0)
    values = column.flatten()
    if values.null_count or str(values.type) != "int32":
        numbers = np.asarray(values.cast("float64").fill_null(np.nan))
        empty = np.isnan(numbers)
        shown = (
            np.rint(np.where(empty, 0, np.clip(numbers, -1e9, 1e9)) * 1e6).astype(np.int64).tolist()
        )
        if empty.any():
            shown = [None if gone else n for n, gone in zip(shown, empty.tolist(), strict=True)]
    else:
        shown = values.to_pylist()
    return {"counts": lengths.to_pylist(), "values": shown}


def read_parts(run: Path, max_bytes: int) -> list[Part]:
    """Reads the episodes of a run.

    Args:
        run: Folder of the run.
        max_bytes: What the episodes may take in the page. If they take more, steps in between are
            left out, those of training first.
    """
    parts = {file: part for file in episode_files(run) if (part := read_part(file)) is not None}
    by_size = {dataclasses.replace(file, size=part.size): part for file, part in parts.items()}
    removed = surplus(list(by_size), max_bytes)
    return [part for file, part in by_size.items() if file not in removed]


def make_index(run: Run, parts: Sequence[Part]) -> bytes:
    """Returns what the page reads first, as JSON."""
    texts: dict[str, dict[Any, int]] = {name: {} for name in _TEXTS}
    columns: dict[str, list[Any]] = {name: [] for name in (*_COLUMNS, *_ADDED)}
    blocks: list[str] = []
    for part in parts:
        count = len(part.columns["step"])
        for name, values in part.columns.items():
            if (numbers := texts.get(name)) is not None:
                values = [numbers.setdefault(value, len(numbers)) for value in values]
            columns[name] += values
        for n in range(len(part.blocks)):
            columns["block"] += [len(blocks)] * min(_BLOCK, count - n * _BLOCK)
            blocks.append(f"{part.name}.{n}")
    tree = {
        "run": _facts(run),
        "points": {
            name: [series.steps.tolist(), series.values.tolist()]
            for name, series in run.series.items()
        },
        "texts": {name: list(numbers) for name, numbers in texts.items()},
        "blocks": blocks,
        "episodes": columns,
        "tokens": read_tokens(run.folder),
        "batches": [int(folder.name[5:]) for folder in step_folders(run.folder / BATCHES)],
        "effects": {
            step: {name: effect.known() for name, effect in arms.items()}
            for step, arms in run.effects().items()
        },
        "left_out": len(episode_files(run.folder)) - len(parts),
    }
    return json.dumps(tree, separators=(",", ":")).encode()


def _facts(run: Run) -> dict[str, str]:
    return {
        "name": run.name,
        "config": run.config,
        "warnings": "\n".join(run.warnings),
        "failure": run.environment_error,
        "summary": read_text(run.folder / SUMMARY),
    }


def write_page(run: Run, out: str | Path, *, most_mb: int = 64) -> Path:
    """Writes the page of a run as one file that loads nothing.

    Args:
        run: The run.
        out: The file to write.
        most_mb: Megabytes that the episodes may take in it.
    """
    out = Path(out)
    parts = read_parts(run.folder, most_mb * 10**6)
    data = {"index": zlib.compress(make_index(run, parts), 6)}
    data |= {f"{part.name}.{n}": block for part in parts for n, block in enumerate(part.blocks)}
    elements = [
        f'<script type="text/plain" id="{name}">{base64.b64encode(block).decode()}</script>'
        for name, block in data.items()
    ]
    template = (files("gspo_env.runs") / "page.html").read_text(encoding="utf-8")
    page = template.replace("<!--DATA-->", "\n".join(elements), 1)
    write_file(out.parent, out.name, lambda path: path.write_text(page, encoding="utf-8"))
    return out
