"""Reads the results of a comparison: `python examples/read_comparison.py comparisons/comparison`.

The page of a comparison, `report.html`, shows the same runs.
"""

import sys
from pathlib import Path

import numpy as np

from gspo_env.compare.stats import paired_interval
from gspo_env.runs import Run


def curves(folder, metric):
    """The values of a metric by problem, arm and seed, of the runs that are finished."""
    series = {}
    for file in sorted(Path(folder).glob("runs/*/*/*/metrics.jsonl")):
        run = Run.open(file.parent)
        problem, arm, seed = file.parts[-4:-1]
        if run.finished and not run.failure and metric in run.series:
            series.setdefault(problem, {}).setdefault(arm, {})[seed] = run.series[metric].values
    return series


def main(folder, metric="rollout/success"):
    for problem, arms in curves(folder, metric).items():
        first = next(iter(arms))
        for arm, runs in arms.items():
            means = np.array([np.mean(values) for values in runs.values()])
            print(f"{problem}, {arm}: mean {means.mean():.3f} over {len(means)} seeds", end="")
            others = np.array([np.mean(arms[first][seed]) for seed in runs if seed in arms[first]])
            if arm != first and len(others) == len(means) > 1:
                low, high = paired_interval(means - others)
                print(f", {low:+.3f} to {high:+.3f} against {first}", end="")
            print()


if __name__ == "__main__":
    main(*sys.argv[1:])
