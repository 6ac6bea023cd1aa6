"""Reads the results of a comparison: `python examples/read_comparison.py comparisons/comparison`.

The page of a comparison, `report.html`, shows the same runs. Each run's folder has its metrics.
"""

import json
import sys
from pathlib import Path

import numpy as np

from gspo_env.compare.stats import paired_interval


def curves(folder, metric):
    """The values of a metric by problem, arm and seed, of the runs that did not fail."""
    series = {}
    for result in sorted(Path(folder).glob("runs/*/*/*/result.json")):
        tree = json.loads(result.read_text())
        problem, arm, seed = result.parts[-4:-1]
        values = [metrics[metric] for _, metrics in tree["history"] if metric in metrics]
        if values and not tree["error"]:
            series.setdefault(problem, {}).setdefault(arm, {})[seed] = values
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
