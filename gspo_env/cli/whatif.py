"""`gspo-env whatif`."""

from __future__ import annotations

import math
import shlex
from typing import Annotated, Any

import tyro

from gspo_env import __version__
from gspo_env.cli.replay import OfBatch
from gspo_env.errors import ConfigError
from gspo_env.redaction import visible, write_text
from gspo_env.settings import settings

HEAD = [
    *("arm", "gradient", "cosine", "clipped", "tokens turned", "turns turned"),
    *("best episodes", "worst episodes", "outcome"),
]
"""The columns of `row`."""


def row(name: str, effect: Any) -> list[str]:
    """Formats an effect; what is not known is empty."""

    def shown(value: float, how: str) -> str:
        return "" if math.isnan(value) else format(value, how)

    return [
        *(name, f"{effect.norm:.3g}", shown(effect.cosine, "z.3f"), f"{effect.clipped:.1%}"),
        *(f"{effect.turned_tokens:.1%}", f"{effect.turned_turns:.1%}"),
        *(shown(effect.best, "+z.3f"), shown(effect.worst, "+z.3f")),
        shown(effect.outcome, "+z.4f"),
    ]


@settings
class WhatIf(OfBatch):
    """Show what other settings would do with a kept batch: gradients and updates on its tokens.

    Settings of the command line make an arm beside the run's own; `--arm` adds one for each value.
    """

    arm: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An axis of arms, as NAME=VALUE,VALUE: a setting and its values. Repeat it for more."""
    json: str = ""
    """File that the numbers are also written to."""

    def run(self) -> None:
        """Prints a table with a line for each arm.

        Raises:
            ConfigError: No setting differs from the run's.
        """
        from pathlib import Path

        from gspo_env.cli.compare import print_markdown
        from gspo_env.compare.plan import change, grid, read_axis
        from gspo_env.env.registration import load_agent
        from gspo_env.report.page import Section, markdown_page
        from gspo_env.runs.effects import OWN, to_json

        axes = dict(map(read_axis, self.arm))
        print(f"gspo-env {__version__}: loading PyTorch and transformers", flush=True)
        batch = load_agent("gspo").replay(self.folder, self.step, self.resolved)
        changed = batch.changes(batch.config)
        named = [f"{name}={new}" for name, (_, new) in changed.items()]
        arms = {OWN: batch.own} | ({", ".join(named): batch.config} if changed else {})
        for each in grid(axes) if axes else ():
            name = ", ".join((*named, *(f"{axis}={v}" for axis, v in each.changes.items())))
            arms[name] = batch.allowed(change(batch.config, each.changes))
        if len(arms) == 1:
            raise ConfigError("no setting differs from the run's; expected --arm NAME=VALUE,VALUE")
        effects = batch.effects(arms)
        table = [HEAD, *(row(name, effect) for name, effect in effects.items())]
        title = f"The update of step {batch.step}, on {len(batch.batch.groups)} groups"
        text = (
            "Gradient: norm over the whole batch, and its cosine with the run's. Turned: the sign "
            "of the advantage is not the run's. Episodes: by how many nats the update changes the "
            "log-probability of each group's best and worst. Outcome: by how much it would change "
            "the mean outcome, as this batch tells. One batch is one sample: it "
            "shows what settings do, not which learn better, which gspo-env compare tests."
        )
        print_markdown(markdown_page(title, [Section(table=table), Section(text=text)]))
        if self.json:
            write_text(Path(self.json), to_json(effects))
            print(visible(f"Written to {self.json}"))
        batch.record(effects)
        print(
            visible(
                f"Show it beside the run's other steps: gspo-env view {shlex.quote(self.folder)}"
            )
        )
