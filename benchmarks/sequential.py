"""Coverage of the intervals and error rate of the sequential test, by simulation.

    python benchmarks/sequential.py [--repetitions 1000]

Paired differences are drawn from several distributions with a known mean, and pass through the code
of `gspo-env compare`. For each distribution, it prints

- fixed seeds: how often the 95 % interval of a mean paired difference contains the true mean, and
  the 95 % bootstrap interval of an arm's interquartile mean its true interquartile mean;
- `--until`: how often every interval, up to the last look, contains the true mean (claimed: 95 %),
  the interval at which the comparison stops, and how often a difference is claimed that is not
  there (claimed: at most 5 %);
- several arms: how often any of 4 equal arms is pruned.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np

from gspo_env.compare.sequential import Sequential, cannot_win, differences, tight
from gspo_env.compare.stats import interquartile_interval, paired_interval

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Draws scores with mean 0 and standard deviation about 1."""

SCORES: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-math.sqrt(3), math.sqrt(3), shape),
    "skewed (exponential)": lambda rng, shape: rng.exponential(1.0, shape) - 1,
    "heavy tails (t, 5 degrees)": lambda rng, shape: rng.standard_t(5, shape),
    "coarse (16 tasks, 70 % solved)": lambda rng, shape: (rng.binomial(16, 0.7, shape) - 11.2) / 2,
    "two modes (1 run in 5 fails)": lambda rng, shape: (rng.random(shape) < 0.8) * 2.0 - 1.6,
}
PLAN = Sequential(until=0.6, first=6, step=2, most=40)


def fixed(draw: Draw, seeds: int, repetitions: int, rng: np.random.Generator) -> float:
    """Returns the coverage of the interval of a paired difference."""
    inside = 0
    for _ in range(repetitions):
        ours, theirs = draw(rng, (2, seeds))
        low, high = paired_interval(ours - theirs)
        inside += low <= 0 <= high
    return inside / repetitions


def bootstrap(draw: Draw, seeds: int, repetitions: int, rng: np.random.Generator) -> float:
    """Returns the coverage of the bootstrap interval of an interquartile mean."""
    large = np.sort(draw(rng, (200_000,)))
    true = large[50_000:150_000].mean()
    low, high = interquartile_interval(draw(rng, (repetitions, seeds)))
    return float(np.mean((low <= true + 1e-9) & (true - 1e-9 <= high)))  # means are rounded


def sequential(draw: Draw, repetitions: int, rng: np.random.Generator) -> tuple[float, ...]:
    """Returns the simultaneous coverage, the coverage at the stop, wrong claims and mean seeds."""
    looks = PLAN.looks(1)
    always, at_stop, wrong, used = 0, 0, 0, 0
    for _ in range(repetitions):
        ours, theirs = draw(rng, (2, PLAN.most))
        found = [differences({"a": theirs, "b": ours}, PLAN, 1, n)[1] for n in looks]
        inside = [d.low <= 0 <= d.high for d in found]
        stop = next((i for i, d in enumerate(found) if tight([d], "a", "b", PLAN.until)), -1)
        always += all(inside)
        at_stop += inside[stop]
        wrong += not all(inside[: stop + 1] if stop >= 0 else inside)
        used += looks[stop]
    return always / repetitions, at_stop / repetitions, wrong / repetitions, used / repetitions


def several(draw: Draw, repetitions: int, rng: np.random.Generator) -> float:
    """Returns how often any of 4 equal arms is pruned."""
    pairs, pruned = 6, 0
    for _ in range(repetitions):
        arms = dict(zip("abcd", draw(rng, (4, PLAN.most)), strict=True))
        pruned += any(
            cannot_win(differences(arms, PLAN, pairs, n), keep="") for n in PLAN.looks(pairs)
        )
    return pruned / repetitions


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    count = parser.parse_args().repetitions
    rng = np.random.default_rng(0)
    sizes = (5, 8, 14, 30)
    error = 1.96 * math.sqrt(0.05 * 0.95 / count)
    print(f"{count} repetitions; a rate of 95 % is known to +- {100 * error:.1f} points\n")
    print("95 % interval of a mean paired difference, by seeds: coverage in %")
    for name, draw in SCORES.items():
        print(f"  {name:34}", *(f"{100 * fixed(draw, n, count, rng):6.1f}" for n in sizes))
    print("\n95 % bootstrap interval of an arm's interquartile mean, by seeds: coverage in %")
    for name, draw in SCORES.items():
        print(f"  {name:34}", *(f"{100 * bootstrap(draw, n, count, rng):6.1f}" for n in sizes))
    print(
        f"\n--until, {PLAN.first} to {PLAN.most} seeds: all intervals, interval at the stop, wrong "
        "claims (%), mean seeds; any of 4 equal arms pruned (%)"
    )
    for name, draw in SCORES.items():
        every, stop, wrong, used = sequential(draw, count, rng)
        pruned = several(draw, count, rng)
        print(
            f"  {name:34} {100 * every:6.1f} {100 * stop:6.1f} {100 * wrong:6.1f} {used:6.1f} "
            f"{100 * pruned:6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
