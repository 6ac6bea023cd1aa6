"""Trains ahead of the learner, kills one of those who work for the run, and checks what is left.

    python benchmarks/roles.py rank0 rank1                 # two ranks, about a minute each
    python benchmarks/roles.py server worker none          # vLLM; two servers, two Ray actors, both
    python benchmarks/roles.py both                        # vLLM and two ranks; kills nothing

Each run has `--max-staleness`. After its second step a process of the role gets SIGKILL: one of two
servers, one of two actors, or a rank of `--processes 2 --max-restarts 1`. The run has to end with
all steps, each group trained on once and none open, no episode lost or counted twice, no group too
old, and no process, temporary file or shared memory left. Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_kill import MARK, marked, settle, shared

RUN = """
env = "gspo/Lookup-v0"
output = "run"
steps = {steps}
tasks_per_step = 4
eval_every = 3
eval_tasks = 4
rollout = {{ group_size = 4 }}
checkpoints = {{ save_every = 1, keep = 2 }}
supply = {{ max_staleness = {staleness} }}
tracker = {{ name = "none" }}
learner = {{ minibatches = 2 }}

[recipe]
name = "tiny"
demonstrations = 100
imitation_steps = 20
"""
GROUP, BATCH = 4, 4
SERVERS = ("--engine", "vllm-server", "--enforce-eager", "True", "--replicas")
FLAGS = {
    "none": (*SERVERS, "2", "--workers", "ray:2"),
    "server": (*SERVERS, "2"),
    "worker": (*SERVERS, "1", "--workers", "ray:2"),
    "both": (*SERVERS, "1", "--transfer", "gloo", "--processes", "2"),
    "rank0": ("--processes", "2", "--max-restarts", "1"),
    "rank1": ("--processes", "2", "--max-restarts", "1"),
}


def victim(role: str, mark: str) -> int | None:
    """Returns the id of a process of a role; None if there is none."""
    if role.startswith("rank"):
        wanted = f"RANK={role[-1]}".encode()
        own = (
            p
            for p in marked(mark)
            if wanted in Path(f"/proc/{p}/environ").read_bytes().split(b"\0")
        )
        return min(own, default=None)
    name = "ray::_Actor" if role == "worker" else "VLLM::EngineCore"
    return next((pid for pid, command in marked(mark).items() if command.startswith(name)), None)


def wait_for(path: Path, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits until a file is there; returns whether it came while the process ran."""
    until = time.monotonic() + seconds
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def problems(folder: Path, steps: int, staleness: int) -> Iterator[str]:
    """Yields what is wrong with a run that has ended."""
    path = folder / f"run/checkpoints/step-{steps:06d}/state.json"
    if not path.exists():
        yield "the last checkpoint is missing"
        return
    state = json.loads(path.read_text())
    log = [(step, m) for step, m in state["history"] if "rollout/return" in m]
    if [step for step, _ in log] != list(range(1, steps + 1)):
        yield f"it has the steps {[step for step, _ in log]}"
    if state["supply"] != {"next": steps * BATCH, "open": []}:
        yield f"groups are left: {state['supply']}"
    before = [m["rollout/episodes_before"] for _, m in log] + [state["played"]]
    if before != [GROUP * BATCH * n for n in range(steps + 1)]:
        yield f"episodes before each step: {before}"
    if lost := sum(m["rollout/lost_episodes"] for _, m in log):
        yield f"{lost:g} episodes are lost"
    if max(m["rollout/staleness_max"] for _, m in log) > staleness:
        yield "a group was too old"


def counted(folder: Path, steps: int) -> str:
    """Returns the counters of the last step of a run."""
    state = json.loads((folder / f"run/checkpoints/step-{steps:06d}/state.json").read_text())
    log: list[dict[str, Any]] = [m for _, m in state["history"] if "rollout/return" in m]
    names = ("servers_lost", "server_restarts", "workers_lost", "worker_restarts")
    found = {name: log[-1].get(f"rollout/{name}") for name in (*names, "reissued_groups")}
    shown = [f"{name} {value:g}" for name, value in found.items() if value is not None]
    ages = sum(m["rollout/staleness_mean"] for m in log) / len(log)
    difference = max((m.get("train/sync_logprob_diff", 0.0) for m in log), default=0.0)
    return ", ".join([*shown, f"staleness {ages:.2f}", f"probe differs by {difference:.1e}"])


def play(role: str, args: argparse.Namespace) -> bool:
    """Trains, kills and checks; returns whether all is well."""
    mark = f"{MARK}={os.getpid()}-{role}"
    name, value = mark.split("=")
    before, begun = shared(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="k") as temporary:
        place, run = Path(temporary, "t"), Path(temporary, "r")
        place.mkdir()
        run.mkdir()
        (run / "run.toml").write_text(RUN.format(steps=args.steps, staleness=args.staleness))
        cache = str(run / "cache")
        variables = {name: value, "TMPDIR": str(place), "TORCHINDUCTOR_CACHE_DIR": cache}
        command = ["-m", "gspo_env", "train", "--config", "run.toml", *FLAGS[role]]
        with (run / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=run,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )
        found: list[str] = []
        if role not in ("none", "both"):
            came = wait_for(run / "run/checkpoints/step-000002/state.json", process, args.limit)
            pid = victim(role, mark) if came else None
            if pid is None:
                found.append(f"there was no {role} to kill")
            else:
                os.kill(pid, signal.SIGKILL)
        try:
            code = process.wait(args.limit)
            found += [f"exit code {code}"] if code else []
        except subprocess.TimeoutExpired:
            found.append(f"it has not ended after {args.limit:g} s")
            process.kill()
        found += problems(run, args.steps, args.staleness)
        took = settle(mark, place, before, 30.0)
        for pid, text in marked(mark).items():
            found.append(f"process {pid} is left: {text}")
            os.kill(pid, signal.SIGKILL)
        found += [f"{path.name} is left" for path in place.iterdir()]
        found += [f"{path} is left in shared memory" for path in shared() - before]
        seconds = time.monotonic() - begun
        print(
            f"{role}: {'; '.join(found) or 'all is well'} ({seconds:.0f} s, {took:.1f} to settle)"
        )
        if found:
            print("  " + "\n  ".join((run / "log").read_text(errors="replace").splitlines()[-20:]))
        else:
            print(f"  {counted(run, args.steps)}")
        sys.stdout.flush()
    return not found


def main() -> None:
    """Runs the roles of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("roles", nargs="+", choices=sorted(FLAGS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a run")
    args = parser.parse_args()
    well = [play(role, args) for role in args.roles]
    sys.exit(not all(well))


if __name__ == "__main__":
    main()
