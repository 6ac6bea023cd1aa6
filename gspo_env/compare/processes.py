"""Runs jobs in several processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, connection, get_context
from multiprocessing.process import BaseProcess
from typing import TypeVar

from gspo_env.redaction import log_to_terminal
from gspo_env.runtime.processes import die_with_parent, usable_cores

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
"""Maximum attempts of a job whose process dies."""
_PATIENCE = 5.0
"""Seconds that a process has to close what is open when it is stopped."""


def in_processes(
    work: Callable[[T], None], jobs: Sequence[T], workers: int, lost: Callable[[T], None]
) -> Iterator[T]:
    """Does the work of each job in a process; yields the jobs as they are done.

    A process that dies breaks its pool; the remaining jobs are tried again in a new one. On an
    error in this process, such as KeyboardInterrupt, the processes are stopped.

    Args:
        work: A function of a module.
        jobs: Its arguments.
        workers: Processes at a time.
        lost: Called with each job whose processes died; it counts as done.
    """
    threads = max(1, usable_cores() // workers)
    waiting = list(jobs)
    others = active_children()
    for _ in range(_ATTEMPTS):
        if not waiting:
            return
        with ProcessPoolExecutor(
            workers, get_context("spawn"), set_up_worker, (threads,)
        ) as executor:
            futures = {executor.submit(work, job): job for job in waiting}
            running = set(futures)
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=lambda f: f.exception() is not None):
                        future.result()
                        waiting.remove(futures[future])
                        yield futures[future]
            except BrokenProcessPool:
                logger.warning("a worker process died; its jobs are tried again")
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                _stop([process for process in active_children() if process not in others])
                raise
    for job in waiting:
        lost(job)
        yield job


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
        die_with_parent(parent.pid)  # an idle worker would wait for ever, a busy one play on
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
