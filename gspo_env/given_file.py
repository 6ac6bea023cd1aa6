"""Reads a file that a person names, which may be a pipe such as that of `<(command)`."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from pathlib import Path

_PATIENCE = 5.0
"""Seconds in which a named pipe must get a writer; one that has a writer may be slow."""


def read_given(path: Path, max_bytes: int) -> bytes:
    """Reads a file, a pipe or a device of a bounded size.

    Raises:
        OSError: It cannot be read, is larger, or is a pipe to which nothing writes.
    """
    with open(path, "rb", buffering=0, opener=_open) as file:
        data = b""
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            is_ready = select.select([file], [], [], _PATIENCE)[0]
            start = file.read(1)  # None if there is a writer, but nothing yet
            if start == b"" and not is_ready:
                raise OSError(errno.ENXIO, "is a pipe to which nothing writes", str(path))
            data = start or b""
            os.set_blocking(file.fileno(), True)
        data += io.BufferedReader(file).read(max_bytes + 1 - len(data))
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes", str(path))
    return data


def _open(path: str, flags: int) -> int:
    """Opens without waiting for the writer of a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
