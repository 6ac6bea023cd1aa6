"""Trains for many steps with an environment that fails, and watches what must not grow.

    python benchmarks/soak.py --steps 2000
    python benchmarks/soak.py --steps 40 --faults 0.2 --isolation process

Prints resident memory, open files, threads and children by quarter of the run, the success before
and after, and the failures that were injected beside those that the run counted. `--env` takes an
environment of your own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

SAMPLES = "GSPO_SOAK_SAMPLES"
COUNTS = ("env_errors", "env_timeouts", "retried", "lost_episodes")
KINDS = {
    "thread": ("exception", "exit", "nan", "type", "long", "hang"),
    "process": ("exception", "exit", "nan", "type", "long", "hang", "crash"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A tracker that notes at each step what the process holds."""

    how_to_look = ""

    def start(self, run: object) -> Sampler:
        """Returns itself."""
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds a line."""
        here = psutil.Process()
        line = {
            "step": step,
            "resident": here.memory_info().rss,
            "files": here.num_fds(),
            "threads": here.num_threads(),
            "children": len(here.children(recursive=True)),
        }
        with Path(os.environ[SAMPLES]).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def text(self, name: str, text: str) -> None:
        """Does nothing."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Does nothing."""

    def finish(self, status: str) -> None:
        """Does nothing."""


def options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="gspo/Lookup-v0")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tasks", type=int, default=4, help="tasks of a step")
    parser.add_argument("--group", type=int, default=4, help="episodes of a task")
    parser.add_argument("--faults", type=float, default=0.0, help="share of the steps that fail")
    parser.add_argument("--seed", type=int, default=1, help="seed of the failures")
    parser.add_argument("--isolation", choices=tuple(KINDS), default="thread")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds of an episode")
    parser.add_argument("--tracker", default="mlflow")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--demonstrations", type=int, default=400)
    parser.add_argument("--imitation-steps", type=int, default=150)
    return parser.parse_args()


def train(chosen: argparse.Namespace, folder: Path) -> tuple[list[Mapping[str, float]], int, int]:
    """Trains; returns the metrics, and the failures that were injected before and in all."""
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.check import injected
    from gspo_env.config import Config

    log = folder / "faults.log"
    kinds = KINDS[chosen.isolation]
    env, kwargs = chosen.env, {}
    if chosen.faults:
        rates = {kind: chosen.faults / len(kinds) for kind in kinds}
        env = "gspo_env.check.faulty:Faulty"
        # a thread that hangs cannot be ended, so it hangs a little longer than an episode only
        hang = 3600.0 if chosen.isolation == "process" else 1.5 * chosen.timeout
        kwargs = {"env": chosen.env, "rates": rates, "log": str(log), "hang": hang}
        kwargs["seed"] = chosen.seed
    config = Config.from_recipe(
        env=env,
        env_kwargs=kwargs,
        steps=chosen.steps,
        tasks_per_step=chosen.tasks,
        eval_every=0,
        eval_tasks=32,
        output=str(folder / "run"),
        tracker=",".join(filter(None, (chosen.tracker, f"{__file__}:Sampler"))),
        rollout={
            "group_size": chosen.group,
            "isolation": chosen.isolation,
            "episode_timeout": chosen.timeout,
            "max_env_error_rate": 1.0,
            "concurrency": chosen.concurrency,
        },
        learner={"warmup_steps": min(60, chosen.steps // 4)},
        recipe={
            "hidden_size": 64,
            "demonstrations": chosen.demonstrations,
            "imitation_steps": chosen.imitation_steps,
        },
    )
    agent = GSPOAgent(config=config)
    agent.split()  # plays too; what follows is what the metrics count
    before = injected(log).total()
    history = agent.train()
    return [metrics for _, metrics in history], before, injected(log).total()


def main() -> None:
    """Runs the training and prints the figures."""
    chosen = options()
    folder = Path(tempfile.mkdtemp(prefix="gspo-soak-"))
    os.environ[SAMPLES] = str(folder / "samples.jsonl")
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    started = time.perf_counter()
    history, before, after = train(chosen, folder)
    print(f"{chosen.steps} steps in {time.perf_counter() - started:.0f} s, in {folder}")
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    print("quarter  resident MiB  files  threads  children  (medians)")
    for number, quarter in enumerate(np.array_split(lines, 4), 1):
        held = {key: np.median([line[key] for line in quarter]) for key in quarter[0]}
        resident = held["resident"] / 2**20
        print(
            f"{number:7}  {resident:12.1f}  {held['files']:5.0f}  {held['threads']:7.0f}"
            f"  {held['children']:8.0f}"
        )
    success = [metrics["eval/success"] for metrics in history if "eval/success" in metrics]
    print(f"success {success[0]:.1%} before, {success[-1]:.1%} after")
    counted = {
        name: sum(m.get(f"{kind}/{name}", 0.0) for m in history for kind in ("rollout", "eval"))
        for name in COUNTS
    }
    print("counted: " + ", ".join(f"{name} {value:.0f}" for name, value in counted.items()))
    failures = counted["env_errors"] + counted["env_timeouts"]
    print(f"injected: {after - before} in training, {before} before; counted: {failures:.0f}")


if __name__ == "__main__":
    main()
