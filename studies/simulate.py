"""Predicts throughput and idle time of a run from the times of its parts, without playing it.

    python studies/simulate.py                                      # the sizes of the docs
    python studies/simulate.py --episodes 10000 --servers 16 --batch 128 --staleness 2
    python studies/simulate.py --check          # against real rollouts here, some minutes

`queueing.py` has the simulation. Actions have geometric lengths, and tools log-normal times. Exit
code 1 if `--check` finds a median that is more than 15 % off.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from queueing import System, Turn, simulate

Z99 = 2.3263478740408408
"""The 99 % quantile of the standard normal distribution."""


def log_normal(median: float, p99: float) -> tuple[float, float]:
    """Returns the mean and the standard deviation of the logarithm of tool times."""
    return math.log(median), math.log(p99 / median) / Z99


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Episodes with a geometric length of actions and log-normal tools."""

    turns: int = 4
    tokens: float = 200.0
    """Mean tokens of an action."""
    prompt: int = 100
    """New tokens before an action."""
    median: float = 0.1
    """Median seconds of a tool."""
    p99: float = 5.0
    seed: int = 0

    def source(self) -> Callable[[], list[Turn]]:
        """Returns a function that draws the turns of the next episode."""
        rng = np.random.default_rng(self.seed)
        mean, sigma = log_normal(self.median, self.p99)

        def draw() -> list[Turn]:
            tokens = rng.geometric(1 / self.tokens, self.turns).tolist()
            tools = rng.lognormal(mean, sigma, self.turns).tolist()
            return [Turn(self.prompt, n, t) for n, t in zip(tokens, tools, strict=True)]

        return draw

    @property
    def tool(self) -> float:
        """Mean seconds of a tool."""
        mean, sigma = log_normal(self.median, self.p99)
        return math.exp(mean + sigma**2 / 2)


def bounds(system: System, load: Workload) -> dict[str, float]:
    """Returns the largest rate of episodes that each resource alone allows, per second."""
    times, slots = system.step_times(), system.slots
    turn = load.tokens * times[slots] / slots + system.prefill * load.prompt
    turn += system.host * system.embedded
    alone = load.tokens * times[1] + system.prefill * load.prompt + system.host + load.tool
    found = {
        "servers": system.servers / (load.turns * turn),
        "episodes in flight": system.concurrency / (load.turns * alone),
    }
    if system.host and not system.embedded:
        found["controller"] = 1 / (load.turns * system.host)
    if system.update:
        found["trainer"] = system.batch * system.group / system.update
    return found


SIZES: dict[str, System] = {
    "one GPU": System(
        step={1: 0.006, 64: 0.009, 256: 0.018},
        **{"prefill": 2e-5, "host": 1e-3, "servers": 1, "slots": 256, "concurrency": 256},
        **{"batch": 32, "group": 8, "update": 20.0, "sync": 1.0},
    ),
    "one node of eight": System(
        step={1: 0.006, 64: 0.009, 256: 0.018},
        **{"prefill": 2e-5, "host": 1e-3, "servers": 6, "slots": 256, "concurrency": 1536},
        **{"batch": 64, "group": 16, "staleness": 1, "update": 20.0, "sync": 1.0},
    ),
    "four nodes with Ray": System(
        step={1: 0.006, 64: 0.009, 256: 0.018},
        **{"prefill": 2e-5, "host": 1e-3 / 64, "servers": 24, "slots": 512},
        **{"concurrency": 10_000, "batch": 128, "group": 16, "staleness": 2},
        **{"update": 10.0, "sync": 2.0},
    ),
}
"""Sizes of `docs/engines.md`. The times are assumptions, not measurements; the controller's is
that of one process, which 64 workers share."""


def show(name: str, system: System, load: Workload, episodes: int) -> None:
    """Simulates and prints one size."""
    started = time.perf_counter()
    result = simulate(system, load.source(), episodes)
    seconds = time.perf_counter() - started
    limits = bounds(system, load)
    slowest = min(limits, key=lambda resource: limits[resource])
    ages = result.staleness or (0,)
    print(
        f"{name}: {result.rate:.2f} episodes/s, {result.tokens / result.seconds:,.0f} tokens/s, "
        f"{result.rate / limits[slowest]:.2f} of the bound of the {slowest}\n"
        f"    idle: servers {result.servers_idle:.0%}, trainer {result.trainer_idle:.0%}; "
        f"{result.in_flight:,.0f} episodes in flight; staleness {np.mean(ages):.2f}, at most "
        f"{max(ages)}; {result.updates} updates in {result.seconds:,.0f} s, simulated in "
        f"{seconds:.1f} s"
    )


def options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with real rollouts here")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of --check")
    parser.add_argument("--episodes", type=int, default=0, help="episodes in flight")
    for name in ("servers", "slots", "batch", "group", "staleness"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("update", "sync", "host", "prefill"):
        parser.add_argument(f"--{name}", type=float, help="seconds")
    for name in ("turns", "tokens", "prompt", "median", "p99", "seed"):
        kind = type(getattr(Workload(), name))
        parser.add_argument(f"--{name}", type=kind, default=getattr(Workload(), name))
    return parser.parse_args()


def main() -> None:
    """Prints the predictions of three sizes, or of one, or compares them with real rollouts."""
    chosen = options()
    if chosen.check:
        from simulate_check import check

        sys.exit(not check(chosen.rounds))
    names = ("turns", "tokens", "prompt", "median", "p99", "seed")
    load = Workload(**{name: getattr(chosen, name) for name in names})
    names = ("servers", "slots", "batch", "group", "staleness", "update", "sync", "host", "prefill")
    given = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    if not given and not chosen.episodes:
        for name, system in SIZES.items():
            show(name, system, load, 12 * system.batch * system.group)
        return
    given |= {"concurrency": chosen.episodes} if chosen.episodes else {}
    system = replace(SIZES["four nodes with Ray"], **given)
    show("as given", system, load, max(12 * system.batch * system.group, 3 * system.concurrency))


if __name__ == "__main__":
    main()
