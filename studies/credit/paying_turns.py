"""What an update makes of one more turn where turns pay and the policy decides when to stop.

    python studies/credit/paying_turns.py [picture.png]

Each turn goes on or stops; going on pays, and stopping may. All groups are listed, so nothing has
an error of sampling. The first table has the update of going on in the first turn, by what going on
and stopping pay, where there is one choice (`pay_once`). The second has, over the whole grid of
`paying_turns`, the range of the update of each turn over the true gradient (1 is the truth, another
positive number another length, a negative one the wrong direction), and the share of wrong
directions. The third has the same of every loss with `returns_to_go`, on policy.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np

from gspo_env.credit.estimators import Estimator, ReturnsToGo
from gspo_env.learner.losses import Aggregation, Loss
from gspo_env.registry import BUILTIN, find
from gspo_env.types import FloatArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.enumeration import Enumeration
from studies.credit.exact import Problem, pay_once, paying_turns, true_gradient
from studies.credit.losses_exact import AllGroups

AGGREGATIONS = tuple(a for a in get_args(Aggregation) if a not in ("token_mean", "turn_mean"))
"""The mean over turns is that over tokens here, since every turn has one token."""
TURNS, SIZES = (2, 3, 4), (2, 4, 8)
PAYS, STOPPING = (0.0, 0.1, 0.2, 0.5), (0.0, 0.1, 0.2, 0.5)
CHANCES = (0.2, 0.5, 0.8)
"""Probability that the policy goes on, in every turn."""
SMALLEST = 1e-3
"""A turn with a smaller true gradient has no direction to speak of."""
CASES = ((0.5, 0.0), (0.5, 0.2), (0.2, 0.1), (0.0, 0.5))
"""What going on and stopping pay in the first table."""


def estimators() -> dict[str, Estimator]:
    """Returns the built-in estimators of rewards, and a second setting of one."""
    names = sorted(
        {*BUILTIN["advantage"]} - {"by_agent", "distillation", "parts"}
    )  # those have other rewards
    made = {name: find("advantage", name)() for name in names}
    made["normalize_then_accumulate, per turn"] = find("advantage", "normalize_then_accumulate")(
        per="turn"
    )
    return made


def logits_of(problem: Problem, chance: float) -> FloatArray:
    """Returns the logits of a policy that goes on with a probability."""
    logits = np.zeros(problem.shape)
    logits[..., 0] = np.log(chance / (1 - chance))
    return logits


def going_on(problem: Problem, gradient: FloatArray) -> FloatArray:
    """Returns the part of a gradient that raises going on, of each turn."""
    row: FloatArray = gradient.reshape(problem.shape)[:, 0, 0]
    return row


@cache
def listed(problem: tuple[int, float, float], estimator: str, size: int, how: str) -> Enumeration:
    """Returns all groups of `paying_turns`; each is listed once."""
    return Enumeration(paying_turns(*problem), estimators()[estimator], size, how)  # type: ignore[arg-type]


def grid() -> Iterator[tuple[tuple[int, float, float], float]]:
    """Yields the problems of the grid, with the probability of going on."""
    for case in itertools.product(TURNS, PAYS, STOPPING):
        for chance in CHANCES:
            yield case, chance


def ratios(estimator: str, aggregation: str) -> FloatArray:
    """Returns the expected update of each turn over its true gradient, over the whole grid."""
    found: list[float] = []
    for (case, chance), size in itertools.product(grid(), SIZES):
        groups = listed(case, estimator, size, aggregation)
        logits = logits_of(groups.problem, chance)
        true = going_on(groups.problem, true_gradient(groups.problem, logits)[0])
        chance_M, gradient_MD, _ = groups.under(logits)
        mean = going_on(groups.problem, chance_M @ gradient_MD)
        clear = np.abs(true) >= SMALLEST
        found += list(mean[clear] / true[clear])
    return np.array(found)


def loss_ratios(loss: str) -> FloatArray:
    """Returns the same of a loss with `returns_to_go`, in groups of 4, on policy."""
    found: list[float] = []
    for case, chance in grid():
        groups = _all_groups(case)
        logits = logits_of(groups.problem, chance)
        true = going_on(groups.problem, true_gradient(groups.problem, logits)[0])
        chance_M, updates_MD = groups.updates(_loss(loss), logits, logits, logits)
        mean = going_on(groups.problem, chance_M @ updates_MD)
        clear = np.abs(true) >= SMALLEST
        found += list(mean[clear] / true[clear])
    return np.array(found)


def _loss(name: str) -> Loss:
    """Returns a loss; a divisor that is a constant counts as 1."""
    loss: Loss = find("loss", name)()
    return replace(loss, max_tokens=1) if loss.aggregation == "token_sum" else loss  # type: ignore


@cache
def _all_groups(case: tuple[int, float, float]) -> AllGroups:
    return AllGroups(paying_turns(*case), ReturnsToGo())


def first_turn(problem: Problem, estimator: Estimator, aggregation: Aggregation) -> float:
    """Returns the expected update of going on in the first turn, by groups of 4 at p = 0.5."""
    groups = Enumeration(problem, estimator, 4, aggregation)
    chance_M, gradient_MD, _ = groups.under(np.zeros(problem.shape))
    return float(going_on(problem, chance_M @ gradient_MD)[0])


def row(name: str, values: FloatArray) -> str:
    """Formats a row of the second and the third table."""
    return f"| {name} | {values.min():.2f} to {values.max():.2f} | {np.mean(values < 0):.1%} |"


def draw(path: str) -> None:
    """Draws the update of going on in the first of three turns, by what stopping pays."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=100, layout="constrained")
    stops = np.linspace(0, 0.5, 11)
    for axis, aggregation in zip(figure.subplots(1, 2, sharey=True), AGGREGATIONS, strict=True):
        problems = [paying_turns(3, 0.2, stop) for stop in stops]
        true = [going_on(p, true_gradient(p, np.zeros(p.shape))[0])[0] for p in problems]
        axis.plot(stops, true, color="black", linewidth=3, alpha=0.4, label="true gradient")
        for name, estimator in estimators().items():
            values = [first_turn(problem, estimator, aggregation) for problem in problems]
            axis.plot(stops, values, marker="o", markersize=3, label=name)
        axis.axhline(0, color="#888888", linewidth=0.8)
        axis.set_title(aggregation, loc="left")
        axis.set_xlabel("reward of stopping; going on pays 0.2")
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("update of going on")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Prints the tables."""
    made = estimators()
    print(f"| going on pays | stopping pays | true | {' | '.join(made)} |")
    print("|---" * (len(made) + 3) + "|")
    for pays, stop in CASES:
        problem = pay_once(3, pays, stop)
        true = going_on(problem, true_gradient(problem, np.zeros(problem.shape))[0])[0]
        cells = (f"{first_turn(problem, each, 'token_sum'):.3f}" for each in made.values())
        print(f"| {pays:g} | {stop:g} | {true:.3f} | {' | '.join(cells)} |")
    print("\n| estimator, aggregation | update over truth | wrong direction |\n|---|---|---|")
    for name, aggregation in itertools.product(made, AGGREGATIONS):
        print(row(f"`{name}`, `{aggregation}`", ratios(name, aggregation)), flush=True)
    print("\n| loss | update over truth | wrong direction |\n|---|---|---|")
    for name in BUILTIN["loss"]:
        print(row(f"`{name}`", loss_ratios(name)), flush=True)


if __name__ == "__main__":
    main()
    if len(sys.argv) > 1:
        draw(sys.argv[1])
