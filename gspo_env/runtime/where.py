"""The line of foreign code that raised an error, or that a thread is in."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple(
    path + os.sep
    for path in (
        str(Path(__file__).parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    )
)
EVENT_LOOP = (_LIBRARIES[0], os.path.dirname(asyncio.__file__))
"""The beginnings of the names of files that run foreign code in an event loop."""


def line_of(error: BaseException) -> str:
    """Returns the innermost line of foreign code that an error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    return (_environment_line(frames) or _line(frames[-1])) if frames else "unknown place"


def _environment_line(frames: traceback.StackSummary) -> str:
    """Returns the innermost line that is not of a library, or nothing."""
    lines = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return _line(lines[-1]) if lines else ""


def _line(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{frame.lineno} in {frame.name}"


def held_line(thread: int, *callers: str) -> str:
    """Returns the line of foreign code that runs in a thread, or nothing.

    Args:
        thread: Ident of the thread.
        callers: The beginnings of the names of files that call foreign code.
    """
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else ()
    inside = traceback.StackSummary()
    for entry in stack:
        inside.append(entry)
        if entry.filename.startswith(callers):
            inside.clear()
    return _environment_line(inside)
