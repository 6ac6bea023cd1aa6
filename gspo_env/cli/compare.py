"""`gspo-env compare`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import field
from typing import Annotated, Any

import tyro

from gspo_env.cli.options import Run
from gspo_env.errors import TrainingError
from gspo_env.redaction import visible
from gspo_env.settings import settings


@settings
class Compare(Run):
    """Compare settings over paired seeds.

    The table [compare] of a file holds the same options; [compare.grid] has lists of values,
    [compare.arms.NAME] further arms, and [compare.problems.NAME] changes to the config for each
    problem that the arms are compared on.
    """

    arm: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An axis of the grid, as NAME=VALUE,VALUE: a setting and its values. Repeat it for more."""
    seeds: int | None = None
    """Paired seeds: 8 if not given, or the fewest that can show a difference; 2 of a pilot."""
    pilot: bool = False
    """Measure how much runs scatter, and say how many seeds show a difference of 0.05. The same
    command without it goes on with the runs that are there."""
    sequential: bool = False
    """Test after a half, three quarters and all of the seeds, and end once every arm is decided.
    The looks share the level, so a false claim is as rare; a little power is lost."""
    first_seed: int = 0
    """The first of the seeds. Choose another one to confirm a result on seeds that no setting was
    picked with."""
    metric: str = "eval/success"
    """The metric that is compared."""
    target: float = 0.0
    """Also count the episodes until the metric reaches this; 0 turns this off."""
    workers: int = 0
    """Worker processes; 0 is one per core."""
    tables: tyro.conf.Suppress[tyro.conf.Fixed[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def take(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Takes the table [compare] out of a file's tree; returns its options."""
        from gspo_env.compare.plan import check_table

        table = check_table(tree.pop("compare", {}))
        options = {f.name: table.pop(f.name) for f in dataclasses.fields(cls) if f.name in table}
        return options | {"tables": table}

    def run(self) -> None:
        """Plays the runs that are not finished and prints the tables.

        Raises:
            TrainingError: All runs failed.
        """
        from pathlib import Path

        from gspo_env.compare import compare, parse
        from gspo_env.report.comparison import METHODS, is_decided, write_report

        names = ("seeds", "first_seed", "metric", "target", "workers", "pilot", "sequential")
        options = {name: getattr(self, name) for name in names}
        comparison = parse(self.tables, self.arm, self.resolved, **options)
        base = next(iter(comparison.problems.values()))
        folder = Path(base.output or "comparisons/comparison")
        command = shlex.join(["gspo-env", *sys.argv[1:]])
        try:
            results = compare(
                comparison,
                folder,
                base.tracker,
                lambda line: print(visible(line), flush=True),
                lambda results: write_report(comparison, results, folder, command),
                lambda results: is_decided(comparison, results),
            )
        except KeyboardInterrupt:
            print(f"Stopped. The same command resumes with the results in {folder}.")
            raise
        print_markdown((folder / "report.md").read_text("utf-8").partition(f"## {METHODS}")[0])
        print(f"Page: {folder / 'report.html'}")
        if all(result.error for result in results):
            raise TrainingError(f"all {len(results)} runs failed; the first: {results[0].error}")


def print_markdown(text: str) -> None:
    """Prints a text with its tables drawn, or as it is if stdout is not a terminal."""
    from rich.console import Console
    from rich.markdown import Markdown

    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text)
