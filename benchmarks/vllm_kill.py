"""Kills training runs with two vLLM servers at random moments and counts what is left of each.

    python benchmarks/vllm_kill.py --runs 10

Every process of a run inherits an environment variable, by which it is found even if it left its
parent, its group and its session. Every run has a folder of its own for temporary files. What is
left is counted a while after the kill: processes, temporary files and folders, shared memory.
PyTorch's cache of compiled code, which later runs use again, is no temporary file.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARK = "GSPO_ENV_KILL_RUN"
TRAIN = """
--engine vllm-server --replicas 2 --enforce-eager True --steps 1000 --tracker none
--recipe.demonstrations 100 --recipe.imitation-steps 20 --eval-tasks 8
"""


def marked(mark: str) -> dict[int, str]:
    """Returns the command of each process that belongs to a run."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = words.decode(errors="replace")[:80]
            except OSError:
                continue
    return found


def shared() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm"))}


def settle(mark: str, folder: Path, before: set[str], seconds: float) -> float:
    """Waits until nothing is left; returns the time it took, at most `seconds`."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if not marked(mark) and not any(folder.iterdir()) and not shared() - before:
            break
        time.sleep(0.1)
    return time.monotonic() - begun


def play(number: int, args: argparse.Namespace, draw: random.Random) -> tuple[int, int, int]:
    mark = f"{MARK}={os.getpid()}-{number}"
    before = shared()
    with tempfile.TemporaryDirectory(prefix="k") as temporary:
        place, runs = Path(temporary, "t"), Path(temporary, "r")
        place.mkdir()
        runs.mkdir()
        name, value = mark.split("=")
        process = subprocess.Popen(
            [sys.executable, "-m", "gspo_env", "train", *TRAIN.split(), *args.train.split()],
            cwd=runs,
            env={
                **os.environ,
                name: value,
                "TMPDIR": str(place),
                "TORCHINDUCTOR_CACHE_DIR": str(runs / "cache"),
            },
            stdout=(log := (runs / "log").open("w")),
            stderr=log,
        )
        moment = draw.uniform(args.first, args.last)
        time.sleep(moment)
        ended = process.poll()
        at_kill = marked(mark)
        text = (runs / "log").read_text(errors="replace").split("\n")
        process.send_signal(getattr(signal, args.signal))  # does nothing if it has ended
        process.wait()
        log.close()
        took = settle(mark, place, before, args.wait)
        orphans, folders, memory = marked(mark), list(place.iterdir()), shared() - before
        print(
            f"run {number}: {args.signal} after {moment:.1f} s with {len(at_kill)} processes"
            f"{'' if ended is None else f' (it had ended with {ended})'}; "
            f"left after {took:.1f} s: {len(orphans)} processes, {len(folders)} temporary files or "
            f"folders, {len(memory)} shared memory; last line: {[t for t in text if t][-1:]}",
            flush=True,
        )
        for pid, command in orphans.items():
            print(f"  {pid} {command}")
            os.kill(pid, signal.SIGKILL)
        for path in folders:
            print(f"  {path.name}")
            shutil.rmtree(path, ignore_errors=True)
        return len(orphans), len(folders), len(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=float, default=1.0, help="earliest second of a kill")
    parser.add_argument("--last", type=float, default=120.0, help="latest second of a kill")
    parser.add_argument("--wait", type=float, default=30.0, help="latest end of what is left")
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", default="", help="more options of `gspo-env train`")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    left = [play(number, args, draw) for number in range(args.runs)]
    processes, folders, memory = map(sum, zip(*left, strict=True))
    print(
        f"{args.runs} runs killed with {args.signal}: {processes} orphan processes, "
        f"{folders} temporary files or folders and {memory} pieces of shared memory left"
    )


if __name__ == "__main__":
    main()
