"""Opens the rows of a dataset, picks rows by seed and reads their chats."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gspo_env.chat.messages import read_messages
from gspo_env.env.base import ResetResult
from gspo_env.episodes.schema import read_bounded
from gspo_env.errors import ConfigError, MissingExtraError, RefusedError, raised_as
from gspo_env.redaction import clean
from gspo_env.seeding import HELD_OUT, draw_index, fingerprint

COLUMNS = ("prompt", "messages", "conversations", "question")
"""Columns that may have the prompt: those of TRL, ShareGPT and GSM8K."""
_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}
"""Roles by their names in ShareGPT's format."""

_JSON_CHAT = re.compile(r'\s*\[\s*\{\s*"(?:role|content|from|value)"\s*:')
"""The start of a chat in JSON."""
_ROUNDING = 1e-9
"""Added before a product is rounded down."""

_UNREADABLE = (OSError, ValueError, csv.Error, RecursionError)
"""What reading a text file raises where that is damaged."""
_MAX_TEXT, _MAX_UNPACKED = 1 << 30, 1 << 33
"""Bytes of a text file, whose rows take many times as much memory, and of an unpacked Parquet
file; others may have written both."""

Message = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


class TaskRows:
    """The rows of a dataset, some of them reserved for evaluation.

    Args:
        data: See `gspo_envs.data.dataset.DatasetEnv`.
        split: Split of a Hugging Face dataset.
        subset: Configuration of a Hugging Face dataset.
        held_out: A share of the rows, a split, a file or rows.
    """

    def __init__(
        self, data: Any, *, split: str = "train", subset: str | None = None, held_out: Any = 0.1
    ) -> None:
        """Opens the rows."""
        self._train = open_rows(data, split, subset)
        _check_splits(data, split, subset, held_out)
        self._share, self._eval = _held_out(held_out, data, subset)

    def __len__(self) -> int:
        """Returns the number of rows, those for evaluation included."""
        return len(self._train) + len(self._eval or ())

    @property
    def num_held_out(self) -> int:
        """The number of rows that evaluation seeds pick: all rows if none is held out."""
        if self._eval is not None:
            return len(self._eval)
        return _count(len(self._train), self._share) or len(self._train)

    def pick(
        self, rng: np.random.Generator, seed: int | None = None, number: Any = None
    ) -> tuple[Any, int]:
        """Returns a row and its index; an evaluation seed picks a held-out row.

        Successive evaluation seeds pick each row once before any twice, in a mixed order.

        Raises:
            ConfigError: There is no row `number`.
        """
        evaluation = seed is not None and seed >= HELD_OUT
        rows = self._eval if evaluation and self._eval is not None else self._train
        if number is not None:
            if type(number) is not int or not 0 <= number < len(rows):
                raise ConfigError(f"row is {number!r}, expected 0 to {len(rows) - 1}.")
            return rows[number], number
        # the held-out rows are spread evenly, so that no list of them is needed
        held = _count(len(rows), self._share)
        count = held if evaluation and held else len(rows) - held
        drawn = draw_index(rng, seed, count)
        if evaluation and held:
            drawn = self._place(drawn)
        elif held:  # passes over the held-out rows before it
            drawn += bisect_right(range(held), drawn, key=lambda n: self._place(n) - n)
        return rows[drawn], drawn

    def _place(self, n: int) -> int:
        """Returns the index of the n-th held-out row."""
        return min(int((n + 1) / self._share + _ROUNDING), len(self._train)) - 1


def _count(rows: int, share: float) -> int:
    """Returns how many rows are held out: at least one, if there is a share and another row."""
    return max(int(rows * share + _ROUNDING), int(share > 0 and rows > 1))


def read_chat(value: Any, where: str) -> tuple[str | None, list[Message]]:
    """Parses a prompt: its system message, and the messages that follow.

    They are the user's and the assistant's in turn, or also tool calls and their results.

    Raises:
        ConfigError: It is neither a string nor such a chat.
    """
    value = as_chat(value)
    if has_calls(value):
        return _read_history(value, where)
    chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
    messages, system = _messages(chat, where), None
    if messages and messages[0]["role"] in ("system", "developer"):
        system = messages.pop(0)["content"]
    roles = [m["role"] for m in messages]
    if not roles or roles != [("user", "assistant")[n % 2] for n in range(len(roles))]:
        raise ConfigError(
            f"{where} has the roles {roles}, expected user and assistant in turn after an "
            "optional system."
        )
    return system, messages


def has_calls(chat: Any) -> bool:
    """Returns whether tools are called in a chat, its reference answer aside."""
    if not isinstance(chat, (list, tuple)) or not all(isinstance(m, Mapping) for m in chat):
        return False
    last = len(chat) - (bool(chat) and chat[-1].get("role") == "assistant")
    return any(m.get("role") == "tool" or as_list(m.get("tool_calls")) for m in chat[:last])


