"""Records, outside of a folder, what the user trained there: which settings, files and place.

The folder may be from somebody else, so it cannot say this itself. A record is a file in the user's
state directory, named by the folder's path.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ABOVE = 3
"""How far a run's folder is above the folders of its models and checkpoints, at most."""
_MOST = 10_000
"""Records that are searched for a folder that was moved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustProblem:
    """Why settings that name code are not known to be the user's own."""

    reason: str
    place: str = ""
    """The working folder in which the user trained, if it is another one."""


def write_note(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Notes that the user trains in a folder with these settings; returns the file.

    Raises:
        OSError: It cannot be written.
    """
    path = note_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_suffix(f".{os.getpid()}")
    place = {"folder": str(folder.resolve()), "from": os.getcwd()}
    part.write_text(json.dumps(place | _describe(settings)))
    os.replace(part, path)
    return path


def doubt(folder: Path, settings: Mapping[str, Any]) -> TrustProblem | None:
    """Returns why settings are not known to be those that the user trained with; None if they are.

    Args:
        folder: Folder of a run, or one in it.
        settings: Settings that may run code, by dotted name.
    """
    wanted = _describe(settings)
    folder = folder.resolve()
    notes = [
        note
        for place in (folder, *folder.parents[:_ABOVE])
        if (note := _read(note_path(place))) is not None
    ]
    if any({name: note.get(name) for name in wanted} == wanted for note in notes):
        return None
    return _difference(notes[0], wanted) if notes else _stranger(wanted)


def changed_files(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Returns the files that settings name and that differ from those of the last training."""
    note = _read(note_path(folder)) or {}
    known = note.get("files")
    if not isinstance(known, Mapping) or not known:
        return []
    return [name for name, digest in _files(settings).items() if digest not in known.values()]


def note_path(folder: Path) -> Path:
    """Returns the file of the record of a folder."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = home if home.is_absolute() else Path.home() / ".local" / "state"
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    return state / "gspo-env" / "trained" / f"{name}.json"


def _difference(note: Mapping[str, Any], wanted: Mapping[str, Any]) -> TrustProblem:
    """Says how settings differ from a record of their folder."""
    if note.get("settings") != wanted["settings"]:
        return TrustProblem(reason="you trained there with other settings")
    files, place = note.get("files"), str(note.get("from", ""))
    files = files if isinstance(files, Mapping) else {}
    if missing := [name for name in files if name not in wanted["files"]]:
        there = f"; you trained in {place!r}" if place and place != os.getcwd() else ""
        return TrustProblem(
            reason=f"there is no file {missing[0]!r} in {os.getcwd()!r}{there}", place=place
        )
    if changed := [name for name, digest in wanted["files"].items() if files.get(name) != digest]:
        return TrustProblem(reason=f"{changed[0]!r} has changed since you trained there")
    return TrustProblem(
        reason=f"you trained in another working folder, {note.get('cwd')!r}", place=place
    )


def _stranger(wanted: Mapping[str, Any]) -> TrustProblem:
    """Says that a folder has no record, or that it is elsewhere than where it was trained."""
    usual = "no record says that you trained there with it"
    try:
        paths = list(note_path(Path()).parent.glob("*.json"))[:_MOST]
    except OSError:
        return TrustProblem(reason=usual)
    for path in paths:
        note = _read(path) or {}
        same = all(note.get(name) == wanted[name] for name in ("settings", "files"))
        if same and not Path(str(note.get("folder"))).exists():
            moved = f"your record of it is of {note.get('folder')!r}, from where it was moved"
            return TrustProblem(reason=moved)
    return TrustProblem(reason=usual)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def _describe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a record says of settings: a digest, the files, and the working folder.

    The folder is left out if files are all that the settings name: their contents are compared.
    """
    files = _files(settings)
    alone = all(_names(text) & files.keys() for text in _texts(dict(settings)))
    return {
        "settings": _digest(settings),
        "files": files,
        "cwd": None if files and alone else os.getcwd(),
    }


def _digest(settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _files(value: Any) -> dict[str, str]:
    """Returns the digest of each file that settings name; see `_names`."""
    found = {}
    for text in _texts(value):
        for name in _names(text):
            try:
                path = Path(name).expanduser()
                if path.is_file():
                    found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            except (OSError, ValueError, RuntimeError):  # it cannot be the name of a file
                continue
    return found


def _names(text: str) -> set[str]:
    """Returns what a text may name: `FILE`, `FILE:NAME` or `LABEL=FILE:NAME:WEIGHT`."""
    whole = [text, text.partition("=")[2]]
    parts = (part.split(":") for part in whole)
    return {":".join(part[:end]) for part in parts for end in range(1, len(part) + 1)} - {""}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
