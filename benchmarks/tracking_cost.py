"""Measures what tracking and the panel cost a training, as a share of its CPU time.

    python benchmarks/tracking_cost.py [--steps 20] [--rounds 3] [--traces]

Trains the default recipe with `--tracker none` and with MLflow (metrics, traces, system metrics,
inputs) alternately, in processes of their own. Compares the CPU seconds of all threads in the last
three quarters of the steps: MLflow's imports and the making of a store, seconds once in a run, are
over then. What is sent after training does not count. Then draws the panel and prints the share of
a core that it takes.

With `--traces`, only measures what it costs to make every kept episode a trace: the CPU time of a
trace in the training's thread and in the one that sends it, and both for the default run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from gspo_env.tracking.live import _REFRESH
from gspo_env.tracking.panel import Numbers, Pace, Screen
from gspo_env.tracking.system import memory

_CHILD = """
import json, sys, time
from gspo_agents.gspo import GSPOAgent
from gspo_agents.reporter import Reporter
from gspo_env.config import Config

tracker, steps, output = sys.argv[1], int(sys.argv[2]), sys.argv[3]
marks, trained = [], Reporter.played

def played(self, *given):
    trained(self, *given)
    marks.append(time.process_time())

Reporter.played = played
recipe = {"demonstrations": 1000, "imitation_steps": 100}
config = Config.from_recipe(
    recipe=recipe, steps=steps, eval_every=0, eval_tasks=16, tracker=tracker, output=output
)
GSPOAgent(config=config).train()
print(json.dumps(marks[-1] - marks[len(marks) // 4]))
"""

_TRACES = """
import json, time
from gspo_agents.gspo import GSPOAgent
from gspo_agents.reporter import Reporter
from gspo_env.config import Config
from gspo_env.tracking import MLflow
from gspo_env.tracking.mlflow_traces import TraceWriter

found = {"made": 0.0, "sent": 0.0, "traces": 0}

def timed(name, work):
    def run(self, *given):
        began = time.thread_time()
        work(self, *given)
        found[name] += time.thread_time() - began
        found["traces"] += len(given[0]) if name == "sent" else 0
    return run

Reporter._trace = timed("made", Reporter._trace)
TraceWriter.write = timed("sent", TraceWriter.write)
recipe = {"demonstrations": 300, "imitation_steps": 40}
tracker = MLflow(traces=10**6)
config = Config.from_recipe(
    recipe=recipe, steps=3, eval_every=0, eval_tasks=64, tracker=tracker, output="traces"
)
GSPOAgent(config=config).train()
print(json.dumps(found))
"""


def main() -> None:
    """Prints the CPU seconds of each round and the median ratio of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.traces:
        traces()
        return
    found: dict[str, list[float]] = {"none": [], "mlflow": []}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(options.rounds):
            for tracker, values in found.items():
                values.append(train(tracker, options.steps, Path(folder), n))
                print(f"round {n}: {tracker:<6} {values[-1]:.2f} CPU seconds", flush=True)
    ratios = [with_it / none for none, with_it in zip(*found.values(), strict=True)]
    print(f"MLflow / none, median of the pairs: {statistics.median(ratios):.4f}")
    print(f"the panel, share of one core: {panel():.4f}")


def traces() -> None:
    """Prints what a trace costs, and all kept episodes of the default run."""
    from gspo_env.config import Config

    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        command = [sys.executable, "-c", _TRACES]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    made, sent = (found[name] / found["traces"] for name in ("made", "sent"))
    print(f"a trace: {1e3 * made:.1f} ms in the training's thread, {1e3 * sent:.1f} ms to send")
    usual = Config.from_recipe()
    evaluated = 2 * usual.eval_tasks * (1 + usual.steps // usual.eval_every)
    count = evaluated + usual.steps * usual.episodes.keep_groups * usual.rollout.group_size
    print(f"{count} kept episodes of {usual.steps} steps: {count * (made + sent):.0f} CPU seconds")


def train(tracker: str, steps: int, folder: Path, number: int) -> float:
    """Trains in a process of its own; returns the CPU seconds of the last three quarters."""
    command = [sys.executable, "-c", _CHILD, tracker, str(steps), f"{tracker}-{number}"]
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def panel(pictures: int = 50) -> float:
    """Returns the CPU seconds of the panel in one second, if nothing but time changes it."""
    screen = Screen(memory=memory, title="run", phase="train", step=3, total=9, keys=True)
    screen.numbers = Numbers(success=0.5, best=0.6, return_=0.2, spread=0.1, tokens_per_second=900)
    screen.pace = Pace(first=1, last=3)
    screen.exchange, screen.open = ("step 3", [("user", "word " * 200)]), True
    console = Console(file=io.StringIO(), width=120, height=40, force_terminal=True)
    started = time.process_time()
    for _ in range(pictures):
        console.print(screen)
    return (time.process_time() - started) / pictures / _REFRESH


if __name__ == "__main__":
    main()
