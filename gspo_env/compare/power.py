"""How many paired seeds show a difference: from the spread of earlier runs or of a pilot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from gspo_env.errors import ConfigError
from gspo_env.types import FloatArray

MOST = 10_000
"""More seeds than this are not counted."""
_PARTS = 1000
"""Parts of the distribution of a sample's spread, each of which counts as its middle."""
PILOT = 3
"""The fewest seeds whose spread is used."""


def shown_with(spread: float, difference: float, seeds: int, *, alpha: float = 0.05) -> float:
    """Computes the power of a two-sided paired t-test.

    Args:
        spread: Standard deviation of the paired differences.
        difference: Their true mean.
        seeds: Number of pairs.
        alpha: Level of the test.

    Source:
        The noncentral t distribution: Cohen 1988, chapter 2.
    """
    from scipy.stats import chi2, norm, t

    if seeds < 2:
        return 0.0
    if spread == 0:
        return float(difference != 0)
    bound = t.ppf(1 - alpha / 2, seeds - 1)
    shift = abs(difference) / spread * math.sqrt(seeds)
    # SciPy's noncentral t is NaN far out; given the sample's spread, the mean is normal
    middles = (np.arange(_PARTS) + 0.5) / _PARTS
    spread_N = np.sqrt(chi2.ppf(middles, seeds - 1) / (seeds - 1))
    above, below = norm.cdf(shift - bound * spread_N), norm.cdf(-shift - bound * spread_N)
    return float((above + below).mean())


def seeds_needed(
    spread: float, difference: float, *, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Counts the paired seeds that show a difference with a given power; infinite above `MOST`.

    Args:
        spread: Standard deviation of the paired differences.
        difference: The difference to show, above 0.
        alpha: Level of the two-sided test.
        power: Probability of showing it.

    Raises:
        ConfigError: The difference is not above 0.

    Example:
        >>> seeds_needed(0.1, 0.1)
        10
    """
    if not difference > 0:
        raise ConfigError(f"difference is {difference!r}; expected a number above 0")
    low, high = 1, 2
    while shown_with(spread, difference, high, alpha=alpha) < power:
        low, high = high, 2 * high
        if high > MOST:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        enough = shown_with(spread, difference, middle, alpha=alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def smallest_shown(spread: float, seeds: int, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Computes the smallest difference that a number of paired seeds shows with a given power."""
    from scipy.optimize import brentq

    if seeds < 2:
        return math.inf
    if spread == 0:
        return 0.0

    def short(effect: float) -> float:
        return shown_with(1.0, effect, seeds, alpha=alpha) - power

    return spread * float(brentq(short, 1e-6, 1e4 / math.sqrt(seeds)))


def fewest_pairs(alpha: float) -> int:
    """Counts the pairs with which the smallest p-value of signs, 2 / 2**n, reaches a level."""
    return math.ceil(1 - math.log2(alpha))


def spreads(areas: Mapping[str, Mapping[str, FloatArray]]) -> dict[str, tuple[float, int]]:
    """Returns, by problem, the spread of paired differences from the first arm and the seeds.

    The spreads of the arms are pooled. Problems with fewer than `PILOT` seeds are left out.

    Args:
        areas: (S,) scores of each arm's runs, by problem and arm.
    """
    found = {}
    for problem, arms in areas.items():
        first, *others = arms.values()
        squares, degrees, most = 0.0, 0, 0
        for values in others:
            pairs = min(len(first), len(values))
            if pairs >= PILOT:
                squares += float((values[:pairs] - first[:pairs]).var(ddof=1)) * (pairs - 1)
                degrees, most = degrees + pairs - 1, max(most, pairs)
        if degrees:
            found[problem] = (math.sqrt(squares / degrees), most)
    return found


def earlier(folder: Path, metric: str) -> dict[str, dict[str, FloatArray]]:
    """Reads the scores of another comparison's runs: the mean of the metric over each run.

    Raises:
        ConfigError: The folder has no runs with this metric.
    """
    note = folder / "comparison.json"
    order = [name for name, _ in json.loads(note.read_text())["arms"]] if note.exists() else []
    rows: dict[str, dict[str, dict[int, float]]] = {}
    for path in sorted(folder.glob("runs/*/*/seed*/result.json")):
        history = json.loads(path.read_text())["history"]
        values = [metrics[metric] for _, metrics in history if metric in metrics]
        if values:
            problem, arm = path.parts[-4], path.parts[-3]
            score = rows.setdefault(problem, {}).setdefault(arm, {})
            score[int(path.parts[-2].removeprefix("seed"))] = float(np.mean(values))
    if not rows:
        raise ConfigError(f"{str(folder)!r} has no run with the metric {metric!r}")
    found = {}
    for problem, arms in rows.items():
        common = sorted(set.intersection(*(set(scores) for scores in arms.values())))
        names = sorted(arms, key=lambda arm: _place(arm, order))
        found[problem] = {arm: np.array([arms[arm][seed] for seed in common]) for arm in names}
    return found


def _place(folder: str, order: list[str]) -> int:
    """Returns the place of an arm, whose folder is its name with some letters replaced."""
    from gspo_env.compare.runner import slug

    slugs = [slug(name) for name in order]
    return slugs.index(folder) if folder in slugs else len(slugs)


def lines(
    spread: Mapping[str, tuple[float, int]], difference: float, seeds: int, comparisons: int
) -> Iterator[str]:
    """Yields, for each problem, how many seeds show a difference and what the planned ones show.

    Args:
        spread: As `spreads` returns it.
        difference: The difference to show.
        seeds: Planned seeds.
        comparisons: Comparisons that share the level 0.05.
    """
    alpha = 0.05 / comparisons
    for problem, (value, pairs) in spread.items():
        need, least = seeds_needed(value, difference, alpha=alpha), fewest_pairs(alpha)
        counted = f"more than {MOST:,}" if math.isinf(need) else f"{max(int(need), least):,}"
        yield (
            f"{problem}: paired differences have a spread of {value:.3g} ({pairs} seeds); "
            f"a difference of {difference:g} needs {counted} seeds, and {seeds} seeds show "
            f"{smallest_shown(value, seeds, alpha=alpha):.3g} or more (power 0.8, two-sided level "
            f"0.05 over {comparisons} comparison{'s' * (comparisons != 1)})"
        )
    if seeds < fewest_pairs(alpha):
        yield (
            f"{seeds} pairs cannot have a p-value below {0.05:g} after the correction; "
            f"{fewest_pairs(alpha)} can"
        )
