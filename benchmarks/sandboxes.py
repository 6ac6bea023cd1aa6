"""Compares the jail with containers: `python benchmarks/sandboxes.py --image IMAGE`.

Prints start, command and stop of both; start, memory and commands of many containers at once; and
episodes of Harbor tasks in which containers are killed, images are missing, commands hang and the
disk is full. Exits with 1 if a lost episode has a score, another one is lost, or anything is left.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import shell_tasks

from gspo_env import make_env
from gspo_env.errors import EnvironmentCrashError
from gspo_env.sandbox import Sandbox
from gspo_env.sandbox.containers import Containers, call
from gspo_env.tools.tool import format_tool_call

JAIL = Sandbox(cpu_seconds=60, memory_mib=512, processes=32)


def timed(function, *arguments):
    began = time.perf_counter()
    return function(*arguments), time.perf_counter() - began


def one_by_one(name, box, count=10):
    rows = []
    for _ in range(count):
        session, start = timed(box.open)
        _, command = timed(session.exec, ["true"])
        _, stop = timed(session.stop)
        rows.append((start, command, stop))
    start, command, stop = (1000 * statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{name:10} start {start:6.0f} ms  command {command:6.1f} ms  stop {stop:6.0f} ms")


def size(process):
    """The memory of a process of a container or of its monitor; 0 of others."""
    words = " ".join(process.info["cmdline"] or ())
    if process.info["name"] != "conmon" and "sleep 3600 & wait; done" not in words:
        return 0
    with contextlib.suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0


def many(box, count):
    """Opens containers at the same time; prints what they cost."""
    with ThreadPoolExecutor(8) as pool:
        sessions, start = timed(lambda: list(pool.map(lambda _: box.open(), range(count))))
        seconds = [result.seconds for result in pool.map(lambda s: s.exec(["true"]), sessions)]
        memory = sum(map(size, psutil.process_iter(["name", "cmdline"])))
        _, stop = timed(lambda: list(pool.map(lambda s: s.stop(), sessions)))
    command = 1000 * statistics.median(seconds)
    print(f"{count} at once: started in {start:.1f} s, {memory / count / 2**20:.1f} MiB each, ")
    print(f"  command {command:.0f} ms (8 threads), stopped in {stop:.1f} s")


FAULTS = ("killed", "missing", "hanging", "full")


def play(folder, fault, number, sandbox):
    """Plays one episode; returns its reward, or `lost`."""
    env = make_env("gspo/Harbor-v0", folder=folder, sandbox=sandbox, held_out=0.0).unwrapped
    env.command_seconds = 20.0
    try:
        if fault == "missing":
            for task, place in env._places.items():
                missing = Containers(image="localhost/none:1")
                env._places[task] = type(place)(
                    box=missing, folder=place.folder, files=place.files, variables={}
                )
        env.reset(seed=number)
        if fault == "killed":
            call("podman", "kill", env._session._name)
        if fault == "hanging":
            env.command_seconds = 2.0
            env.step(format_tool_call("run", {"command": "sleep 1000"}))
            env.command_seconds = 20.0
        if fault == "full":
            env.step(format_tool_call("run", {"command": "cat /dev/zero >/app/x; rm -f /app/x"}))
            env.step(format_tool_call("run", {"command": "cat /dev/zero >/tmp/x"}))
        env._commands = ()  # or the expert would think that it has played
        while True:
            *_, terminated, _, info = env.step(env.expert_action())
            if terminated:
                return fault, info["episodic_reward"]
    except EnvironmentCrashError:
        return fault, "lost"
    finally:
        env.close()


def episodes(folder, sandbox, count, faults):
    plan = [fault for fault, number in faults.items() for _ in range(number)]
    plan += ["none"] * (count - len(plan))
    with ThreadPoolExecutor(4) as pool:
        ends, seconds = timed(
            lambda: list(pool.map(lambda p: play(folder, p[1], p[0], sandbox), enumerate(plan)))
        )
    counts = Counter(ends)
    print(f"{sandbox}: {count} episodes, {60 * count / seconds:.0f} a minute (4 threads)")
    for (fault, end), number in sorted(counts.items(), key=str):
        print(f"  {fault:8} {end!s:5} {number}")
    expected = {fault: "lost" if fault in ("killed", "missing") else 1.0 for fault in FAULTS}
    return all(end == expected.get(fault, 1.0) for fault, end in ends)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", required=True)
    parser.add_argument("--many", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=200)
    options = parser.parse_args()
    box = Containers(image=options.image)
    box.check()
    one_by_one("jail", JAIL)
    one_by_one("container", box)
    many(box, options.many)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in (0, 1, 2, 3):
            shell_tasks.write(folder, number, options.image)
        good = episodes(folder, "jail", options.episodes // 4, {})
        faults = {"killed": 10, "missing": 5, "hanging": 5, "full": 1}
        good &= episodes(folder, "podman", options.episodes, faults)
    left = call("podman", "ps", "--all", "--quiet", "--filter", "label=gspo-env").stdout.split()
    print(f"containers left: {len(left)}")
    sys.exit(0 if good and not left else 1)
