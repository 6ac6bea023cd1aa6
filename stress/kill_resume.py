"""Kills training runs with SIGKILL at random moments and goes on with each to its end.

    python stress/kill_resume.py --runs 50

Each run is a process with one thread. It is killed one to three times, every other time while it
writes a checkpoint. At its end, every tensor of its last checkpoint, the files of its model and all
metrics but times, rates and those of the machine must equal those of the uninterrupted run, and
`metrics.jsonl` must have each point once. Exit code 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from safetensors.torch import load_file

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config, override

STEPS = 6
MEASURED = ("time/", "per_second", "system/")
"""Parts of the names of metrics that measure the machine, not the run."""
SHORT = {
    "recipe": {
        "hidden_size": 32,
        "demonstrations": 200,
        "imitation_steps": 40,
        "imitation_learning_rate": 1e-2,
    },
    "steps": STEPS,
    "tasks_per_step": 4,
    "eval_every": 2,
    "eval_tasks": 4,
    "rollout": {"group_size": 4},
    "checkpoints": {"save_every": 1, "keep": 2},
    "loss": {"kl_coef": 0.01},
    "tracker": "none",
    "env": "gspo/Additive-v0",
}
ENDED = "it had ended"
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"learner": {"lora_rank": 2}},
    "bfloat16": {"model_dtype": "bfloat16"},
}


def main() -> None:
    """Plays the uninterrupted runs and those that are killed, and prints what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args()
    draw, counts, equal = random.Random(options.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        references = {way: _reference(way) for way in WAYS}
        for number in range(options.runs):
            way = list(WAYS)[number % len(WAYS)]
            run = Path(f"run{number}")
            _kill_and_resume(way, run, references[way], draw, counts)
            text = differences(Path(way), run)
            equal += not text
            print(f"run {number} ({way}): {text or 'equal'}", flush=True)
            shutil.rmtree(run)
        errors = Path("errors.txt").read_text()
    damaged = errors.count("is damaged")
    print(f"{equal} of {options.runs} equal; damaged checkpoints: {damaged}; {dict(counts)}")
    sys.exit(equal != options.runs or damaged > 0)


def _reference(way: str) -> float:
    """Plays an uninterrupted run; returns its seconds."""
    begun = time.perf_counter()
    if _wait(_start(lambda: _train(way, Path(way)))):
        sys.exit(f"the run {way} failed: {Path('errors.txt').read_text()[-2000:]}")
    seconds = time.perf_counter() - begun
    state = json.loads(Path(way, f"checkpoints/step-{STEPS:06d}/state.json").read_text())
    norms = [m["train/grad_norm"] for _, m in state["history"] if "train/grad_norm" in m]
    if not min(norms) > 0:
        sys.exit(f"steps of the run {way} have no gradient, the norms are {norms}")
    return seconds


def _kill_and_resume(
    way: str, run: Path, seconds: float, draw: random.Random, counts: Counter[str]
) -> None:
    kills, wanted = 0, draw.randint(1, 3)
    for n in range(20 * wanted):
        process = _start(lambda: _train(way, run))
        until_first(process, run)
        moment = draw.uniform(0.0, 0.4) * seconds / (n + 1)
        kill = _kill_in_write if draw.random() < 0.5 else _kill_after
        outcome = kill(process, run, moment)
        counts[outcome] += 1
        kills += outcome != ENDED
        if kills == wanted or (kills and outcome == ENDED):
            break
        if outcome == ENDED:  # every run is killed at least once
            shutil.rmtree(run)
    else:
        sys.exit(f"{run} always ended before it was killed")
    while _wait(_start(lambda: _train(way, run))):
        counts["failed"] += 1
        if counts["failed"] > 3:
            sys.exit(Path("errors.txt").read_text()[-2000:])


def _train(way: str, run: Path) -> None:
    """Goes on with a run that has a checkpoint, or else begins it."""
    tree = {**SHORT, **WAYS[way], "output": str(run)}
    if any(run.glob("checkpoints/step-*/manifest.json")):
        agent = GSPOAgent.resume(run)
    else:
        shutil.rmtree(run, ignore_errors=True)
        agent = GSPOAgent(config=override(Config.from_recipe(), tree))
    if not agent.finished:
        agent.train()


def _start(work: Callable[[], None]) -> int:
    """Runs work in a fork, which has imported everything; returns its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        for descriptor, file in ((1, os.devnull), (2, "errors.txt")):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
        work()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def until_first(process: int, run: Path) -> None:
    """Waits for the first checkpoint, so that there is something to go on from."""
    while not any(run.glob("checkpoints/step-*")):
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.002)


def _kill_after(process: int, run: Path, seconds: float) -> str:
    time.sleep(seconds)
    return _kill(process, run)


def _kill_in_write(process: int, run: Path, seconds: float) -> str:
    """Kills a run in the first write of a checkpoint after some seconds."""
    time.sleep(seconds)
    while not any(run.glob("checkpoints/.step-*.part")):
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
    return _kill(process, run)


def _kill(process: int, run: Path) -> str:
    """Kills a process; returns what it was doing."""
    os.kill(process, signal.SIGKILL)
    if _wait(process) == 0:
        return ENDED
    if any(run.glob("checkpoints/.step-*.part")):
        return "killed while it wrote a checkpoint"
    if not any(run.glob("checkpoints/step-*")):
        return "killed before its first checkpoint"
    return "killed between checkpoints"


def differences(reference: Path, run: Path) -> str:
    """Says in what two runs differ; empty if in nothing."""
    last = f"checkpoints/step-{STEPS:06d}"
    tensors, others = (load_file(r / last / "state-00001.safetensors") for r in (reference, run))
    if tensors.keys() != others.keys():
        return "names of tensors"
    if unequal := [name for name in tensors if not torch.equal(tensors[name], others[name])]:
        return f"tensors: {unequal[:3]}"
    histories = [
        json.loads((r / last / "state.json").read_text())["history"] for r in (reference, run)
    ]
    if _timeless(histories[0]) != _timeless(histories[1]):
        return "metrics"
    weights = [(r / "model/model.safetensors").read_bytes() for r in (reference, run)]
    if weights[0] != weights[1]:
        return "the files of the model"
    if points(reference) != points(run):
        return "metrics.jsonl"
    return ""


def _timeless(history: list[tuple[int, Mapping[str, float]]]) -> Any:
    return [
        (step, {k: v for k, v in metrics.items() if not any(part in k for part in MEASURED)})
        for step, metrics in history
    ]


def points(run: Path) -> Any:
    """Returns the values of each step and metric, each in a list."""
    values: dict[str, list[float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        for step, metrics in _timeless([(point["step"], point["metrics"])]):
            for name, value in metrics.items():
                values.setdefault(f"{step} {name}", []).append(value)
    return values


if __name__ == "__main__":
    main()
