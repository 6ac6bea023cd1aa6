"""Adds seeds to a comparison round by round, until its intervals are tight enough."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gspo_env.compare.areas import areas_by_arm
from gspo_env.compare.plan import Comparison
from gspo_env.compare.power import PILOT, lines, spreads
from gspo_env.compare.runner import Play, Result, Run, has_result, planned, read
from gspo_env.compare.sequential import Difference, Sequential, cannot_win, differences, tight
from gspo_env.errors import OutputError
from gspo_env.redaction import write_text

Say = Callable[[str], None]


def comparisons(comparison: Comparison, *, with_first: bool) -> int:
    """Counts the pairs of arms over all problems: those with the first arm, or all."""
    arms = len(comparison.arms)
    return len(comparison.problems) * (arms - 1 if with_first else arms * (arms - 1) // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Plays all planned seeds, and says what they can show as soon as the spread is known."""

    difference: float = 0.05
    """The difference to show."""

    def __call__(self, play: Play, comparison: Comparison, output: Path, say: Say) -> list[Result]:
        """Plays the runs; the first seeds are the pilot if there are no results yet."""
        runs = list(planned(comparison, output))
        if comparison.seeds > PILOT and not self._announce(runs, comparison, say):
            say(f"No earlier runs: the first {PILOT} seeds are the pilot")
            play([run for run in runs if run.seed < comparison.first_seed + PILOT])
            self._announce(runs, comparison, say)
        return play(runs)

    def _announce(self, runs: Sequence[Run], comparison: Comparison, say: Say) -> bool:
        """Says how many seeds show the difference, if there are enough results."""
        seeds = _common_seeds(runs)
        if seeds < PILOT:
            return False
        results = [read(run) for run in runs if run.seed < comparison.first_seed + seeds]
        count = comparisons(comparison, with_first=True)
        spread = spreads(areas_by_arm(comparison, results))
        for line in lines(spread, self.difference, comparison.seeds, count):
            say(line)
        return True


@dataclass(kw_only=True, slots=True)
class Rounds:
    """Adds seeds round by round; its last looks are in `found`."""

    plan: Sequential
    difference: float = 0.05
    """The difference whose number of seeds is announced."""
    found: dict[str, list[Difference]] = field(default_factory=dict)
    """The differences from the first arm at the last look of each arm, by problem."""
    pruned: dict[str, dict[str, Difference]] = field(default_factory=dict)
    """The arms that another arm beats, by problem."""

    def __call__(self, play: Play, comparison: Comparison, output: Path, say: Say) -> list[Result]:
        """Plays rounds until all intervals are tight, the budget ends or no seed is left.

        Raises:
            OutputError: The folder holds a comparison with other looks.
        """
        self._claim(comparison, output)
        begun, results = time.monotonic(), list[Result]()
        pairs = comparisons(comparison, with_first=False)
        self.pruned = {problem: {} for problem in comparison.problems}
        for seeds in self.plan.looks(pairs):
            runs = self._runs(comparison, output, seeds)
            waiting = [run for run in runs if not has_result(run)]
            if waiting and not self._affordable(runs, waiting, comparison, begun):
                say(f"The budget ends before {seeds} seeds; the same command goes on")
                break
            results = play(runs)
            if self._look(results, comparison, seeds, pairs, say):
                say(f"All intervals are within {self.plan.until:g} of their middle")
                break
        else:
            say(f"No seed is left of {self.plan.most}")
        return results

    def _runs(self, comparison: Comparison, output: Path, seeds: int) -> list[Run]:
        """Returns the runs of a look; a pruned arm has no seeds after the look that pruned it."""
        return [
            run
            for run in planned(dataclasses.replace(comparison, seeds=seeds), output)
            if run.arm.name not in self.pruned[run.problem]
            or run.seed - comparison.first_seed < self.pruned[run.problem][run.arm.name].seeds
        ]

    def _affordable(
        self, runs: Sequence[Run], waiting: Sequence[Run], comparison: Comparison, begun: float
    ) -> bool:
        known = [read(run).seconds for run in runs if has_result(run)]
        workers = comparison.workers or os.cpu_count() or 1
        ahead = float(np.mean(known)) * math.ceil(len(waiting) / workers) if known else 0.0
        return time.monotonic() - begun + ahead <= self.plan.budget

    def _look(
        self, results: Sequence[Result], comparison: Comparison, seeds: int, pairs: int, say: Say
    ) -> bool:
        """Updates the differences and the arms; returns whether all is known well enough."""
        first, done = comparison.arms[0].name, True
        areas = areas_by_arm(comparison, results)
        if seeds == self.plan.looks(pairs)[0]:
            for line in lines(spreads(areas), self.difference, self.plan.most, pairs):
                say(line)
        for problem, scores in areas.items():
            found = differences(scores, self.plan, pairs, seeds)
            kept = [d for d in self.found.get(problem, []) if d.arm in self.pruned[problem]]
            self.found[problem] = kept + [d for d in found if d.other == first]
            for arm, worse in cannot_win(found, first).items():
                self.pruned[problem][arm] = worse
                say(f"{problem}: no more seeds for {arm}, which cannot win: {worse}")
            alive = [arm for arm in scores if arm not in self.pruned[problem]]
            done &= tight(found, first, alive, self.plan.until)
            widths = [d.width for d in found if d.other == first and d.arm in alive]
            if widths:
                say(f"{problem}, {seeds} seeds: the widest interval is +- {max(widths):.3g}")
        return done

    def _claim(self, comparison: Comparison, output: Path) -> None:
        """Notes the looks, on which the bounds depend."""
        fixed = ("first", "step", "most", "alpha")
        said = {name: getattr(self.plan, name) for name in fixed} | {"metric": comparison.metric}
        note = output / "sequential.json"
        if note.exists() and json.loads(note.read_text()) != said:
            raise OutputError(
                f"{str(output)!r} holds a comparison with the looks {note.read_text()}; expected "
                f"the same, not {json.dumps(said)}, because the intervals depend on them"
            )
        write_text(note, json.dumps(said))


def _common_seeds(runs: Sequence[Run]) -> int:
    """Counts the first seeds of which every run has a result."""
    missing = [run.seed for run in runs if not has_result(run)]
    seeds = [run.seed for run in runs]
    return min(missing, default=max(seeds) + 1) - min(seeds)
