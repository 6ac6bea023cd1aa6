"""How often the intervals of `gspo-env compare` contain the truth, and how often a report is wrong.

    python studies/coverage.py [--reports 1000] [--samples 4000]

The last table is of `gspo-env evaluate --samples`: the lowest share of intervals of a success rate
that contain it, over rates of 2 to 98 % and tasks that differ not at all to nearly wholly.

A report without any difference has 4 problems with 3 arms against the first, and 8 or 10 seeds.
Its arms have one shape each time, and then the mean of the first, but another shape. With
`--sequential`, only the test of `gspo-env compare --sequential` is simulated: of 3 arms without a
difference, how often a report claims one, and how often the intervals contain the truth.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import trim_mean

from gspo_env.compare import stats
from gspo_env.runs.evaluations import success_interval

Draw = Callable[[np.random.Generator, tuple[int, ...]], Any]


def two_kinds(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """A quarter of the seeds learns nothing."""
    low, high = rng.normal(0.2, 0.1, shape), rng.normal(0.5, 0.05, shape)
    return np.where(rng.random(shape) < 0.25, low, high)


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape),
    "lognormal": lambda rng, shape: rng.lognormal(0, 0.75, shape),
    "beta(8, 2)": lambda rng, shape: rng.beta(8, 2, shape),
    "64 tasks": lambda rng, shape: rng.binomial(64, rng.beta(20, 5, shape)) / 64,
    "two kinds": two_kinds,
}
"""Scores of a seed, by name."""


def coverage(draw: Draw, seeds: int, samples: int) -> float:
    """Returns the share of intervals that contain the interquartile mean of the distribution."""
    rng = np.random.default_rng(seeds)
    truth = trim_mean(draw(rng, (1_000_000,)), 0.25)
    hits = 0
    for start in range(0, samples, 500):
        low, high = stats.interquartile_interval(
            draw(rng, (500, seeds)), resamples=1000, seed=start
        )
        hits += int(np.sum((low <= truth) & (truth <= high)))
    return hits / samples


def paired_coverage(draw: Draw, seeds: int, samples: int) -> float:
    """Returns the share of intervals of the paired difference that contain 0."""
    differences = np.subtract(*draw(np.random.default_rng(seeds), (2, samples, seeds)))
    bounds = [stats.paired_interval(row) for row in differences]
    return float(np.mean([low <= 0 <= high for low, high in bounds]))


def collapses(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """A run of ten collapses, and the mean is still that of `wrong_shapes`' first arm."""
    return np.where(rng.random(shape) < 0.1, 0.0, rng.normal(0.5 / 0.9, 0.05, shape))


def wrong_shapes(draw: Draw, seeds: int, reports: int, arms: int) -> float:
    """Returns how often arms of another shape than the first, but of its mean, are called other."""
    rng, wrong = np.random.default_rng(seeds), 0
    for _ in range(reports):
        first = rng.normal(0.5, 0.05, seeds)
        tests = [stats.paired_permutation_test(draw(rng, (seeds,)), first) for _ in range(arms)]
        wrong += min(stats.holm(tests)) <= 0.05
    return wrong / reports


def sequential(draw: Draw, seeds: int, reports: int, arms: int = 3) -> tuple[float, float, float]:
    """Simulates sequential comparisons of equal arms.

    Returns:
        The share of reports with a false claim, that of intervals that contain 0 where the
        comparison ends, and the mean seeds it takes.
    """
    rng, looks = np.random.default_rng(seeds), stats.looks_of(seeds)
    wrong = covered = taken = 0
    for _ in range(reports):
        first, *others = draw(rng, (arms + 1, seeds))
        for look in looks:
            differences = [(other - first)[:look] for other in others]
            bounds = [stats.sequential_interval(row, looks) for row in differences]
            tests = [stats.sequential_test(row, looks, 0.05 / arms)[0] for row in differences]
            outside = [low > 0 or high < 0 for low, high in bounds]
            claims = [p * arms <= 0.05 and out for p, out in zip(tests, outside, strict=True)]
            if all(claims):
                break
        wrong, covered, taken = wrong + any(claims), covered + outside.count(False), taken + look
    return wrong / reports, covered / reports / arms, taken / reports


def wrong_reports(seeds: int, reports: int, problems: int = 4, arms: int = 3) -> float:
    """Returns the share of reports without a difference that claim one."""
    rng, wrong = np.random.default_rng(seeds), 0
    for _ in range(reports):
        scores = rng.beta(8, 2, (problems, arms + 1, seeds))
        tests = [stats.paired_permutation_test(a, one[0]) for one in scores for a in one[1:]]
        wrong += min(stats.holm(tests)) <= 0.05
    return wrong / reports


RATES = (0.02, 0.1, 0.3, 0.5, 0.9, 0.98)
ALIKE = (0.0, 0.2, 0.5, 0.8)
"""Correlations of two samples of a task."""


def success_coverage(
    tasks: int, each: int, rate: float, alike: float, samples: int, seed: int = 0
) -> float:
    """Returns the share of intervals that contain the rate of success.

    Args:
        tasks: Tasks of an evaluation, whose own rates are from a beta distribution.
        each: Samples of a task.
        rate: The mean of the tasks' rates.
        alike: The correlation of two samples of a task.
        samples: Number of evaluations.
        seed: Seed of their draws.
    """
    rng = np.random.default_rng(seed)
    spread = 1 / alike - 1 if alike else 0.0
    hits = 0
    for _ in range(samples):
        own = rng.beta(rate * spread, (1 - rate) * spread, tasks) if alike else rate
        low, high = success_interval(np.reshape(own, (-1, 1)) > rng.random((each, tasks)).T)
        hits += low <= rate <= high
    return hits / samples


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--reports", type=int, default=1000)
    parser.add_argument("--sequential", action="store_true")
    options = parser.parse_args()
    if options.sequential:
        print(f"{'sequential, seeds':20}  false  intervals  seeds")
        for seeds, (name, draw) in itertools.product((8, 12), DISTRIBUTIONS.items()):
            wrong, covered, taken = sequential(draw, seeds, options.reports)
            print(f"{name:16} {seeds:3}  {wrong:6.1%} {covered:10.1%} {taken:6.1f}", flush=True)
        return
    for title, function in (
        ("interquartile mean", coverage),
        ("paired difference", paired_coverage),
    ):
        print(f"{title:20}", *(f"{seeds:5}" for seeds in range(5, 15)))
        for name, draw in DISTRIBUTIONS.items():
            shares = (function(draw, seeds, options.samples) for seeds in range(5, 15))
            print(f"{name:20}", *(f"{100 * share:5.1f}" for share in shares), flush=True)
    sizes = (2, 4, 16)
    print(f"{'success, samples:':20}", *(f"{each:5}" for each in sizes))
    for tasks in (4, 8, 16, 64, 256):
        cases = [[(tasks, n, *case) for case in itertools.product(RATES, ALIKE)] for n in sizes]
        lowest = [min(success_coverage(*case, options.reports) for case in row) for row in cases]
        print(
            f"{tasks:<4} tasks".ljust(20), *(f"{100 * share:5.1f}" for share in lowest), flush=True
        )
    for seeds in (8, 10):
        share = wrong_reports(seeds, options.reports)
        print(f"reports with a false claim, {seeds} seeds: {100 * share:.1f} %", flush=True)
    for arms, seeds in itertools.product((1, 3), (8, 10, 16)):
        share = wrong_shapes(collapses, seeds, options.reports, arms)
        print(
            f"{arms} arms of the same mean that collapse in a tenth of the runs, {seeds} seeds: "
            f"called other in {share:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