def _read_history(chat: Any, where: str) -> tuple[str | None, list[Message]]:
    """Parses a chat in OpenAI's format in which tools are called."""
    with raised_as(ConfigError, where, RefusedError):
        read = read_messages(json.loads(as_json(chat)))
    system = read.pop(0).content if read[0].role == "system" else None
    if read[0].role != "user":
        raise ConfigError(f"{where} begins with {read[0].role!r}; expected a message of the user")
    return system, [dataclasses.asdict(message) for message in read]


def begin_chat(messages: Sequence[Message], index: int, row: Any) -> ResetResult:
    """Returns the result of `reset` for a row's chat; the last message is the observation."""
    info: dict[str, Any] = {"row": index}
    if (key := _row_key(row)) is not None:
        info["task_key"] = key
    if len(messages) > 1:  # with tool calls, the whole conversation
        info["messages"] = list(messages if has_calls(messages) else messages[:-1])
    return messages[-1]["content"], info


def as_json(value: Any) -> str:
    """Returns a value as JSON, the same for equal values; it may have arrays, sets and dates.

    Raises:
        TypeError: It has other objects.
        ValueError: It contains itself.
    """
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not plain data")


def _row_key(row: Any) -> str | None:
    """Returns a hash of a row, so that equal rows are one task; None if it is not plain data."""
    content = row if isinstance(row, Mapping) else getattr(row, "hash", None)
    if content is None:
        return None
    try:
        return fingerprint(as_json(content))
    except (TypeError, ValueError):
        return None


def open_rows(source: Any, split: str = "train", subset: str | None = None) -> Rows:
    """Opens a dataset; see `DatasetEnv` for the accepted sources.

    Raises:
        ConfigError: It cannot be read, or has no rows.
        MissingExtraError: Its format needs a package that is not installed.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.path.expanduser(source))
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        source = _open_path(str(source), split, subset, stamp)
    elif isinstance(source, (list, tuple)) and any(map(_is_path, source)):
        source = _Several([_open_part(part, split, subset) for part in source])
    source = _rows_of_table(source)
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ConfigError(f"data is {source!r}, expected rows or where they are.")
    if not len(source):
        raise ConfigError("data has no rows; expected at least one.")
    try:
        source[0]
    except (LookupError, TypeError):
        kind = type(source).__name__
        raise ConfigError(
            f"data is a {kind} without a row 0, expected rows, such as a list of dictionaries."
        ) from None
    rows: Rows = source
    return rows


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _open_part(part: Any, split: str, subset: str | None) -> Rows:
    """Opens one of several files."""
    if not _is_path(part) or not Path(os.path.expanduser(part)).is_file():
        what = f"the file {str(part)!r}, which does not exist" if _is_path(part) else repr(part)
        raise ConfigError(f"data has {what:.200}, expected files, or rows that are dictionaries.")
    return open_rows(part, split, subset)


def _rows_of_table(source: Any) -> Any:
    """Returns the rows of a table of pandas, Polars or Arrow, and other sources as they are."""
    if hasattr(source, "to_pylist"):
        return source.to_pylist()
    if hasattr(source, "to_dicts"):
        return source.to_dicts()
    return source.to_dict("records") if hasattr(source, "itertuples") else source


class _Several(Sequence[Mapping[str, Any]]):
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        part = bisect_right(self._ends, index)
        return self._parts[part][index - self._ends[part]]


@lru_cache(maxsize=16)
def _open_path(source: str, split: str, subset: str | None, stamp: int) -> Rows:
    """Opens a dataset once per process; a changed `stamp` reopens a changed file."""
    path = Path(os.path.expanduser(source))
    suffix = path.suffix.lower()
    if suffix in (*_READERS, ".parquet") and not path.is_file():
        raise ConfigError(f"data: the file {source} does not exist.")
    if read := _READERS.get(suffix):
        if (size := path.stat().st_size) > _MAX_TEXT:
            raise ConfigError(
                f"data: {path} has {size:,} bytes; expected at most {_MAX_TEXT:,}, or a Parquet "
                "file, which takes less memory."
            )
        with raised_as(ConfigError, f"data: {path} cannot be read", *_UNREADABLE):
            return read(path)
    if path.is_file() and suffix != ".parquet":
        kinds = ", ".join(_READERS)
        raise ConfigError(f"data: {path} is of no known kind, expected {kinds} or .parquet.")
    if suffix == ".parquet":
        return _Parquet(path)
    hint = "; pip install 'gspo-env[datasets]'"
    with raised_as(
        MissingExtraError, f"{source} needs the package datasets", ImportError, mend=hint
    ):
        from datasets import DatasetDict, load_dataset, load_from_disk
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    with raised_as(
        ConfigError, f"data: {source!r} cannot be loaded", OSError, ValueError, KeyError
    ):
        loaded = load_from_disk(source) if saved else load_dataset(source, subset, split=split)
        return loaded[split] if isinstance(loaded, DatasetDict) else loaded  # type: ignore[no-any-return]


def _read_json(path: Path) -> Rows:
    """Reads a list of objects, alone or as the only list of an object."""
    loaded = json.loads(path.read_text(encoding="utf-8-sig"))
    lists = [v for v in loaded.values() if isinstance(v, list)] if isinstance(loaded, dict) else []
    rows = lists[0] if len(lists) == 1 else loaded
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"data: {path} is not a list of JSON objects.")
    return rows


def _read_csv(path: Path) -> Rows:
    """Reads a table; the first line names the columns."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        rows: list[dict[str, Any]] = list(reader)
        names = reader.fieldnames or []
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"Dataset: {path} has the column {twice[0]!r} twice; expected it once.")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ConfigError(f"Dataset: {path}, row {number}: expected a value for each column.")
    return rows


