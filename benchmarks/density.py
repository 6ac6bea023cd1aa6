"""When does credit by turn pay? A sweep over the share of turns that are decisions.

    python benchmarks/density.py                                          # exact, some seconds
    python benchmarks/density.py --train --output comparisons/density     # training, in parts

The first part is exact: the signal-to-noise ratio (SNR) of the update of every estimator over that
of `outcome`, on the tabular form of `gspo/Density-v0`. arXiv 2606.22164 predicts the power -1/2 of
the density. One sweep fixes the number of decisions and adds routine turns, the other fixes the
number of turns and makes some of them decisions.

With `--train`, the tiny model is trained on the same problems with paired seeds. It says first how
many runs there are and how long they take. A run that has a result is not played again, so the
same command goes on; `--seconds` ends a part. `runs.parquet` has every point of every curve.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gspo_env.compare.density import Density, Signal, signal, slope
from gspo_env.credit import (
    GiGPO,
    GroupGAE,
    NormalizeThenAccumulate,
    Outcome,
    ReturnsToGo,
    TurnPlusOutcome,
)

DENSITIES = tuple(Fraction(1, n) for n in (16, 8, 4, 2, 1))
GROUP = 8
DECISIONS, TURNS = 2, 16
ESTIMATORS = {
    "immediate reward (`returns_to_go`, `gamma` 0)": ReturnsToGo(gamma=0.0),
    "TD residual (`group_gae`, `lam` 0)": GroupGAE(lam=0.0),
    "`turn_plus_outcome`": TurnPlusOutcome(),
    "`group_gae`": GroupGAE(),
    "`normalize_then_accumulate`": NormalizeThenAccumulate(),
    "`returns_to_go`": ReturnsToGo(),
    "`gigpo`": GiGPO(),
}
SWEEPS = {
    f"{DECISIONS} decisions, {DECISIONS} to {16 * DECISIONS} turns": lambda rho, **rest: Density(
        turns=int(DECISIONS / rho), decisions=DECISIONS, **rest
    ),
    f"{TURNS} turns, 1 to {TURNS} decisions": lambda rho, **rest: Density(
        turns=TURNS, decisions=int(TURNS * rho), **rest
    ),
}


def gains(make: Any, estimator: Any, **rest: Any) -> list[float]:
    """Returns the SNR of an estimator over that of `outcome`, by density."""
    problems = [make(rho, **rest) for rho in DENSITIES]
    return [signal(p, estimator, GROUP).snr / signal(p, Outcome(), GROUP).snr for p in problems]


def exact_table(noise: float, delay: int = 0) -> str:
    """Returns the table of one noise and delay: gains by density, and the slope of their logs."""
    head = ["estimator", *(f"density {rho}" for rho in DENSITIES), "slope (95 % interval)"]
    lines = []
    for sweep, make in SWEEPS.items():
        lines += [f"**{sweep}**", "", row(head), row(["---"] * len(head))]
        for name, estimator in ESTIMATORS.items():
            values = gains(make, estimator, noise=noise, delay=delay)
            if min(values) > 0:
                value, low, high = slope([math.log(rho) for rho in DENSITIES], np.log(values))
                fit = f"{signed(value)} ({signed(low)} to {signed(high)})"
            else:
                fit = "no signal"
            cells = [f"{v:.2f}" for v in values]
            lines.append(row([name, *cells, fit]))
        lines.append("")
    return "\n".join(lines)


def signed(value: float) -> str:
    """Formats a number with two decimals, without a zero below zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def delay_table() -> str:
    """Returns the gains and biases where rewards come late."""
    head = ["estimator", *(f"delay {d}: gain, bias" for d in (0, 1, 4))]
    lines = [row(head), row(["---"] * len(head))]
    # a state of the environment contains what is owed, which the tabular form does not know
    late = {n: e for n, e in ESTIMATORS.items() if not isinstance(e, (GiGPO, GroupGAE))}
    for name, estimator in late.items():
        cells = []
        for delay in (0, 1, 4):
            problem = Density(turns=TURNS, decisions=4, noise=0.5, delay=delay)
            ours: Signal = signal(problem, estimator, GROUP)
            base = signal(problem, Outcome(), GROUP)
            cells.append(f"{ours.snr / base.snr:.2f}, {ours.bias:.2f}")
        lines.append(row([name, *cells]))
    return "\n".join(lines)


