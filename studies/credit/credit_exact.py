"""Compares the policy gradient of every estimator with the true gradient, on tabular problems.

    python studies/credit/credit_exact.py [picture.png]

For each problem and number of turns, it prints

- the cosine between the mean estimate and the true gradient (below 1 is a bias in direction),
- the bias as a fraction of the true gradient, at the best scale,
- the noise of one group of 8, divided by the length of the mean estimate.

The first part is on policy, with and without division by the standard deviation of the group;
`losses_exact.py` has the losses, also off policy. The last part counts the episodes that plain
policy gradient needs to reach 90 % of the best return. It uses the additive problem, with the best
step size of each estimator.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from gspo_env.credit import ReturnsToGo
from gspo_env.registry import BUILTIN, find

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.exact import (
    Analysis,
    additive,
    analyse,
    episodes_to_target,
    key_and_door,
    may_stop,
)

PROBLEMS = {"additive": additive, "key and door": key_and_door, "may stop": may_stop}
TURNS = (1, 2, 4, 8)
GROUPS = 2000


def estimators(scale: str):
    """Returns the six estimators, and one with credit for the immediate reward only."""
    names = sorted(
        {*BUILTIN["advantage"]} - {"by_agent", "distillation", "parts"}
    )  # those have other rewards
    made = {name: find("advantage", name)(scale=scale) for name in names}
    made["immediate only"] = ReturnsToGo(gamma=0.0, scale=scale)
    return made


def show(label: str, results: list[Analysis]) -> None:
    cells = "  ".join(f"{a.cosine:6.3f} {a.bias:6.3f} {a.noise:6.2f}" for a in results)
    print(f"  {label:38} {cells}")


def on_policy() -> dict[tuple[str, str], list[Analysis]]:
    """Measures bias and noise on policy, by problem, estimator, scale and number of turns."""
    kept = {}
    for problem, make in PROBLEMS.items():
        turns = [k for k in TURNS if problem != "key and door" or k > 1]
        print(f"\n{problem}: cosine, bias and noise at {', '.join(map(str, turns))} turns")
        for scale in ("none", "std"):
            for name, estimator in estimators(scale).items():
                results = [analyse(make(k), estimator, groups=GROUPS) for k in turns]
                show(f"{name}, scale {scale}", results)
                if scale == "none":
                    kept[problem, name] = results
    return kept


def speed() -> None:
    """Counts the episodes to the target with `outcome` and `returns_to_go`, by number of turns."""
    print("\nadditive: median episodes to 90 % of the best return over 5 seeds, best step size")
    for turns in (2, 4, 8, 16):
        best = {}
        for name in ("outcome", "returns_to_go"):
            trials = {}
            for size in (8.0, 16.0, 32.0, 64.0, 128.0, 256.0):
                runs = [
                    episodes_to_target(
                        additive(turns),
                        find("advantage", name)(scale="std"),
                        step_size=size,
                        seed=s,
                        limit=4000,
                    )
                    for s in range(5)
                ]
                trials[size] = statistics.median(runs)
            size = min(trials, key=lambda k: trials[k])
            best[name] = trials[size]
            print(f"  {turns:2} turns  {name:14} {best[name]:6.0f}  (step size {size:g})")
        print(f"     ratio {best['outcome'] / best['returns_to_go']:.2f}")


def draw(kept: dict[tuple[str, str], list[Analysis]], path: str) -> None:
    """Draws bias (top) and noise (bottom), with one column for each problem."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=100, layout="constrained")
    axes = figure.subplots(2, len(PROBLEMS), sharex=True, sharey="row")
    for column, problem in enumerate(PROBLEMS):
        for n, name in enumerate(estimators("none")):
            results = kept[problem, name]
            turns = TURNS[-len(results) :]
            for row, values in enumerate(([a.bias for a in results], [a.noise for a in results])):
                style = {"color": f"C{n}", "marker": "o", "markersize": 4, "label": name}
                axes[row][column].plot(turns, values, **style)
        axes[0][column].set_title(problem, loc="left")
        axes[1][column].set_xlabel("turns")
        axes[1][column].set_xscale("log", base=2)
        axes[1][column].set_xticks(TURNS, [str(k) for k in TURNS])
    axes[0][0].set_ylabel("bias / true gradient")
    axes[1][0].set_ylabel("noise of one group / mean estimate")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e3e6ea")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    found = on_policy()
    speed()
    if len(sys.argv) > 1:
        draw(found, sys.argv[1])
