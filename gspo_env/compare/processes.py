"""Runs jobs, each in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from gspo_env.redaction import log_to_terminal
from gspo_env.runtime.processes import die_with_parent, usable_cores

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds that a process has to close what is open when it is stopped."""


def in_processes(
    work: Callable[[T], None], jobs: Sequence[T], workers: int
) -> Generator[tuple[T, int], None, None]:
    """Does the work of each job in a process; yields each job that ended, with its exit code.

    On an error in this process, such as KeyboardInterrupt, the processes are stopped.

    Args:
        work: A function of a module.
        jobs: Its arguments.
        workers: Processes at a time.
    """
    threads = max(1, usable_cores() // workers)
    context, waiting = get_context("spawn"), deque(jobs)
    running: dict[Any, tuple[BaseProcess, T]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                process = context.Process(target=_do, args=(work, job, threads))
                process.start()
                running[process.sentinel] = process, job
            for sentinel in connection.wait(list(running)):
                ended, job = running.pop(sentinel)
                ended.join()
                yield job, ended.exitcode or 0
    finally:
        _stop([process for process, _ in running.values()])


def _do(work: Callable[[T], None], job: T, threads: int) -> None:
    set_up_worker(threads)
    work(job)


def set_up_worker(threads: int) -> None:
    """Prepares a worker process, whose standard output is dropped.

    Args:
        threads: Most threads that PyTorch may use.
    """
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; `_stop` follows

    def end(*_: object) -> None:
        logging.getLogger("asyncio").disabled = True  # it would report the pending task
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)  # it would play on
    log_to_terminal()
    torch.set_num_threads(min(torch.get_num_threads(), threads))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def _stop(workers: Sequence[BaseProcess]) -> None:
    """Ends worker processes: they close what is open, and are killed if that takes too long."""
    try:
        for worker in workers:
            worker.terminate()
        open_ends, until = {worker.sentinel for worker in workers}, time.monotonic() + _PATIENCE
        while open_ends and (seconds := until - time.monotonic()) > 0:
            open_ends -= set(connection.wait(list(open_ends), seconds))
    finally:
        for worker in workers:
            worker.kill()