def _read_jsonl(path: Path) -> Rows:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        with raised_as(ConfigError, f"Dataset: {path}, line {number}", ValueError, RecursionError):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise ConfigError(f"Dataset: {path}, line {number}: expected a JSON object.")
        rows.append(row)
    return rows


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
"""How files are read, by suffix."""


class _Parquet(Sequence[Mapping[str, Any]]):
    """The rows of a Parquet file; only requested ones are converted to Python values."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        faults = (pyarrow.ArrowException, OSError, ValueError)
        with raised_as(ConfigError, f"data: {path} cannot be read", *faults):
            self._table = read_bounded(path, _MAX_UNPACKED)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def _check_splits(data: Any, split: str, subset: str | None, held_out: Any) -> None:
    """Refuses splits of data that has none, and evaluation on the rows of the training.

    Raises:
        ConfigError: A setting means nothing for the data, or both are the same rows.
    """
    is_named = isinstance(held_out, (str, os.PathLike))
    files = data if isinstance(data, (list, tuple)) else [data]
    if is_named and str(held_out) in (split, *(str(file) for file in files if _is_path(file))):
        raise ConfigError(
            f"data: held_out is {held_out!r}, the rows that are trained on, expected others, or 0 "
            "to use all rows for both."
        )
    if isinstance(data, (str, os.PathLike)) and not _is_one_table(Path(os.path.expanduser(data))):
        return
    is_split = isinstance(held_out, str) and not Path(held_out).suffix
    settings = {"split": split != "train" and split, "subset": subset}
    for name, value in {**settings, "held_out": is_split and held_out}.items():
        if value:
            raise ConfigError(
                f"data: {name} is {value!r}, but the data has no splits, expected none, or the "
                "name of a Hugging Face dataset as data."
            )


def _is_one_table(path: Path) -> bool:
    return path.suffix.lower() in (*_READERS, ".parquet") or (path / "state.json").is_file()


def _held_out(held_out: Any, data: Any, subset: str | None) -> tuple[float, Rows | None]:
    """Returns the share of the rows that is held out, or the separate evaluation rows."""
    if isinstance(held_out, (int, float)):
        if not 0 <= held_out <= 0.5:
            raise ConfigError(f"Dataset: held_out is {held_out}, expected a share of 0 to 0.5.")
        return float(held_out), None
    is_file = isinstance(held_out, (str, os.PathLike)) and Path(held_out).suffix
    if isinstance(held_out, str) and not is_file:
        return 0.0, open_rows(data, held_out, subset)
    return 0.0, open_rows(held_out)


def speaker_and_text(message: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns who speaks in a message, and the text; ShareGPT calls them `from` and `value`.

    A list of texts, or of parts with a text, is joined. Any other content is returned as it is.
    """
    if "role" in message or "from" not in message:
        return message.get("role"), _joined(message.get("content"))
    speaker = message["from"]
    role = _SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
    return role, _joined(message.get("value"))


def as_list(value: Any) -> Any:
    """Returns a NumPy array, as `pandas` reads the lists of Parquet files, as a list."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def prompt_column(row: Mapping[str, Any], column: str = "") -> str:
    """Returns the column of the prompt, or one that the row lacks if it has none."""
    return column or next((name for name in COLUMNS if name in row), "")


def is_text(prompt: Any) -> bool:
    """Returns whether a prompt is a text and not a list of messages."""
    return isinstance(as_chat(prompt), str)


def as_chat(value: Any) -> Any:
    """Returns a prompt; messages may be an array, or JSON, as tables have them."""
    if isinstance(value, str) and _JSON_CHAT.match(value):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return as_list(value)


def _joined(content: Any) -> Any:
    parts = as_list(content)
    if not isinstance(parts, (list, tuple)):
        return content
    is_text = [isinstance(part, Mapping) and part.get("type") == "text" for part in parts]
    texts = [p.get("text") if text else p for p, text in zip(parts, is_text, strict=True)]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _messages(value: Any, where: str) -> list[Message]:
    """Parses a text-only chat and joins consecutive messages of one role."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(m, Mapping) for m in value):
        raise ConfigError(f"{where} is {value!r}, expected a text or a list of messages.")
    read: list[Message] = []
    for message in value:
        role, content = speaker_and_text(message)
        if content is None and as_list(message.get("tool_calls")):  # a reference answer
            content = ""
        if not isinstance(role, str) or not isinstance(content, str):
            raise ConfigError(f"{where} has the message {message!r}, expected a role and a text.")
        content = clean(content)
        if read and read[-1]["role"] == role:
            read[-1]["content"] += f"\n\n{content}"
        else:
            read.append({"role": role, "content": content})
    return read
