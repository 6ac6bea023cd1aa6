"""Records in the user's state directory of what the user has trained and audited, and with what."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_env.files import write_file

logger = logging.getLogger(__name__)


def write_record(kind: str, key: str, entry: Mapping[str, Any]) -> str:
    """Writes the record of a key; returns why that fails, or nothing."""
    try:
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path.parent, path.name, lambda part: part.write_text(json.dumps(entry)))
    except (OSError, RuntimeError) as error:  # there is no home
        return str(error)
    return ""


def read_record(kind: str, key: str) -> dict[str, Any]:
    """Returns the record of a key; empty if there is none that can be read."""
    try:
        entry = json.loads(_path(kind, key).read_text())
    except (OSError, ValueError, RuntimeError):  # there is no home
        return {}
    return entry if isinstance(entry, dict) else {}


def _path(kind: str, key: str) -> Path:
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = home if home.is_absolute() else Path.home() / ".local" / "state"
    return state / "gspo-env" / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def record_training(folder: Path, settings: Mapping[str, Any], model: str) -> None:
    """Records that the user trains in a folder; see `gspo_env.trust.record`."""
    entry = describe(settings) | {"model": model}
    if problem := write_record("trained", str(folder.resolve()), entry):
        logger.warning(
            "cannot note what %s was trained with (%s): its use needs flags such as --env",
            *(folder, problem),
        )


def training_record(folder: Path) -> dict[str, Any]:
    """Returns the record of a folder; empty if there is none."""
    return read_record("trained", str(folder.resolve()))


def describe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record: a digest of the settings, those of the files that they name, the place."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return {
        "settings": hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest(),
        "files": file_digests(settings),
        "working folder": os.getcwd(),
    }


def file_digests(settings: Any) -> dict[str, str]:
    """Returns the digest of each file that settings name."""
    digests = {}
    for name in (name for text in texts_of(settings) for name in file_names(text)):
        with contextlib.suppress(OSError, ValueError):  # it can be no file's name
            path = Path(os.path.expanduser(name))
            if path.is_file():
                with path.open("rb") as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def file_names(text: str) -> Iterator[str]:
    """Yields what a text may name: `FILE`, `FILE:NAME` or `LABEL=FILE:NAME:WEIGHT`."""
    for part in (text, text.partition("=")[2]):
        pieces = part.split(":", 8)
        yield from (":".join(pieces[:end]) for end in range(1, len(pieces) + 1) if pieces[0])


def texts_of(value: Any) -> Iterator[str]:
    """Yields the texts in a tree of settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from texts_of(item)
