"""When does credit by turn pay? A sweep over the share of turns that are decisions.

    python studies/density/density.py            # the exact tables, some seconds
    python studies/density/density.py study      # the whole study, in parts of at most 55 minutes
    python studies/density/density.py write      # page, figure and raw data from its results

The exact part is the signal-to-noise ratio (SNR) of the update of every estimator over that of
`outcome`, on the tabular form of `DensityEnv` of `studies/diagnostics.py`. arXiv 2606.22164
predicts the power -1/2 of the density. One sweep fixes the number of decisions and adds routine
turns, the other fixes the number of turns and makes some of them decisions.

`study` measures the same noise in the updates of the tiny model, trains it with paired seeds, and
compares two aggregations where the policy decides the length. What has a result is not computed
again, so the same command continues where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from density_learning import (
    ARMS,
    DECISIONS,
    DENSITIES,
    FIRST_SEED,
    GROUP,
    LATE,
    LENGTH_ARMS,
    LENGTHS,
    MARGIN,
    MODELS,
    NOISE,
    TURNS,
    lengths,
    measure,
    results,
    sweep,
    to_rows,
    train,
)
from scipy.stats import ttest_1samp

from gspo_env.compare.stats import holm, paired_interval, paired_permutation_test
from gspo_env.credit import (
    GiGPO,
    GroupGAE,
    NormalizeThenAccumulate,
    Outcome,
    ReturnsToGo,
    TurnPlusOutcome,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.density import Density, Signal, signal, slope

PAGE = Path(__file__).parents[1] / "README.md"
DATA = PAGE.parent / "data"
CURVES, UPDATES = DATA / "density-curves.parquet", DATA / "density-updates.json"
FIGURE = PAGE.parent / "images" / "density.png"
METRICS = (
    "rollout/reward/right",
    "rollout/return",
    "rollout/turns",
    "rollout/stop/max_turn_tokens",
)
"""What the raw data contain."""

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
    for title, make in SWEEPS.items():
        lines += [f"**{title}**", "", row(head), row(["---"] * len(head))]
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


Curves = Mapping[str, Mapping[str, np.ndarray]]
"""By problem and arm: a value of each seed and step, (S, steps)."""
Rows = Sequence[Mapping[str, Any]]


def curves(rows: Rows, value: Callable[[Mapping[str, float]], float]) -> Curves:
    """Returns a value of the metrics of each step; a problem without these metrics is left out."""
    steps: dict[tuple[str, str], dict[int, dict[int, dict[str, float]]]] = {}
    for line in rows:
        seeds = steps.setdefault((line["problem"], line["arm"]), {})
        seeds.setdefault(line["seed"], {}).setdefault(line["step"], {})[line["metric"]] = line[
            "value"
        ]
    found: dict[str, dict[str, np.ndarray]] = {}
    for (problem, arm), seeds in steps.items():
        of = found.setdefault(problem, {})
        of[arm] = np.array(
            [[value(seeds[seed][step]) for step in sorted(seeds[seed])] for seed in sorted(seeds)]
        )
    return found


def right(metrics: Mapping[str, float]) -> float:
    """Returns the share of right decisions; an episode whose action had no end counts as 0."""
    cut = metrics.get("rollout/stop/max_turn_tokens", 0.0)
    return metrics.get("rollout/reward/right", 0.0) * (1 - cut)


def areas(found: Curves) -> Curves:
    """Returns the mean of each curve, (S,)."""
    return {p: {arm: of[arm].mean(1) for arm in of} for p, of in found.items()}


def interval(values: np.ndarray) -> str:
    """Formats a mean and its 95 % t interval."""
    low, high = paired_interval(values)
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


def slope_of(gains_MD: np.ndarray) -> str:
    """Formats the mean slope of the logarithms over those of the densities, and its interval."""
    slopes = np.polyfit([math.log(rho) for rho in DENSITIES], gains_MD.T, 1)[0]  # (models,)
    low, high = paired_interval(slopes)
    return f"{slopes.mean():.2f} ({low:.2f} to {high:.2f})"


def measured(updates: Mapping[str, Mapping[str, Any]], arm: str, what: str) -> np.ndarray:
    """Returns the signal or noise of the updates by an arm, (models, densities)."""
    models = range(FIRST_SEED, FIRST_SEED + MODELS)
    return np.array(
        [[updates[f"{rho.denominator}-{n}"][arm][what] for rho in DENSITIES] for n in models]
    )


def left_out(values_MD: np.ndarray) -> np.ndarray:
    """Returns pseudo-values of the jackknife of the log of a mean over models, (M, D)."""
    models = len(values_MD)
    others_MD = (values_MD.sum(0) - values_MD) / (models - 1)
    return models * np.log(values_MD.mean(0)) - (models - 1) * np.log(others_MD)


def tiny_gains(updates: Mapping[str, Mapping[str, Any]], arm: str) -> dict[str, np.ndarray]:
    """Returns the logs of the gains in SNR and in noise over `outcome`, each (models, densities).

    The mean of the signal over models is used, since that of one model can be below 0; its interval
    is from the jackknife over models.
    """
    noise = {name: np.log(measured(updates, name, "noise")) for name in (arm, "outcome")}
    size = {name: left_out(measured(updates, name, "signal")) for name in (arm, "outcome")}
    less_noise = noise["outcome"] - noise[arm]
    return {"SNR": less_noise + size[arm] - size["outcome"], "noise": less_noise}


def noise_table(updates: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of the SNR and noise of updates of the tiny model, beside the exact one."""
    exact = {"returns_to_go": ReturnsToGo(), "immediate": ReturnsToGo(gamma=0.0)}
    make = next(iter(SWEEPS.values()))
    head = ["credit", *(f"density {rho}" for rho in DENSITIES), "slope (95 % interval)"]
    lines = [row(head), row(["---"] * len(head))]
    for arm, estimator in exact.items():
        values = gains(make, estimator, noise=NOISE)
        value, _, _ = slope([math.log(rho) for rho in DENSITIES], np.log(values))
        lines.append(row([f"`{arm}`, exact SNR", *(f"{v:.2f}" for v in values), f"{value:.2f}"]))
        for name, of in tiny_gains(updates, arm).items():
            cells = [f"{v:.2f}" for v in np.exp(of.mean(0))]
            lines.append(row([f"`{arm}`, tiny model, {name}", *cells, slope_of(of)]))
    return "\n".join(lines)


