"""Rollout ahead of the learner, where tools are slow: steps an hour, success, and 64 in flight.

    python benchmarks/staleness.py flight           # some minutes; --episodes shortens it
    python benchmarks/staleness.py train            # about 2 hours; --steps and --scale shorten it

The tools are those of the default task, and each call in training takes a random time: log-normal
with a median of 100 ms and a 99th percentile of 5 s, times `--scale`. Demonstrations and
evaluations do not wait. `train` runs the default recipe with max_staleness 0 and 2 from the same
seeds, one process at a time, and prints steps an hour and the success at the end. `flight` keeps 64
episodes in flight and compares their rate with the bound of the slowest resource and with a loop
that takes all turns in lock-step. The resources are the engine, and the places, each of which an
episode holds for the time of its tools and of sampling without a queue. Exit code 1 where a bound
is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gspo_env.env.base import StepResult
from gspo_env.seeding import HELD_OUT
from gspo_envs.lookup import LookupEnv

MEDIAN, P99 = 0.1, 5.0
SIGMA = math.log(P99 / MEDIAN) / 2.3263
MEAN = MEDIAN * math.exp(SIGMA**2 / 2)
SCALE = "STALENESS_SCALE"
"""Environment variable: the factor of all times; absent, nothing waits."""
_times = random.Random(0)


class SlowLookup(LookupEnv):
    """The default task; a step of a training episode takes as long as a slow tool."""

    blocking = None

    def reset(self, **given: Any) -> Any:
        self.waits = float(os.environ.get(SCALE, 0)) * ((given.get("seed") or 0) < HELD_OUT)
        self.waited = 0.0
        return super().reset(**given)

    async def step(self, action: str) -> StepResult:
        if self.waits:
            seconds = self.waits * MEDIAN * math.exp(SIGMA * _times.gauss(0, 1))
            self.waited += seconds
            await asyncio.sleep(seconds)
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "waited": self.waited}


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("flight", "train", "one"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=70, help="of each training run")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the times of tools")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--episodes", type=int, default=1536, help="of `flight`")
    arguments = parser.parse_args()
    if arguments.what == "one":
        print("RESULT" + json.dumps(train_one(arguments)))
    elif arguments.what == "train":
        sys.exit(train(arguments))
    else:
        sys.exit(asyncio.run(flight(arguments.episodes, arguments.scale)))


def train(arguments: argparse.Namespace) -> int:
    """Trains with and without staleness on each seed; returns the exit code."""
    rows: dict[int, list[dict[str, float]]] = {0: [], arguments.staleness: []}
    for seed in range(arguments.seeds):
        for staleness, results in rows.items():
            results.append(child(arguments, seed, staleness))
            shown = ", ".join(f"{k} {v:.4g}" for k, v in results[-1].items())
            print(f"seed {seed}, max_staleness {staleness}: {shown}", flush=True)
    old, new = rows[0], rows[arguments.staleness]
    faster = [b["steps_an_hour"] / a["steps_an_hour"] for a, b in zip(old, new, strict=True)]
    gained = [b["success"] - a["success"] for a, b in zip(old, new, strict=True)]
    print(f"steps an hour: {statistics.median(faster):.2f} x ({min(faster):.2f} to ", end="")
    print(f"{max(faster):.2f}); success {statistics.mean(gained):+.3f} on average", end=" ")
    print(f"({min(gained):+.3f} to {max(gained):+.3f})")
    return int(statistics.median(faster) < 1.5)


def child(arguments: argparse.Namespace, seed: int, staleness: int) -> dict[str, float]:
    """Trains in a process of its own; returns its result."""
    flags = ["--seed", seed, "--staleness", staleness]
    flags += ["--steps", arguments.steps, "--scale", arguments.scale]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "one", *map(str, flags)],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        sys.exit(f"a run failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(lines[0].removeprefix("RESULT"))
    return found


def train_one(arguments: argparse.Namespace) -> dict[str, float]:
    """Trains the default recipe; returns the steps of an hour and the last success."""
    from gspo_agents import gspo
    from gspo_env.config import Config

    ends: list[float] = []

    class Timed(gspo.Reporter):
        def trained(self, *given: Any) -> None:
            ends.append(time.perf_counter())
            super().trained(*given)

    gspo.Reporter = Timed
    config = Config.from_recipe(
        "tiny",
        env=f"{Path(__file__).resolve()}:SlowLookup",
        seed=arguments.seed,
        steps=arguments.steps,
        eval_every=0,
        # measured with these
        recipe={"initializer_range": 0.02, "imitation_steps": 450},
        learner={"warmup_steps": 60, "max_grad_norm": 1.0},
        supply={"max_staleness": arguments.staleness},
        checkpoints={"keep": 0},
        tracker="none",
        output="run",
    )
    agent = gspo.GSPOAgent(config=config)
    os.environ[SCALE] = str(arguments.scale)
    history = agent.train()
    metrics = [m for _, m in history if "rollout/return" in m]
    return {
        "steps_an_hour": 3600 * (len(ends) - 1) / (ends[-1] - ends[0]),
        "success": history[-1][1]["eval/success"],
        "learner_idle": statistics.mean(m["time/learner_idle"] for m in metrics[1:]),
        "rollout_idle": statistics.mean(m["time/rollout_idle"] for m in metrics[1:]),
        "staleness": statistics.mean(m["rollout/staleness_mean"] for m in metrics),
        "dropped": sum(m["rollout/dropped_groups"] for m in metrics),
        "update_seconds": statistics.mean(m["time/update"] for m in metrics),
    }


PLACES = 64


async def flight(episodes: int, scale: float) -> int:
    """Compares three ways to keep episodes in flight; returns the exit code."""
    from common import make_player

    player = make_player()
    os.environ[SCALE] = "0"
    engine_rate, *_ = await ahead(player, episodes)
    os.environ[SCALE] = str(scale)
    rate, tools, sampling = await ahead(player, episodes)
    alone = await sampling_alone(player)
    slots_rate = PLACES / (tools + alone)
    print(
        f"an episode: tools {tools:.2f} s, sampling {sampling:.2f} s, {alone:.2f} s if it plays "
        f"alone; {PLACES} in flight"
    )
    print(f"bound of the places: {slots_rate:.1f} episodes/s, of the engine: {engine_rate:.1f}")
    share, most = rate / min(slots_rate, engine_rate), rate * tools / PLACES
    print(f"ahead of the learner: {rate:.1f} episodes/s, {share:.2f} of the lower bound ", end="")
    print(f"({most:.2f} of what the tools alone would allow)")
    slow = await lock_step(player, max(1, episodes // 512))
    print(f"lock-step: {slow:.2f} episodes/s; ahead is {rate / slow:.1f} x that")
    return int(share < 0.9 or rate < 3 * slow)


async def sampling_alone(player: Any) -> float:
    """Returns the seconds of sampling of an episode while no other one plays."""
    from gspo_env.types import Task

    os.environ[SCALE], scale = "0", os.environ[SCALE]
    collector = collector_of(player, engine_of(player), places=1)
    tasks = [Task(env_id="slow", seed=n) for n in range(16)]
    groups = await collector.collect(tasks, seed=0, group_size=1)
    await asyncio.to_thread(collector.pool.close)
    os.environ[SCALE] = scale
    played = [e for group in groups for e in group.episodes]
    return statistics.mean(sum(t.timing.generate for t in e.turns) for e in played)


def collector_of(player: Any, engine: Any, places: int = PLACES) -> Any:
    from common import LIMITS

    from gspo_env.rollout.collector import Collector, RolloutConfig
    from gspo_env.rollout.pool import EnvPool

    limits = RolloutConfig(concurrency=places, **LIMITS)
    return Collector(engine, player.chat, EnvPool(SlowLookup), limits)


def engine_of(player: Any) -> Any:
    from gspo_env.engines.transformers import TransformersEngine

    return TransformersEngine(player.model, max_slots=PLACES, max_context=512)


async def ahead(player: Any, episodes: int) -> tuple[float, float, float]:
    """Takes batches as fast as a supply gives them.

    Returns:
        Episodes a second while all places are taken, and the seconds of tools and of sampling of
        an episode.
    """
    from gspo_env.config import Config
    from gspo_env.rollout.settings import SupplyConfig
    from gspo_env.training.supply import Supply
    from gspo_env.types import Task

    collector, batch = collector_of(player, engine_of(player)), 8
    steps = max(4, episodes // (8 * batch))
    config = Config(
        steps=steps,
        tasks_per_step=batch,
        rollout=collector.config,
        supply=SupplyConfig(max_staleness=steps),  # the places are the limit, not the age
    )

    def draw(step: int) -> list[Task]:
        return [Task(env_id="slow", seed=1000 * step + place) for place in range(batch)]

    supply = Supply(config, collector, draw, lambda group: False)
    gate, full = supply._gate, []
    release = gate.release

    def noted() -> None:
        if gate.running == PLACES:
            full.append(time.perf_counter())
        release()

    gate.release = noted  # type: ignore[method-assign]
    groups = []
    try:
        for step in range(1, config.steps + 1):
            groups += (await supply.take()).groups
            await collector.update_in_flight((), step)
            supply.advance(step)
    finally:
        await supply.close()
        await asyncio.to_thread(collector.pool.close)
        collector.engine.close()
    played = [e for group in groups for e in group.episodes]
    tools = statistics.mean(e.turns[-1].info.extra["waited"] for e in played if e.turns)
    sampling = statistics.mean(sum(t.timing.generate for t in e.turns) for e in played)
    return (len(full) - 1) / (full[-1] - full[0]), tools, sampling


class LockStep:
    """An engine that samples the actions of all living episodes together, once all have stepped."""

    def __init__(self, engine: Any, episodes: int) -> None:
        self.engine, self.living, self.waiting = engine, episodes, 0
        self.turn = asyncio.Event()

    async def generate(self, *given: Any) -> Any:
        self.waiting += 1
        turn = self.turn
        self.look()
        await turn.wait()
        return await self.engine.generate(*given)

    def look(self) -> None:
        if self.waiting == self.living:
            self.waiting = 0
            self.turn.set()
            self.turn = asyncio.Event()

    def release(self, session: str) -> None:
        self.living -= 1
        self.look()
        self.engine.release(session)


async def lock_step(player: Any, batches: int) -> float:
    """Plays batches of `PLACES` episodes turn by turn; returns episodes a second."""
    from gspo_env.types import Task

    collector = collector_of(player, engine_of(player))
    started = time.perf_counter()
    for n in range(batches):
        collector.engine = LockStep(engine_of(player), PLACES)
        tasks = [Task(env_id="slow", seed=10 * n + place) for place in range(PLACES // 8)]
        await collector.collect(tasks, seed=n)
    seconds = time.perf_counter() - started
    await asyncio.to_thread(collector.pool.close)
    return batches * PLACES / seconds


if __name__ == "__main__":
    main()
