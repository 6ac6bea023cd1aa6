r"""Trains for many steps with an environment that fails, and watches what must not grow.

    python stress/soak.py --steps 2000 --hidden 64 --demonstrations 400 --imitation-steps 150
    python stress/soak.py --steps 30 --tasks 16 --group 8
    python stress/soak.py --steps 30 --tasks 16 --group 8 --faults 0.2 --hangs 0.02 \
        --timeout 3 --retries 60 --concurrency 64 --lengths 64
    python stress/soak.py --steps 2 --tasks 2 --group 2 --faults 0.1 --isolation process \
        --demonstrations 8 --imitation-steps 10 --eval-tasks 2

Prints resident memory, open files, threads and children by quarter of the run, and the success
before and after. With failures, compares those that the environments logged with those that the
run counted, environment by environment: one of a pool fails once and leaves it. `--lengths` then
plays tasks with and without failures, and prints by their length which episodes are lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.registration import Member
from gspo_env.rollout.failures import FaultLog
from gspo_env.rollout.pool import EnvPool, make_member
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Episode, Fault, StopReason, Task

SAMPLES = "GSPO_SOAK_SAMPLES"
COUNTS = ("env_errors", "env_timeouts", "retried", "lost_episodes")
EXPECTED = {
    "exception": StopReason.ERROR,
    "exit": StopReason.ERROR,
    "nan": StopReason.INVALID,
    "type": StopReason.INVALID,
    "long": StopReason.INVALID,
    "hang": StopReason.ENV_TIMEOUT,
    "crash": StopReason.CRASH,
}
"""What the run has to count for each kind of failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A tracker that notes at each step what the process holds."""

    how_to_look = ""

    def start(self, run: object) -> Sampler:
        """Returns itself."""
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds a line."""
        process = psutil.Process()
        line = {
            "step": step,
            "resident": process.memory_info().rss,
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "children": len(process.children(recursive=True)),
        }
        with Path(os.environ[SAMPLES]).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def text(self, name: str, text: str) -> None:
        """Does nothing."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Does nothing."""

    def finish(self, status: str, reason: str) -> None:
        """Does nothing."""


class Attempts(FaultLog):
    """Notes the environment of each failed attempt, and the reason that was counted."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.leaving = ""
        self.failed: list[tuple[str, StopReason]] = []
        """The name is empty where the environment could not be made."""

    def note(self, task: Task, fault: Fault) -> None:
        """Counts a failure."""
        self.failed.append((self.leaving, fault.reason))
        self.leaving = ""
        super().note(task, fault)


class Pool(EnvPool):
    """Tells `Attempts` which environment leaves."""

    async def _new(self, timeout: float | None) -> TextEnvironment:
        env = await super()._new(timeout)
        if isinstance(env, IsolatedEnv):
            name = f"{env._process.pid}.1"  # type: ignore[union-attr]
        else:
            name = attribute(env, "name", "")
        self.faults.names[id(env)] = name  # type: ignore[attr-defined]
        return env

    def _discard(self, env: TextEnvironment, stuck: bool) -> None:
        self.faults.leaving = self.faults.names[id(env)]  # type: ignore[attr-defined]
        super()._discard(env, stuck)


class Agent(GSPOAgent):
    """Keeps what its last pool counted."""

    attempts = Attempts()
    _calm = False

    @classmethod
    def _make_env(cls, member: Member, limits: RolloutConfig) -> TextEnvironment:
        """The first environment plays the demonstrations, where a hang of a thread ends the run."""
        env = make_member(member, limits)
        if not cls._calm and env.has_wrapper_attr("_rates"):
            env.get_wrapper_attr("_rates")["hang"] = 0.0
        cls._calm = True
        return env

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.environments.pool = self._pool  # type: ignore[assignment,method-assign]

    @contextmanager
    def _pool(self) -> Iterator[EnvPool]:
        self.attempts = Attempts()
        ((env_id, env),) = self.environments.envs.items()
        make = partial(self._make_env, self.environments.members[env_id], self.config.rollout)
        pool = Pool(make, env, faults=self.attempts)
        try:
            yield pool
        finally:
            pool.close()


def options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="gspo/Lookup-v0", help="also one of your own")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tasks", type=int, default=4, help="tasks of a step")
    parser.add_argument("--group", type=int, default=4, help="episodes of a task")
    parser.add_argument("--faults", type=float, default=0.0, help="share of the calls that fail")
    parser.add_argument("--hangs", type=float, default=1 / 6, help="share of hangs among them")
    parser.add_argument("--seed", type=int, default=1, help="seed of the failures")
    parser.add_argument("--isolation", choices=("thread", "process"), default="thread")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds of an episode")
    parser.add_argument("--retries", type=int, default=20)
    parser.add_argument("--tracker", default="mlflow")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--demonstrations", type=int, default=4000)
    parser.add_argument("--imitation-steps", type=int, default=450)
    parser.add_argument("--eval-tasks", type=int, default=128)
    parser.add_argument("--lengths", type=int, default=0, help="tasks to play after the training")
    return parser.parse_args()


def rates(arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the share of the calls that fail, by kind."""
    kinds = [kind for kind in EXPECTED if kind != "hang"]
    if arguments.isolation == "thread":
        kinds.remove("crash")
    hangs = arguments.faults * arguments.hangs
    return {kind: (arguments.faults - hangs) / len(kinds) for kind in kinds} | {"hang": hangs}