def signal_line(updates: Mapping[str, Mapping[str, Any]]) -> str:
    """Says whether the arms have the same expected update, up to the factor of their baselines."""
    of = {arm: measured(updates, arm, "signal").mean(1) for arm in ARMS}  # (models,)
    base = of["immediate"]
    parts = []
    for arm in ("outcome", "returns_to_go"):
        low, high = paired_interval(of[arm] - base)
        mean, size = of[arm].mean(), base.mean()
        parts.append(f"`{arm}` {mean / size:.2f} ({1 + low / size:.2f} to {1 + high / size:.2f})")
    return f"Mean update along that of `immediate`, over it: {', '.join(parts)}."


def areas_table(found: Curves) -> str:
    """Returns the mean areas of the arms, and their differences from `outcome`."""
    others = [arm for arm in ARMS if arm != "outcome"]
    head = ["problem", "`outcome`", *(f"`{arm}` minus `outcome`" for arm in others)]
    lines = [row(head), row(["---"] * len(head))]
    for problem, by_arm in found.items():
        base = by_arm["outcome"]
        cells = [interval(by_arm[arm] - base) for arm in others]
        lines.append(row([problem, f"{base.mean():.3f}", *cells]))
    x = np.array([math.log2(rho) for rho in DENSITIES])
    cells = []
    for arm in others:
        of = [found[f"density {rho}"] for rho in DENSITIES]
        difference = np.array([by_arm[arm] - by_arm["outcome"] for by_arm in of])
        cells.append(interval(-np.polyfit(x, difference, 1)[0]))
    lines.append(row(["for each halving of the density", "", *cells]))
    return "\n".join(lines)


def tests_table(found: Curves) -> str:
    """Returns the tests that were named before the runs: one a problem, and one of equivalence."""
    named = [(f"density {rho}", "immediate", "better") for rho in DENSITIES]
    named += [(LATE, "immediate", "worse"), (f"density {DENSITIES[-1]}", "returns_to_go", "equal")]
    lines, values = [], []
    for problem, arm, kind in named:
        difference = found[problem][arm] - found[problem]["outcome"]
        if kind == "equal":
            above = ttest_1samp(difference, -MARGIN, alternative="greater").pvalue
            below = ttest_1samp(difference, MARGIN, alternative="less").pvalue
            # equal differences have no spread to test against, and n signs prove no more than 2^-n
            values.append(max(float(above), float(below), 2.0 ** -len(difference)))
            claim = f"`{arm}` is within {MARGIN}"
        else:
            values.append(paired_permutation_test(difference, np.zeros_like(difference)))
            claim = f"`{arm}` differs; predicted: {kind}"
        lines.append([problem, claim, interval(difference)])
    head = ["problem", "test", "difference from `outcome` (95 % interval)", "p (Holm)"]
    table = [row(head), row(["---"] * len(head))]
    table += [row([*cells, f"{p:.4f}"]) for cells, p in zip(lines, holm(values), strict=True)]
    return "\n".join(table)


def lengths_table(found: Curves) -> str:
    """Returns the areas of both aggregations, and their difference."""
    by_arm = found[LENGTHS]
    head = ["estimator", "`sequence_mean`", "`token_sum`", "difference (95 % interval)", "p (Holm)"]
    lines, values = [], []
    for name in dict.fromkeys(arm.partition(",")[0] for arm in LENGTH_ARMS):
        mean, total = (by_arm[f"{name}, {how}"] for how in ("sequence_mean", "token_sum"))
        lines.append(
            [f"`{name}`", f"{mean.mean():.3f}", f"{total.mean():.3f}", interval(total - mean)]
        )
        values.append(paired_permutation_test(total, mean))
    table = [row(head), row(["---"] * len(head))]
    table += [row([*cells, f"{p:.4f}"]) for cells, p in zip(lines, holm(values), strict=True)]
    return "\n".join(table)


