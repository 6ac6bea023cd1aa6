"""Reads and writes in a folder that may be untrusted, such as the folder of a run.

A command that reads or writes in the folder of a run calls `check_folder` first. Below the folder
no part of a path is a link, only regular files of a bounded size are read, and a file is written
beside its place and renamed. The path to the folder itself may contain links. Every other refusal
is an `OSError` whose `strerror` says what is wrong.

Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_file(folder, "note.txt", lambda path: path.write_text("hello"))
    >>> read_file(folder, "note.txt", 10)
    b'hello'
    >>> read_file(folder, "../note.txt", 10)
    Traceback (most recent call last):
    OSError: [Errno 22] is not a plain relative name: '../note.txt'
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any, TextIO

import psutil

from gspo_env.errors import DAMAGE, OutputError, reason_of

logger = logging.getLogger(__name__)

MODEL, BATCHES = "model", "batches"
"""The folders of a model in that of a run or a checkpoint, and of the batches that a run keeps."""
SETTINGS = "gspo_env.json"
"""The file in a model's folder with the settings of its training, and the step."""
CHECKPOINT = re.compile(r"step-(\d{1,15})")
"""The name of a checkpoint's folder."""
WHATIF = "whatif.json"
"""The file of a batch with what other settings would do with it."""
METRICS, FAILURE = "metrics.jsonl", "failure.txt"
"""The files of a run with its metrics, and with the error that ended it, if one did."""
_AT_START = {
    *(METRICS, FAILURE, "checkpoints", "config.toml", "tracking", "warnings.txt"),
    "first-environment-error.txt",
}
"""What a run writes before its first metrics."""
_PART = re.compile(r"\..*\.(\d+)\.part", re.DOTALL)
"""The name of what a process writes before it is renamed, with the process."""
_SMALL = 1 << 20
"""Bytes of a file of settings."""

_TEXTS = re.compile(
    r'''"""(?s:[^\\]|\\.)*?(?:"{3,5}|\Z)|\'{3}(?s:.)*?(?:'{3,5}|\Z)'''
    r"""|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|\#[^\n]*+"""
)
"""The texts and comments of TOML, also those without an end, so that each is read once."""
_LONG_KEY = re.compile(r"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){32}")


