"""Runs work in several processes, and passes on what they print last while none is done."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from gspo_env.redaction import log_to_terminal, redact_text, visible
from gspo_env.runtime.processes import die_with_parent

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
"""Maximum attempts of a job whose process dies."""
_PATIENCE = 5.0
"""Seconds that a process has to close what is open when it is stopped."""
_QUIET = 30.0
"""Seconds without a finished job after which the newest lines are said."""
_LONGEST = 160
"""Characters of such a line."""


def in_processes(
    work: Callable[[T], None],
    jobs: Mapping[str, T],
    workers: int,
    lost: Callable[[T], None],
    say: Callable[[str], None],
) -> Iterator[T]:
    """Does the work of each job in a process; yields the jobs as they are done.

    A process that dies breaks its pool; the jobs that are left are tried again in a new one. On an
    error in this process, such as KeyboardInterrupt, the processes are stopped.

    Args:
        work: A function of a module.
        jobs: Its arguments, by the names that are said.
        workers: Processes at a time.
        lost: Called with each job whose processes died; it counts as done.
        say: Called with the newest line that each running job has printed, now and then.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    left = dict(jobs)
    others = active_children()
    for _ in range(_ATTEMPTS):
        if not left:
            return
        with (
            tempfile.TemporaryDirectory(prefix="gspo-env-lines-") as folder,
            ProcessPoolExecutor(workers, get_context("spawn"), _set_up, (threads, folder)) as pool,
        ):
            futures = {pool.submit(_do, name, work, job): name for name, job in left.items()}
            try:
                for future in _finished(futures, Path(folder), say):
                    future.result()
                    yield left.pop(futures[future])
            except BrokenProcessPool:
                logger.warning("a worker process died; what it left is tried again")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _stop([process for process in active_children() if process not in others])
                raise
    for job in left.values():
        lost(job)
        yield job


def _finished(
    futures: Mapping[Future[None], str], folder: Path, say: Callable[[str], None]
) -> Iterator[Future[None]]:
    """Yields the futures as they are done; says what happens if that takes long."""
    running = set(futures)
    while running:
        done, running = wait(running, _QUIET, FIRST_COMPLETED)
        if not done:
            for path in sorted(folder.glob("*.line")):
                with contextlib.suppress(OSError):  # its job has just ended
                    say(visible(redact_text(path.read_text(errors="replace"))))
        yield from sorted(done, key=lambda future: future.exception() is not None)


class _Newest(io.TextIOWrapper):
    """A stream that drops its text, but for the newest line, which is kept in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(open(os.devnull, "wb"), encoding="utf-8")  # noqa: SIM115 - closed with this
        self._path, self.job = path, ""

    def write(self, text: str) -> int:
        """Keeps the last line that is not empty."""
        lines = [line for line in text.splitlines() if line.strip()]
        if lines and self.job:
            part = self._path.with_suffix(".part")
            with contextlib.suppress(OSError):  # a full disk costs the line, not the run
                part.write_text(f"{self.job}: {lines[-1][:_LONGEST]}", errors="replace")
                part.replace(self._path)
        return len(text)

    def end(self) -> None:
        """Forgets the job and its line."""
        self.job = ""
        self._path.unlink(missing_ok=True)


def _do(name: str, work: Callable[[T], None], job: T) -> None:
    stream = sys.stdout
    assert isinstance(stream, _Newest)
    stream.job = name
    try:
        work(job)
    finally:
        stream.end()


def _set_up(threads: int, folder: str) -> None:
    """Prepares a worker process."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; `_stop` follows

    def end(*_: object) -> None:
        logging.getLogger(
            "asyncio"
        ).disabled = True  # it would report the task that is left by this
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)  # an idle worker would wait for ever, a busy one play on
    log_to_terminal()
    torch.set_num_threads(min(torch.get_num_threads(), threads))
    sys.stdout = _Newest(Path(folder, f"{os.getpid()}.line"))  # for the rest of the process


def _stop(workers: Sequence[BaseProcess]) -> None:
    """Ends worker processes: they close what is open, and are killed if that takes too long."""
    try:
        for worker in workers:
            worker.terminate()
        left, until = {worker.sentinel for worker in workers}, time.monotonic() + _PATIENCE
        while left and (seconds := until - time.monotonic()) > 0:
            left -= set(connection.wait(list(left), seconds))
    finally:
        for worker in workers:
            worker.kill()