def tables() -> dict[str, str]:
    """Returns the page's tables of training by name, from the raw data beside the page."""
    from pyarrow import parquet

    rows = parquet.read_table(CURVES).to_pylist()
    updates = json.loads(UPDATES.read_text())
    found = areas(curves([r for r in rows if r["problem"] != LENGTHS], right))
    ended = [r for r in rows if r["problem"] == LENGTHS]
    return {
        "noise": noise_table(updates) + "\n\n" + signal_line(updates),
        "areas": areas_table(found),
        "tests": tests_table(found),
        "lengths": lengths_table(areas(curves(ended, lambda m: m["rollout/return"]))),
    }


def write(folder: Path) -> None:
    """Writes the raw data, the tables of the page and its figure from the results of a study."""
    import pyarrow
    from pyarrow import parquet

    DATA.mkdir(exist_ok=True)
    rows = []
    for comparison, name in ((sweep(), "sweep"), (lengths(), "lengths")):
        rows += to_rows(results(comparison, folder / name), METRICS)
    parquet.write_table(pyarrow.Table.from_pylist(rows), CURVES, compression="zstd")
    updates = {p.stem: json.loads(p.read_text()) for p in sorted((folder / "noise").glob("*.json"))}
    UPDATES.write_text(json.dumps(updates, indent=1) + "\n")
    page = PAGE.read_text()
    for name, table in tables().items():
        before, start, rest = page.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not start or not end:
            raise SystemExit(f"{PAGE} has no place for the table {name!r}")
        page = f"{before}{start}\n{table}\n\n{end}{after}"
    PAGE.write_text(page)
    draw(rows, updates)
    print(f"{PAGE}, {FIGURE}, {CURVES} and {UPDATES} are written")


def draw(rows: Rows, updates: Mapping[str, Any]) -> None:
    """Draws the gain by density, exact and measured, and the curves of each density."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(DENSITIES) + 1, figsize=(16, 3.2), layout="constrained")
    make, found = next(iter(SWEEPS.values())), curves(rows, right)
    x = [float(rho) for rho in DENSITIES]
    axes[0].loglog(x, gains(make, ReturnsToGo(gamma=0.0), noise=NOISE), "--", label="exact")
    gain = tiny_gains(updates, "immediate")["SNR"]
    middle = np.exp(gain.mean(0))
    bounds = [np.exp(paired_interval(of)) for of in gain.T]
    error = np.abs(np.array(bounds).T - middle)
    axes[0].errorbar(x, middle, error, fmt="o", label="tiny model")
    axes[0].set(title="SNR of immediate / outcome", xlabel="density")
    axes[0].set_xticks(x, [str(rho) for rho in DENSITIES], minor=False)
    axes[0].set_yticks((2, 4, 6), ("2", "4", "6"), minor=False)
    axes[0].minorticks_off()
    axes[0].legend()
    for axis, rho in zip(axes[1:], DENSITIES, strict=True):
        for arm, values in found[f"density {rho}"].items():
            mean, half = values.mean(0), 1.96 * values.std(0, ddof=1) / math.sqrt(len(values))
            steps = np.arange(1, len(mean) + 1)
            axis.plot(steps, mean, label=arm)
            axis.fill_between(steps, mean - half, mean + half, alpha=0.2)
        axis.set(title=f"density {rho}", xlabel="step", ylim=(0, 1))
    axes[1].set_ylabel("share of right decisions")
    axes[-1].legend(loc="lower right")
    figure.savefig(FIGURE, dpi=110, metadata={"Software": None})


def study(folder: Path, workers: int) -> None:
    """Computes what has no result yet."""
    train(sweep(), folder / "sweep", workers)
    train(lengths(), folder / "lengths", workers)
    measure(folder)
    print("complete; `density.py write` makes the page")


def main() -> None:
    """Prints the exact tables, or runs the study."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("exact", "study", "write"), default="exact")
    parser.add_argument("--output", default="comparisons/density", help="folder of results")
    parser.add_argument("--workers", type=int, default=0, help="runs at a time; 0 is one a core")
    arguments = parser.parse_args()
    if arguments.what == "study":
        study(Path(arguments.output), arguments.workers)
        return
    if arguments.what == "write":
        write(Path(arguments.output))
        return
    for noise in (0.0, 0.5):
        print(f"noise {noise:g}: SNR of an update over that of `outcome`, groups of {GROUP}\n")
        print(exact_table(noise))
    print(f"{TURNS} turns, 4 decisions, noise 0.5, rewards that come late\n")
    print(delay_table())


if __name__ == "__main__":
    main()
