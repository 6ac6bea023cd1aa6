"""Start, memory and deaths of Ray workers, and whether they play what one process plays.

    python benchmarks/workers.py --workers 2 --kills 3

Needs the extra `ray`, but no vLLM: the actions come from a pretend server with real HTTP. Bounds
are 15 seconds from the start of the cluster to the first answer of every worker, and 600 MB besides
the workers' own processes. Memory is proportional: shared pages are divided among their users.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from worker_parts import Engine, essence, fleet, pretend_server, settings

from gspo_agents.workers import make_pool, open_collector
from gspo_env.recipes.embedded import build_tokenizer
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.faults import FaultLog
from gspo_env.rollout.transcript import ChatTokenizer
from gspo_env.types import Group, Task

SECONDS, MEGABYTES = 15.0, 600.0
WORDS = ["turn 0 of 1 2 3 4 5 6 7 8 9", "You are a helpful assistant."]


def megabytes(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss) / 2**20


def play(collector: Collector, tasks: int, size: int) -> tuple[list[Group], float]:
    begun = time.monotonic()
    every = [Task(env_id="bench/Turns", seed=n) for n in range(tasks)]
    groups = asyncio.run(collector.collect(every, seed=0, group_size=size))
    return groups, time.monotonic() - begun


def kill_some(crew, times: int, draw: random.Random, over: threading.Event) -> None:  # type: ignore[no-untyped-def]
    """Kills busy workers, one after the other."""
    while times and not over.wait(draw.uniform(0.1, 2.0)):
        busy = [m.pid for m in crew._members if m.jobs and m.pid and psutil.pid_exists(m.pid)]
        if busy:
            os.kill(draw.choice(busy), signal.SIGKILL)
            times -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    chat = ChatTokenizer(build_tokenizer(WORDS, ["<tool_call>"]))
    config = settings(f"ray:{args.workers}", env={"turns": 8}, concurrency=64)
    with tempfile.TemporaryDirectory() as folder, pretend_server(folder, 0.02) as server:
        engine = Engine(fleet(server))
        with closing(make_pool(config, FaultLog())) as pool:
            alone, seconds = play(
                Collector(engine, chat, pool, config.rollout), args.tasks, args.size
            )
            print(f"one process: {len(alone)} groups in {seconds:.1f} s")
            before = {p.pid for p in psutil.Process().children(recursive=True)}
            begun = time.monotonic()
            size = len(chat.tokenizer)
            with open_collector(config, lambda: engine, chat, pool, size) as collector:
                while collector.metrics()["rollout/workers"] < args.workers:
                    time.sleep(0.05)
                start = time.monotonic() - begun
                every = psutil.Process().children(recursive=True)
                own = {m.pid for m in collector.crew._members}  # type: ignore[attr-defined]
                ray = sum(megabytes(p) for p in every if p.pid not in before | own)
                workers = sum(megabytes(p) for p in every if p.pid in own)
                print(f"start {start:.1f} s: {'met' if start <= SECONDS else 'NOT MET'}")
                print(
                    f"memory besides the workers {ray:.0f} MB: "
                    f"{'met' if ray <= MEGABYTES else 'NOT MET'}; workers {workers:.0f} MB"
                )
                groups, seconds = play(collector, args.tasks, args.size)
                same = essence(groups) == essence(alone)
                print(f"{args.workers} workers: {seconds:.1f} s; the same groups: {same}")
                over, draw = threading.Event(), random.Random(0)
                killer = threading.Thread(
                    target=kill_some,
                    args=(collector.crew, args.kills, draw, over),  # type: ignore[attr-defined]
                )
                killer.start()
                groups, seconds = play(collector, args.tasks, args.size)
                over.set()
                killer.join()
                same = essence(groups) == essence(alone)
                print(
                    f"with kills: {seconds:.1f} s; the same groups: {same}; {collector.metrics()}"
                )
            time.sleep(1.0)
            left = {p.pid for p in psutil.Process().children(recursive=True)} - before
            print(f"processes left: {len(left)}")


if __name__ == "__main__":
    main()