def row(cells: Any) -> str:
    """Formats a line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


ARMS = {
    "outcome": {"advantage": "outcome"},
    "returns_to_go": {"advantage": "returns_to_go"},
    "td": {"advantage": "group_gae", "lam": 0.0},
    "immediate": {"advantage": "returns_to_go", "gamma": 0.0},
}
MARGIN = 0.05
"""Two arms are equivalent if the areas under their curves differ by less than this."""
LATE = "late"
"""The problem with delayed rewards, in which immediate rewards mislead."""
BASE: dict[str, Any] = {
    "env": "gspo/Density-v0",
    "tasks_per_step": 4,
    "eval_every": 0,
    "eval_tasks": 16,
    "advantage": {"name": "outcome"},
    "recipe": {
        "hidden_size": 64,
        "layers": 1,
        "demonstrations": 512,
        "imitation_steps": 100,
        "imitation_learning_rate": 0.005,
    },
    "rollout": {"max_turn_tokens": 4, "max_context": 512, "group_size": GROUP},
    "learner": {
        "learning_rate": 2e-3,
        "warmup_steps": 5,
        "schedule": "constant",
        "minibatches": 2,
    },
    "credit": {"rms": 1.0},
    "tracker": "none",
}
SWEEP_NAMES = ("decisions", "turns")


def problems(sweep: str, steps: int) -> dict[str, Any]:
    """Returns the config of each problem of a sweep, and of the one with delayed rewards."""
    from gspo_env.config import from_dict

    make = list(SWEEPS.values())[SWEEP_NAMES.index(sweep)]
    found = {}
    for rho in DENSITIES:
        turns = make(rho).turns
        found[f"rho {rho}"] = {"turns": turns, "density": float(rho), "noise": 0.5}
    found[LATE] = {"turns": TURNS, "density": 0.25, "noise": 0.5, "delay": 4}
    return {n: from_dict({**BASE, "steps": steps, "env_kwargs": k}) for n, k in found.items()}


def train(arguments: argparse.Namespace) -> None:
    """Plays the runs that have no result until the time of this part is over, then reports."""
    from gspo_env.compare import Arm, Comparison, compare, planned, read

    arms = tuple(Arm(name=name, changes=changes) for name, changes in ARMS.items())
    comparison = Comparison(
        problems=problems(arguments.sweep, arguments.steps),
        arms=arms,
        seeds=arguments.seeds,
        metric="rollout/reward/right",
        workers=arguments.workers,
    )
    folder = Path(arguments.output)
    runs = list(planned(comparison, folder))
    done = [read(run) for run in runs if (run.folder / "result.json").exists()]
    each = float(np.mean([r.seconds for r in done])) if done else arguments.guess
    workers = arguments.workers or os.cpu_count() or 1
    source = "measured" if done else "a guess; --guess changes it"
    print(
        f"{len(runs)} runs of {each:.0f} s ({source}) on {workers} workers: "
        f"{len(runs) * each / workers / 60:.0f} min in all, "
        f"{(len(runs) - len(done)) * each / workers / 60:.0f} min left",
        flush=True,
    )
    begun, per_seed = time.monotonic(), len(runs) / arguments.seeds * each / workers
    for seeds in range(1, arguments.seeds + 1):
        some = dataclasses.replace(comparison, seeds=seeds)
        if all((run.folder / "result.json").exists() for run in planned(some, folder)):
            continue
        if time.monotonic() - begun + per_seed > arguments.seconds:
            print(f"this part ends before seed {seeds - 1}; the same command goes on")
            break
        at = time.monotonic()
        compare(some, folder, comparison.problems[LATE].tracker, lambda line: print(line))
        per_seed = time.monotonic() - at
    report(comparison, folder)


def report(comparison: Any, folder: Path) -> None:
    """Writes `runs.parquet` and `tests.md` from the seeds that all arms and problems have."""
    from gspo_env.compare import planned, read
    from gspo_env.report.comparison import summarise, write_report

    complete = 0
    for seeds in range(1, comparison.seeds + 1):
        some = dataclasses.replace(comparison, seeds=seeds)
        if not all((run.folder / "result.json").exists() for run in planned(some, folder)):
            break
        complete = seeds
    if complete < 2:
        print(f"{complete} complete seeds; the report needs at least 2")
        return
    some = dataclasses.replace(comparison, seeds=complete)
    results = [read(run) for run in planned(some, folder)]
    to_parquet(results, folder / "runs.parquet")
    write_report(some, results, folder)
    text = tests_table(summarise(some, results))
    (folder / "tests.md").write_text(text)
    print(f"{complete} seeds\n{text}\nPage: {folder / 'report.html'}")


def tests_table(summary: Any) -> str:
    """Returns the table of the tests named beforehand: one a problem, and one of equivalence."""
    from scipy.stats import ttest_1samp

    from gspo_env.compare.stats import holm, paired_interval, paired_permutation_test

    named = [(f"rho {rho}", "td", "better") for rho in DENSITIES]
    named += [(LATE, "immediate", "worse"), (f"rho {DENSITIES[-1]}", "returns_to_go", "equal")]
    rows, values = [], []
    for problem, arm, kind in named:
        by_arm = {r.arm.name: r.areas for r in summary[problem]}
        difference = by_arm[arm] - by_arm["outcome"]
        if kind == "equal":
            above = ttest_1samp(difference, -MARGIN, alternative="greater").pvalue
            below = ttest_1samp(difference, MARGIN, alternative="less").pvalue
            # equal differences have no spread to test against, and n signs prove no more than 2^-n
            values.append(max(float(above), float(below), 2.0 ** -len(difference)))
        else:
            values.append(paired_permutation_test(by_arm[arm], by_arm["outcome"]))
        low, high = paired_interval(difference)
        effect = f"{difference.mean():+.3f} ({low:+.3f} to {high:+.3f})"
        claim = f"{arm} differs; predicted: {kind}"
        rows.append([problem, f"{arm} within {MARGIN}" if kind == "equal" else claim, effect])
    head = ["problem", "test", "difference in area from outcome (95 % interval)", "p (Holm)"]
    lines = [row(head), row(["---"] * len(head))]
    lines += [row([*cells, f"{p:.4f}"]) for cells, p in zip(rows, holm(values), strict=True)]
    return "\n".join(lines) + "\n"


def to_parquet(results: Any, path: Path) -> None:
    """Writes one line for each point of each curve."""
    import pyarrow
    from pyarrow import parquet

    lines = [
        {
            "problem": result.run.problem,
            "arm": result.run.arm.name,
            "seed": result.run.seed,
            "step": step,
            "metric": metric,
            "value": value,
        }
        for result in results
        for step, metrics in result.history
        for metric, value in metrics.items()
    ]
    parquet.write_table(pyarrow.Table.from_pylist(lines), path)


def main() -> None:
    """Prints the exact tables, or trains."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", action="store_true", help="train the tiny model too")
    parser.add_argument("--sweep", choices=SWEEP_NAMES, default="decisions", help="what is fixed")
    parser.add_argument("--output", default="comparisons/density")
    parser.add_argument("--seeds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0, help="0 is one a core")
    parser.add_argument("--seconds", type=float, default=3300.0, help="time of this part")
    parser.add_argument("--guess", type=float, default=15.0, help="seconds of a run, until known")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments)
        return
    for noise in (0.0, 0.5):
        print(f"noise {noise:g}: SNR of an update over that of `outcome`, groups of {GROUP}\n")
        print(exact_table(noise))
    print(f"{TURNS} turns, 4 decisions, noise 0.5, rewards that come late\n")
    print(delay_table())


if __name__ == "__main__":
    main()
