"""The page that `gspo-env view` shows: a run's metrics and episodes in one HTML file.

The page is `viewer/`, bundled. The data are in elements that no browser runs, deflated and in
base64, so no text of a policy or an environment is part of the HTML:

    index      the run, its metrics, and one column for each property of the episodes
    NAME.N     the turns of some episodes of the file NAME, which are read when one is opened
"""

from __future__ import annotations

import base64
import json
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.episodes.schema import (
    EpisodeFile,
    _starts,
    episode_files,
    read_file,
    read_tokens,
)
from gspo_env.episodes.writer import surplus
from gspo_env.errors import OutputError
from gspo_env.redaction import redact_text
from gspo_env.tracking.jsonl import METRICS

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

PAGE = "view.html"
"""Name of the page in the folder of a run."""
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
    table = read_file(file.path)
    if table is None:
        return None
    starts = _starts(table)
    firsts = table.take(starts[:-1])
    columns: dict[str, list[Any]] = {name: firsts[name].to_pylist() for name in _COLUMNS}
    names = firsts["episode"].to_pylist()
    places = [_NAME.fullmatch(name) for name in names]
    if strange := [name for name, place in zip(names, places, strict=True) if not place]:
        logger.warning("%s is left out: %.80r is no id of an episode", file.path, strange[0])
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


class Source:
    """The data of a run's page; what a file gave is kept until the file changes.

    Args:
        run: Folder of the run.
        most: Bytes that the episodes may take in the page. If they take more, steps in between are
            left out, those of training first.

    Raises:
        OutputError: This is not the folder of a run.
    """

    def __init__(self, run: str | Path, most: int) -> None:
        self.run, self._most = Path(run), most
        if not self.exists:
            raise OutputError(f"{str(run)!r} has no {METRICS}; expected the folder of a run")
        self._parts: dict[str, tuple[tuple[int, int], Part | None]] = {}

    @property
    def exists(self) -> bool:
        """Whether the folder is still there."""
        return (self.run / METRICS).is_file()

    @property
    def state(self) -> str:
        """Changes whenever the data do."""
        paths = [self.run / METRICS, *(file.path for file in episode_files(self.run))]
        return str(zlib.crc32(repr([(path.name, _stamp(path)) for path in paths]).encode()))

    def parts(self) -> list[Part]:
        """Returns the episodes of each file."""
        found, known = [], episode_files(self.run)
        names = {file.path.name for file in known}
        self._parts = {name: value for name, value in self._parts.items() if name in names}
        for file in known:
            stamp = _stamp(file.path)
            old = self._parts.get(file.path.name)
            if old is None or old[0] != stamp:
                self._parts[file.path.name] = old = (stamp, read_part(file))
            if old[1] is not None:
                found.append((file, old[1]))
        sizes = [
            EpisodeFile(path=f.path, step=f.step, phase=f.phase, size=p.size) for f, p in found
        ]
        gone = {file.path for file in surplus(sizes, self._most)}
        return [part for file, part in found if file.path not in gone]

    def index(self, parts: Sequence[Part]) -> bytes:
        """Returns what the page reads first, as JSON."""
        texts: dict[str, dict[Any, int]] = {name: {} for name in _TEXTS}
        columns: dict[str, list[Any]] = {name: [] for name in (*_COLUMNS, *_INDEX)}
        for part in parts:
            count = len(part.columns["step"])
            for name, values in part.columns.items():
                if (known := texts.get(name)) is not None:
                    values = [known.setdefault(value, len(known)) for value in values]
                columns[name] += values
            for n in range(len(part.blocks)):
                columns["block"] += [f"{part.name}.{n}"] * min(_BLOCK, count - n * _BLOCK)
        numbers: dict[str, int] = {}
        columns["block"] = [numbers.setdefault(n, len(numbers)) for n in columns["block"]]
        tree = {
            "run": self._facts(),
            "points": read_points(self.run),
            "texts": {name: list(known) for name, known in texts.items()},
            "blocks": list(numbers),
            "episodes": columns,
            "tokens": read_tokens(self.run),
            "left_out": len(episode_files(self.run)) - len(parts),
        }
        return json.dumps(tree, separators=(",", ":")).encode()

    def _facts(self) -> dict[str, str]:
        def text(name: str) -> str:
            try:
                found = (self.run / name).read_bytes()[:_MOST_TEXT]
            except OSError:
                return ""
            return redact_text(found.decode(errors="replace"))

        return {
            "name": self.run.resolve().name,
            "config": text("config.toml"),
            "warnings": text("warnings.txt"),
            "failure": text("first-environment-error.txt"),
        }


_INDEX = ("group", "member", "tokens", "block")
_MOST_TEXT = 1 << 18


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def read_points(run: Path) -> dict[str, list[list[float]]]:
    """Returns the steps and the values of each metric; of a step that was run twice, the last.

    The last line is left out if it has not been written to its end.
    """
    found: dict[str, dict[int, float]] = {}
    lines = (run / METRICS).read_bytes().split(b"\n")[:-1]
    for line in lines:
        try:
            record = json.loads(line)
            step = int(record["step"])
            metrics = {str(name): float(value) for name, value in record["metrics"].items()}
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            logger.warning("a line of %s is damaged and left out: %s", METRICS, error)
            continue
        except RecursionError:
            logger.warning("a line of %s is nested too deeply and left out", METRICS)
            continue
        for name, value in metrics.items():
            found.setdefault(name, {})[step] = value
    return {
        name: [list(steps), list(steps.values())]
        for name, points in found.items()
        for steps in [dict(sorted(points.items()))]
    }


@cache
def _template() -> str:
    return (files("gspo_env.episodes") / "page.html").read_text(encoding="utf-8")


def render(data: str, connect: str) -> str:
    """Returns the page with elements of data; `connect` is where the page may read more."""
    before, _, after = _template().partition("<!--DATA-->")
    return before.replace("CONNECT", connect, 1) + data + after


def write_page(run: str | Path, out: str | Path, *, most_mb: int = 64) -> Path:
    """Writes the page of a run as one file that loads nothing.

    Args:
        run: Folder of the run.
        out: The file to write.
        most_mb: Megabytes that the episodes may take in it.

    Raises:
        OutputError: This is not the folder of a run.
    """
    source = Source(run, most_mb * 10**6)
    parts = source.parts()
    data = {"index": zlib.compress(source.index(parts), 6)}
    for part in parts:
        data |= {f"{part.name}.{n}": block for n, block in enumerate(part.blocks)}
    elements = [
        f'<script type="text/plain" id="{name}">{base64.b64encode(block).decode()}</script>'
        for name, block in data.items()
    ]
    Path(out).write_text(render("\n".join(elements), "'none'"), encoding="utf-8")
    return Path(out)