def make_config(arguments: argparse.Namespace, folder: Path) -> Config:
    """Returns the settings of the training."""
    env, kwargs = arguments.env, {}
    if arguments.faults:
        env = f"{Path(__file__).with_name('faulty.py')}:Faulty"
        # a thread that hangs cannot be ended, so it hangs a little longer than an episode only
        hang = 3600.0 if arguments.isolation == "process" else arguments.timeout + 2.0
        kwargs = {
            "env": arguments.env,
            "rates": rates(arguments),
            "hang": hang,
            "seed": arguments.seed,
        }
        kwargs["log"] = str(folder / "faults.log")
    return Config.from_recipe(
        env=env,
        env_kwargs=kwargs,
        steps=arguments.steps,
        tasks_per_step=arguments.tasks,
        eval_every=0,
        eval_tasks=arguments.eval_tasks,
        output=str(folder / "run"),
        tracker=",".join(filter(None, (arguments.tracker, f"{__file__}:Sampler"))),
        rollout={
            "group_size": arguments.group,
            "isolation": arguments.isolation,
            "episode_timeout": arguments.timeout,
            "max_retries": arguments.retries,
            "max_env_error_rate": 0.9,
            "concurrency": arguments.concurrency,
        },
        # measured with this norm and these weights
        learner={"warmup_steps": min(20, arguments.steps // 4), "max_grad_norm": 1.0},
        recipe={
            "hidden_size": arguments.hidden,
            "demonstrations": arguments.demonstrations,
            "imitation_steps": arguments.imitation_steps,
            "initializer_range": 0.02,
        },
    )


def read_log(folder: Path) -> list[tuple[str, str]]:
    """Returns kind and environment of each failure in the log."""
    log = folder / "faults.log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(kind, name) for kind, name in lines if kind != "made"]


def print_counts(
    log: list[tuple[str, str]], attempts: list[tuple[str, StopReason]], counted: float
) -> bool:
    """Compares each failure in the log with the attempt of the same environment.

    Returns:
        Whether each is counted for what it is.
    """
    reasons = {name: reason for name, reason in attempts if name}
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, name in log:
        rows[kind]["injected"] += 1
        reason = reasons.pop(name, None)
        rows[kind]["as expected" if reason is EXPECTED[kind] else str(reason or "not counted")] += 1
    for reason in reasons.values():
        rows["(not injected)"][str(reason)] += 1
    for reason in (reason for name, reason in attempts if not name):
        rows["(not made)"][str(reason)] += 1
    print("kind            injected  counted for the same environment")
    for kind, row in rows.items():
        outcomes = ", ".join(f"{n} {what}" for what, n in row.items() if what != "injected")
        print(f"{kind:14}  {row['injected']:8}  {outcomes}")
    print(
        f"all             {len(log):8}  {len(attempts)} failed attempts, {counted:.0f} in metrics"
    )
    return counted == len(attempts) and all(
        row["as expected"] == row["injected"] for kind, row in rows.items() if kind in EXPECTED
    )


def print_quarters(folder: Path) -> bool:
    """Prints what the process held; returns whether it held no more in the last quarter."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    print("quarter  resident MiB  files  threads  children  (medians)")
    quarters = [
        {key: float(np.median([line[key] for line in quarter])) for key in quarter[0]}
        for quarter in np.array_split(lines, 4)
    ]
    for number, held in enumerate(quarters, 1):
        print(
            f"{number:7}  {held['resident'] / 2**20:12.1f}  {held['files']:5.0f}"
            f"  {held['threads']:7.0f}  {held['children']:8.0f}"
        )
    second, last = quarters[1], quarters[3]
    grown = {key for key in ("files", "threads", "children") if last[key] > second[key] + 8}
    return not grown and last["resident"] < 1.1 * second["resident"]


def play(agent: GSPOAgent, tasks: int, size: int) -> list[Episode]:
    """Plays the same tasks with the same random numbers."""
    every = [Task(env_id=agent.env_id, seed=n) for n in range(tasks)]
    with agent._collector() as collector:
        groups = asyncio.run(collector.collect(every, seed=0, group_size=size))
    return [episode for group in groups for episode in group.episodes]


def print_lengths(agent: Agent, arguments: argparse.Namespace) -> None:
    """Plays with and without failures; prints by length what is lost, and how far means move."""
    config = replace(agent.config, env=arguments.env, env_kwargs={})
    whole = play(
        GSPOAgent(agent.model, config=config, tokenizer=agent.tokenizer), arguments.lengths, 8
    )
    failing = play(agent, arguments.lengths, 8)
    print("turns  episodes  attempts of each  lost")
    lengths = np.array([len(e.turns) for e in whole])
    attempts = np.array([len(e.faults) + (not e.failed) for e in failing])
    lost = np.array([e.failed for e in failing])
    for length in sorted(set(lengths)):
        rows = lengths == length
        print(f"{length:5}  {rows.sum():8}  {attempts[rows].mean():16.1f}  {lost[rows].sum():4}")
    for name, episodes in (("without", whole), ("with", [e for e in failing if not e.failed])):
        turns = np.mean([len(e.turns) for e in episodes])
        success = np.mean([bool(e.success) for e in episodes])
        print(
            f"{name} failures: {len(episodes)} episodes, {turns:.3f} turns, {success:.1%} success"
        )
    same = [actions(a) == actions(b) for a, b in zip(whole, failing, strict=True) if not b.failed]
    print(f"{np.mean(same):.1%} of the episodes are those without failures, token by token")


def actions(episode: Episode) -> list[tuple[int, ...]]:
    """Returns the sampled tokens."""
    return [turn.action_ids for turn in episode.turns]


def curve(history: list[tuple[int, dict[str, float]]]) -> str:
    """Returns the success of the training episodes by tenth of the run."""
    values = [metrics["rollout/success"] for _, metrics in history if "rollout/success" in metrics]
    parts = np.array_split(values, min(10, len(values)))
    return " ".join(f"{np.mean(part):.0%}" for part in parts)


def main() -> int:
    """Runs the training and prints the figures; returns 1 if one of them is wrong."""
    arguments = options()
    folder = Path(tempfile.mkdtemp(prefix="gspo-soak-"))
    os.environ[SAMPLES] = str(folder / "samples.jsonl")
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    started = time.perf_counter()
    agent = Agent(config=make_config(arguments, folder))
    agent.split()  # plays too; what follows is what the metrics count
    before = len(read_log(folder))
    history: Any = agent.train()
    print(f"{arguments.steps} steps in {time.perf_counter() - started:.0f} s, in {folder}")
    # a short run is still warming up, and threads that hang stay
    is_long, hangs = arguments.steps >= 100, arguments.faults and arguments.hangs
    right = print_quarters(folder) or not is_long or bool(hangs)
    success = [metrics["eval/success"] for _, metrics in history if "eval/success" in metrics]
    print(f"success {success[0]:.1%} before, {success[-1]:.1%} after; in training {curve(history)}")
    counted = {
        name: sum(m.get(f"{kind}/{name}", 0.0) for _, m in history for kind in ("rollout", "eval"))
        for name in COUNTS
    }
    print("counted: " + ", ".join(f"{name} {value:.0f}" for name, value in counted.items()))
    if arguments.faults:
        failures = counted["env_errors"] + counted["env_timeouts"]
        right &= print_counts(read_log(folder)[before:], agent.attempts.failed, failures)
    waits = [metrics.get("rollout/stop/timeout", 0.0) for _, metrics in history]
    cut = arguments.tasks * arguments.group * sum(waits)
    print(f"cut by the clock while the policy was waiting: {cut:.0f} episodes")
    if arguments.faults and arguments.lengths:
        print_lengths(agent, arguments)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
