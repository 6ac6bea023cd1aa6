"""Measures what tracking and the panel cost a training: processor time and wall time.

    python benchmarks/tracking_cost.py [--steps 40] [--rounds 5] [--traces]

Trains the default recipe, evaluations included, with `--tracker none` and with MLflow (metrics,
traces, system metrics, inputs, artifacts), each in a process of its own. A pair is one training of
each, and every other pair begins with MLflow. A new folder, and so a new store, for each training.

What is counted: the processor seconds of the training process, all of its threads, and of its
children; nothing is left out because another core was idle. They are split into

- fixed: until the end of the first step (imports, the making of a store, the first evaluation) and
  after the last step (figures, files), less the traces that are sent there; and opening the
  tracker, wherever that falls, since it goes on in a thread while the first steps are played;
- steps: from the end of the first step to the end of the last one. All that is spent on traces
  counts as steps, also what is sent at the end.

Two measures of the same thing, named before either was run:

1. The account: within a training with MLflow, the processor seconds of the tracker's threads, read
   from the clocks of these threads, and those of the training's thread within calls of the tracker.
   The share of the steps is these seconds over the other seconds of the process in the same steps.
   It has little noise, and misses what the threads cost others, such as waiting for Python's lock.
   Stated is the median of the rounds; **below 1 % is met if this median is below 0.01**.
2. The pairs: seconds of the steps with MLflow over those without it, as processor time and as wall
   time, the median of the pairs' ratios, with all of them. It misses nothing and has the noise of
   the machine. It contradicts the account if all of its ratios lie on one side of the account's.

The fixed seconds are printed beside, since they are a share only of a run whose length is known.
Then draws the panel and prints the share of a core that it takes.

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

from rich.console import Console

from gspo_env.tracking.live import _REFRESH
from gspo_env.tracking.panel import Numbers, Pace, Screen
from gspo_env.tracking.system import memory

_CHILD = """
import json, os, sys, threading, time
from functools import wraps
from gspo_agents.gspo import GSPOAgent
from gspo_agents.reporter import Reporter
from gspo_env.config import Config
from gspo_env.tracking.delivery import Delivery
from gspo_env.tracking.several import Several

tracker, steps, output = sys.argv[1], int(sys.argv[2]), sys.argv[3]
calls, own, marks, inside = 0.0, {"traces": 0.0, "open": 0.0}, [], threading.local()
threads = {}  # processor seconds of threads that have ended, or their clock
opening = {}  # clocks of threads that open a tracker now, and what they said when they began

def counted(cls, name, kind):
    work = getattr(cls, name)
    @wraps(work)
    def run(*given, **more):
        global calls
        outer, inside.it = getattr(inside, "it", False), True
        began, me = time.thread_time(), threading.get_ident()
        if kind == "open":
            opening[me] = time.pthread_getcpuclockid(me), began
        try:
            return work(*given, **more)
        finally:
            opening.pop(me, None)
            inside.it, spent = outer, time.thread_time() - began
            if kind:
                own[kind] += spent
            elif not outer:
                calls += spent
    setattr(cls, name, run)

def ran(self, work=Delivery._work):
    me = threading.get_ident()
    threads[me] = time.pthread_getcpuclockid(me)
    try:
        work(self)
    finally:
        threads[me] = time.thread_time()

def now():
    alive = [time.clock_gettime(t) if isinstance(t, int) else t for t in threads.values()]
    spent = os.times()
    return {
        "wall": time.monotonic(),
        "cpu": time.process_time() + spent.children_user + spent.children_system,
        "tracker": calls + sum(alive),
        **own,
        "open": own["open"] + sum(time.clock_gettime(t) - b for t, b in opening.values()),
    }

def played(self, *given, work=Reporter.played):
    work(self, *given)
    marks.append(now())

Delivery._work = ran
for name in ("log", "text", "artifact", "input", "finish"):
    counted(Several, name, "")
counted(Reporter, "_trace", "")
counted(Delivery, "_send_traces", "traces")
counted(Delivery, "_open", "open")
Reporter.played = played
recipe = {"demonstrations": 1000, "imitation_steps": 100}
config = Config.from_recipe(recipe=recipe, steps=steps, tracker=tracker, output=output)
began = time.monotonic()
GSPOAgent(config=config).train()
print(json.dumps({"first": marks[0], "last": marks[-1], "end": now(), "began": began}))
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
tracker = MLflow(traces=10**6, train_traces=10**6)
config = Config.from_recipe(
    recipe=recipe, steps=3, eval_every=0, eval_tasks=64, tracker=tracker, output="traces"
)
GSPOAgent(config=config).train()
print(json.dumps(found))
"""


def main() -> None:
    """Prints each training, the account and the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.traces:
        traces()
        return
    found: dict[str, list[dict[str, float]]] = {"none": [], "mlflow": []}
    for n in range(options.rounds):
        for tracker in list(found)[:: -1 if n % 2 else 1]:
            found[tracker].append(made := train(tracker, options.steps))
            shown = "  ".join(f"{name} {value:.3f}" for name, value in made.items())
            print(f"round {n}: {tracker:<6} {shown}", flush=True)
    step = middle(found["mlflow"], "tracker_steps") / (options.steps - 1)
    account = [one["tracker_steps"] / (one["cpu"] - one["in_steps"]) for one in found["mlflow"]]
    fixed = [one["tracker_fixed"] for one in found["mlflow"]]
    print(f"account: share of the steps {shown_all(account)}")
    print(f"account: a step costs {1e3 * step:.1f} ms")
    print(f"account: fixed CPU seconds {shown_all(fixed)}")
    for what in ("cpu", "wall", "fixed_cpu", "whole_cpu", "whole_wall"):
        pairs = zip(found["none"], found["mlflow"], strict=True)
        print(f"pairs: {what} of MLflow / none {shown_all([b[what] / a[what] for a, b in pairs])}")
    print(f"the panel, share of one core: {panel():.4f}")


def middle(found: list[dict[str, float]], name: str) -> float:
    """Returns the median of a value."""
    return statistics.median(one[name] for one in found)


def shown_all(values: list[float]) -> str:
    """Returns the median and all values."""
    return f"{statistics.median(values):.4f} of {', '.join(f'{v:.4f}' for v in sorted(values))}"


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


def train(tracker: str, steps: int) -> dict[str, float]:
    """Trains in a process of its own, in a folder of its own; returns seconds by name."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _CHILD, tracker, str(steps), "run"]
        env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=True
        )
    marks = json.loads(done.stdout.splitlines()[-1])
    first, last, end = marks["first"], marks["last"], marks["end"]
    late = end["traces"] - last["traces"]
    opening = last["open"] - first["open"]
    in_steps = last["tracker"] - first["tracker"] - opening
    cpu, wall = last["cpu"] - first["cpu"] - opening, last["wall"] - first["wall"]
    return {
        "cpu": cpu + late,
        "wall": wall,
        "in_steps": in_steps + late,
        "tracker_steps": in_steps + late + first["traces"],
        "tracker_fixed": end["tracker"] - in_steps - late - first["traces"],
        "late_traces": late,
        "fixed_cpu": end["cpu"] - cpu - late,
        "whole_cpu": end["cpu"],
        "whole_wall": end["wall"] - marks["began"],
    }


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