def check_output(path: str | Path) -> None:
    """Refuses an output folder that is not empty or cannot be made; makes nothing.

    Raises:
        OutputError: It is such a folder.
    """
    folder = Path(path).absolute()
    if folder.is_dir() and any(folder.iterdir()) and not failed_at_start(folder):
        raise OutputError(f"the output folder {str(path)!r} is not empty; name a new one")
    place = next(each for each in (folder, *folder.parents) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise OutputError(
            f"cannot write to the output folder {str(path)!r}, because {str(place)!r} is no folder "
            "that can be written; name another one with --output"
        )


def failed_at_start(folder: Path) -> bool:
    """Returns whether a folder has only what a run left that failed before its first metrics.

    Raises:
        OutputError: The run has not ended.
    """
    names, lock_file = {path.name for path in folder.iterdir()}, folder / "checkpoints/lock"
    if not names <= _AT_START or any(folder.glob("checkpoints/step-*")):
        return False
    sizes = {p: p.stat().st_size for p in folder.rglob("*") if p.is_file() and p != lock_file}
    if sizes.get(folder / METRICS):
        return False
    if lock_file.is_file():
        lock(lock_file, f"the run {str(folder)!r}").close()
    return FAILURE in names or not any(sizes.values())  # a full disk has no room for an error


def clear(folder: Path) -> None:
    """Removes what is in a folder of `failed_at_start`, but for the file that is locked."""
    for path in (*folder.glob("checkpoints/*"), *folder.iterdir()):
        if path.name not in ("checkpoints", "lock"):
            remove(path)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lock(path: Path, what: str) -> TextIO:
    """Locks a file until it is closed, or until this process ends.

    Args:
        path: The file, which notes the process.
        what: What is locked, for the error.

    Raises:
        OSError: It cannot be written.
        OutputError: Another process has locked it.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        process = file.read().strip() or "unknown"
        file.close()
        raise OutputError(
            f"{what} is still running, in process {process}; expected one that has stopped"
        ) from None
    with contextlib.suppress(OSError):  # the lock counts, not the note, on a full disk
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
    return file


def check_folder(folder: Path) -> None:
    """Refuses the folder of a run that has links or special files in it.

    What is written into such a folder could end elsewhere, and a device may never end. The link
    `checkpoints/best` may name a checkpoint beside it; W&B's own links in `wandb` stay.

    Raises:
        OutputError: The folder has a link or a special file.
    """
    for place, folders, names in os.walk(folder):
        paths = [Path(place, name) for name in (*folders, *names)]
        folders[:] = [name for name in folders if name != "wandb"]
        for path in paths:
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # of a run in progress
                continue
            names_best = re.fullmatch(r"best|\.best\.\d+\.part", path.name)  # of a killed process
            best = names_best and path.parent.name == "checkpoints"
            if stat.S_ISLNK(mode) and best and re.fullmatch(r"step-\d+", os.readlink(path)):
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
                raise OutputError(
                    f"{str(path)!r} is {kind}; expected only files and folders in the folder of a "
                    "run: remove it, or copy what it names"
                )


def plain_path(folder: Path, name: str | PurePath) -> Path:
    """Returns the path of a file or folder below a folder.

    Raises:
        OSError: The name leaves the folder, or a part of the path is a link.
    """
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise OSError(errno.EINVAL, "is not a plain relative name", str(name))
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise OSError(errno.ELOOP, "is a link", str(path))
    return path


def regular_file(
    folder: Path, name: str | PurePath, max_bytes: int, *, links: bool = False
) -> Path:
    """Returns the path of a regular file below a folder, for a library that opens it.

    Args:
        folder: The folder.
        name: The file.
        max_bytes: Its largest size.
        links: Whether it may be a link, for a file that is only read as data: those of a hub's
            cache are.

    Raises:
        OSError: It is missing, not a regular file, or too large, or see `plain_path`.
    """
    path = folder / name if links else plain_path(folder, name)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a device or a pipe may never end
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    if status.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes", str(path))
    return path


def read_file(folder: Path, name: str | PurePath, max_bytes: int) -> bytes:
    """Reads a regular file below a folder.

    Raises:
        OSError: See `regular_file`.
    """
    return regular_file(folder, name, max_bytes).read_bytes()


class left_out:
    """A context that ends early, with a warning, where the file that is read in it is damaged.

    Nothing is said of a file that is not there, as of a run in progress.

    Args:
        what: The file.
        causes: Errors that say so, besides the usual ones.
        then: What is done with it.

    Example:
        >>> with left_out("a list"):
        ...     print(json.loads("[1, 2"))  # logs "a list is damaged and left out: Expecting ..."
    """

    def __init__(self, what: object, *causes: type[Exception], then: str = "left out") -> None:
        self._what, self._then = what, then
        self._causes: tuple[type[Exception], ...] = (OSError, *DAMAGE, *causes)

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Logs and drops an error of the file."""
        is_damaged = isinstance(error, self._causes)
        if error and is_damaged and not isinstance(error, FileNotFoundError):
            reason = reason_of(error).partition("\n")[0]
            logger.warning("%s is damaged and %s: %s", self._what, self._then, reason)
        return is_damaged


def read_small(folder: Path, name: str) -> str:
    """Returns the text of a file of at most 1 MiB, or nothing if there is none."""
    try:
        return regular_file(folder, name, _SMALL, links=True).read_text("utf-8", "replace")
    except OSError:
        return ""


def saved_step(folder: Path) -> int | None:
    """Returns the step after which a run saved the model in a folder; None if it has none."""
    if not (folder / "config.json").exists():
        return None
    try:
        step = json.loads(read_small(folder, SETTINGS))["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if type(step) is int and 0 <= step < 1 << 53 else None


def step_folders(folder: Path) -> list[Path]:
    """Lists the folders of the steps in their order, damaged ones as well."""
    folders = [path for path in folder.glob("step-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name[5:]))


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML whose keys have at most 32 parts; the memory of a key grows with their square.

    Raises:
        ValueError: It is not TOML, or a key is longer.
    """
    if _LONG_KEY.search(_TEXTS.sub("text", text)):
        raise ValueError("a key has more than 32 parts")
    return tomllib.loads(text)


def part_of(path: Path) -> Path:
    """Returns where this process writes what is then renamed to `path`; see `remove_parts`."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def remove_parts(paths: Iterable[Path]) -> None:
    """Removes those paths that are parts which a killed process has left."""
    for path in list(paths):
        part = _PART.fullmatch(path.name)
        # in a container, the process before may have had the same number
        if part and (int(part[1]) == os.getpid() or not psutil.pid_exists(int(part[1]))):
            remove(path)


def write_file(folder: Path, name: str | PurePath, write: Callable[[Path], object]) -> None:
    """Has a file below a folder written beside its place, and renames it.

    Args:
        folder: The folder.
        name: The file; a link in its place is replaced, not followed.
        write: Writes to the path that it gets.

    Raises:
        OSError: A folder above the file is a link, or it cannot be written.
    """
    parent = PurePath(name).parent
    place = folder if parent == PurePath() else plain_path(folder, parent)
    path = place / PurePath(name).name
    part = part_of(path)
    remove_parts(place.glob(f".{glob.escape(path.name)}.*.part"))
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
