"""`gspo-env compare`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from gspo_env.cli.options import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Compare(Run):
    """Compare settings over paired seeds.

    The table [compare] of a file holds the same options; [compare.grid] has lists of values,
    [compare.arms.NAME] further arms, and [compare.problems.NAME] changes to the config for each
    problem that the arms are compared on.
    """

    arm: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An axis of the grid, as NAME=VALUE,VALUE: a setting and its values. Repeat it for more."""
    seeds: int = 5
    """Paired seeds."""
    first_seed: int = 0
    """The first of the seeds. Choose another one to confirm a result on seeds that no setting was
    picked with."""
    metric: str = "eval/success"
    """The metric that is compared."""
    target: float = 0.0
    """Also count the episodes until the metric reaches this; 0 turns this off."""
    workers: int = 0
    """Worker processes; 0 is one per core."""
    difference: float = 0.05
    """The difference whose number of seeds is said before the runs, from the spread of earlier
    results, or else of the first seeds."""
    like: str = ""
    """Folder of an earlier comparison whose spread is used."""
    until: float = 0.0
    """Add seeds, in place of playing `seeds`, until each interval of a difference from the first
    arm reaches no further than this from its middle; 0 turns this off. An arm that cannot win gets
    no more seeds."""
    budget: str = ""
    """With `until`: no seeds are added that would be played after this time, such as 90s, 30m or
    2h. The same command goes on."""
    most_seeds: int = 64
    """With `until`: seeds at which the comparison ends in any case."""
    tables: tyro.conf.Suppress[tyro.conf.Fixed[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def take(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Takes the table [compare] out of a file's tree; returns its options."""
        from gspo_env.compare.plan import check_table

        table = check_table(tree.pop("compare", {}))
        options = {f.name: table.pop(f.name) for f in dataclasses.fields(cls) if f.name in table}
        return options | {"tables": table}

    def run(self) -> None:
        """Plays the runs without a result and prints the tables."""
        from pathlib import Path

        from gspo_env.compare import compare, parse
        from gspo_env.compare.rounds import Rounds
        from gspo_env.report.comparison import write_report

        names = ("seeds", "first_seed", "metric", "target", "workers")
        options = {name: getattr(self, name) for name in names}
        comparison = parse(self.tables, self.arm, self.resolved, **options)
        base = next(iter(comparison.problems.values()))
        folder = Path(base.output or "comparisons/comparison")
        command = shlex.join(["gspo-env", *sys.argv[1:]])
        strategy = self._strategy(comparison)
        looks = strategy.found if isinstance(strategy, Rounds) else None
        try:
            compare(
                comparison,
                folder,
                base.tracker,
                lambda line: print(line, flush=True),
                lambda results: write_report(comparison, results, folder, command, looks),
                strategy,
            )
        except KeyboardInterrupt:
            print(f"Stopped. The same command goes on with the results in {folder}.")
            raise
        print_markdown((folder / "tables.md").read_text())
        print(f"Page: {folder / 'report.html'}")

    def _strategy(self, comparison: Any) -> Any:
        """Returns what decides about the runs; says what an earlier comparison's spread means."""
        from math import inf
        from pathlib import Path

        from gspo_env.compare import power
        from gspo_env.compare.rounds import Planned, Rounds, comparisons
        from gspo_env.compare.sequential import Sequential, seconds
        from gspo_env.errors import ConfigError

        if not self.until and self.budget:
            raise ConfigError(f"budget is {self.budget!r} without until; expected both, or neither")
        if not self.difference > 0:
            raise ConfigError(f"difference is {self.difference!r}; expected a number above 0")
        seeds = self.most_seeds if self.until else self.seeds
        if self.like:
            spread = power.spreads(power.earlier(Path(self.like), self.metric))
            count = comparisons(comparison, with_first=not self.until)
            for line in power.lines(spread, self.difference, seeds, count):
                print(f"{self.like}: {line}", flush=True)
        if not self.until:
            return Planned(difference=self.difference)
        budget = seconds(self.budget) if self.budget else inf
        plan = Sequential(until=self.until, budget=budget, most=self.most_seeds)
        return Rounds(plan=plan, difference=self.difference)


def print_markdown(text: str) -> None:
    """Prints a text with its tables drawn, or as it is if stdout is no terminal."""
    from rich.console import Console
    from rich.markdown import Markdown

    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text)
