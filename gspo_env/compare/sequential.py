"""Intervals and tests that stay valid while seeds are added: group-sequential, with alpha spending.

After each round of seeds, a paired difference has the interval mean +- c sd / sqrt(n). The bounds c
are those for which, if differences are normal and their true mean is 0, the probability that any
look up to this one finds 0 outside its interval is the level spent so far, which grows linearly
with the seeds. All intervals together then contain the true mean with the promised probability, so
a comparison may end at any look for any reason. The bounds of t statistics do not depend on the
spread, and are computed by simulation.

Sources: Lan and DeMets 1983 (alpha spending); Kim and DeMets 1987 (power family, here of power 1);
Jennison and Turnbull 1989 (repeated confidence intervals).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gspo_env.compare.power import fewest_pairs
from gspo_env.errors import ConfigError
from gspo_env.types import FloatArray

_PATHS = 400_000
"""Simulated comparisons from which the bounds are computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequential:
    """When to look at the results of a comparison, and when to stop it."""

    until: float = 0.05
    """Stop when the interval of each remaining arm reaches no further than this from its middle."""
    budget: float = math.inf
    """Seconds; no round begins that would end later. The same command goes on."""
    first: int = 6
    """Seeds before the first look."""
    step: int = 2
    """Seeds between looks."""
    most: int = 64
    """Seeds at the last look. The bounds depend on this, so a started comparison keeps it."""
    alpha: float = 0.05
    """Probability of a wrong claim, over all pairs of arms, problems and looks."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        for name, possible, allowed in (
            ("until", self.until > 0, "a number above 0"),
            ("budget", self.budget > 0, "a number above 0"),
            ("first", self.first >= 3, "at least 3"),
            ("step", self.step >= 1, "at least 1"),
            (
                "most",
                self.most >= self.first,
                f"at least {self.first}, the seeds of the first look",
            ),
            ("alpha", 0 < self.alpha < 1, "a number between 0 and 1"),
        ):
            if not possible:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {allowed}")

    def looks(self, pairs: int) -> tuple[int, ...]:
        """Returns the numbers of seeds at which results are looked at.

        The first has enough seeds for the signs of the differences alone to be significant, so that
        equal differences of a coarse metric are not taken for proof.

        Args:
            pairs: Pairs of arms that share the level.
        """
        first = min(max(self.first, fewest_pairs(self.alpha / pairs)), self.most)
        return (*range(first, self.most, self.step), self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The paired difference of two arms with its repeated confidence interval."""

    arm: str
    other: str
    seeds: int
    mean: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Distance of the bounds from the middle."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        """Formats the difference with its interval."""
        return (
            f"{self.arm} - {self.other}: {self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f}), "
            f"{self.seeds} seeds"
        )


@functools.lru_cache(maxsize=16)
def bounds(looks: tuple[int, ...], alpha: float, seed: int = 0) -> tuple[float, ...]:
    """Computes the critical |t| of each look.

    Args:
        looks: Pairs at each look, increasing, at least 2 each.
        alpha: The level that is spent by the last look.
        seed: Seed of the simulation.
    """
    rng = np.random.default_rng(seed)
    chunks = []
    for _ in range(8):
        size = _PATHS // 8
        total, squares = np.zeros(size), np.zeros(size)
        t_LP = np.empty((len(looks), size), np.float32)
        before = 0
        for row, count in zip(t_LP, looks, strict=True):
            new = rng.standard_normal((count - before, size))
            total, squares = total + new.sum(0), squares + (new**2).sum(0)
            before = count
            spread = np.sqrt((squares - total**2 / count) / (count - 1))
            row[:] = np.abs(total) / (spread * math.sqrt(count))
        chunks.append(t_LP)
    t_LP = np.concatenate(chunks, axis=1)
    alive, found = np.ones(t_LP.shape[1], bool), []
    for row, count in zip(t_LP, looks, strict=True):
        spent = round(alpha * count / looks[-1] * len(alive))
        most = spent - int((~alive).sum())
        values = np.sort(row[alive])
        found.append(float(values[-most - 1]) if most > 0 else math.inf)
        alive &= row <= found[-1]
    return tuple(found)


def differences(
    areas: Mapping[str, FloatArray], plan: Sequential, pairs: int, seeds: int
) -> list[Difference]:
    """Computes the difference of each pair of arms that have the seeds of this look.

    Args:
        areas: (S,) scores of each arm's runs.
        plan: The plan.
        pairs: Pairs that share the level.
        seeds: Seeds of this look, one of `plan.looks(pairs)`.
    """
    looks = plan.looks(pairs)
    bound = bounds(looks, plan.alpha / pairs)[looks.index(seeds)]
    found = []
    for (arm, ours), (other, theirs) in itertools.permutations(areas.items(), 2):
        if min(len(ours), len(theirs)) >= seeds:
            values = ours[:seeds] - theirs[:seeds]
            half = bound * float(values.std(ddof=1)) / math.sqrt(seeds)
            if not values.std() and math.isinf(bound):
                half = math.inf
            mean = float(values.mean())
            found.append(
                Difference(
                    arm=arm, other=other, seeds=seeds, mean=mean, low=mean - half, high=mean + half
                )
            )
    return found


def cannot_win(found: Sequence[Difference], keep: str) -> dict[str, Difference]:
    """Returns the arms that another arm beats, with the clearest difference; never `keep`."""
    worse: dict[str, Difference] = {}
    for difference in found:
        if difference.high < 0 and difference.arm != keep:
            known = worse.get(difference.arm)
            if known is None or difference.high < known.high:
                worse[difference.arm] = difference
    return worse


def tight(found: Sequence[Difference], first: str, alive: Sequence[str], until: float) -> bool:
    """Returns whether each remaining arm's difference from the first is known well enough."""
    own = {d.arm: d for d in found if d.other == first}
    return all(arm in own and own[arm].width <= until for arm in alive if arm != first)


def seconds(text: str) -> float:
    """Reads a time such as 90, 90s, 30m or 2h.

    Raises:
        ConfigError: It is none.

    Example:
        >>> seconds("2h")
        7200.0
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"budget is {text!r}; expected a time such as 90s, 30m or 2h")
    return value
