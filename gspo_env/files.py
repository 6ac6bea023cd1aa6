"""Reads and writes in a folder that may be a stranger's, such as the folder of a run.

Below the folder no part of a path is a link, only regular files of a bounded size are read, and a
file is written beside its place and renamed. The path to the folder itself may contain links. Every
refusal is an `OSError` whose `strerror` says what is wrong.

Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_file(folder, "note.txt", lambda path: path.write_text("hello"))
    >>> read_file(folder, "note.txt", 10)
    b'hello'
    >>> read_file(folder, "../note.txt", 10)
    Traceback (most recent call last):
    OSError: [Errno 22] is no plain relative name: '../note.txt'
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePath


def plain_path(folder: Path, name: str | PurePath) -> Path:
    """Returns the path of a file or folder below a folder.

    Raises:
        OSError: The name leaves the folder, or a part of the path is a link.
    """
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise OSError(errno.EINVAL, "is no plain relative name", str(name))
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise OSError(errno.ELOOP, "is a link", str(path))
    return path


def regular_file(folder: Path, name: str | PurePath, max_bytes: int) -> Path:
    """Returns the path of a regular file below a folder, for a library that opens it.

    Raises:
        OSError: It is missing, no regular file or too large, or see `plain_path`.
    """
    path = plain_path(folder, name)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a device or a pipe may never end
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    if status.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes", str(path))
    return path


def read_file(folder: Path, name: str | PurePath, max_bytes: int) -> bytes:
    """Reads a regular file below a folder.

    Raises:
        OSError: See `regular_file`.
    """
    return regular_file(folder, name, max_bytes).read_bytes()


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
    part = place / f".{PurePath(name).name}.{os.getpid()}.part"
    part.unlink(missing_ok=True)
    try:
        write(part)
        part.replace(place / PurePath(name).name)
    finally:
        part.unlink(missing_ok=True)
