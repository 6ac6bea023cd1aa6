"""`gspo-env replay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro
from annotated_types import Ge

from gspo_env import __version__
from gspo_env.cli.options import Run, read_options
from gspo_env.errors import ConfigError, figure
from gspo_env.redaction import visible
from gspo_env.settings import settings

_SHOWN = ("train/loss", "train/grad_norm", "train/clipped_fraction", "train/kl", "train/entropy")
"""The metrics that are printed, as far as there are any."""


@settings
class OfBatch(Run):
    """A command that starts from the settings of a kept batch."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of a run that trained with `--keep-batches`."""
    step: Annotated[int, Ge(0)] | None = None
    """Step of the update; the newest that is kept by default."""

    @classmethod
    def folder_of(cls, options: Sequence[str]) -> str:
        """Returns the folder of the batch."""
        from gspo_env.training.batches import find_batch

        command = read_options(cls.__name__.lower(), cls(), [o for o in options if o != "--help"])
        if not command.folder:
            if "--help" in options:
                return ""
            raise ConfigError("expected the folder of a run")
        return str(find_batch(command.folder, command.step))

    @classmethod
    def saved(
        cls, folder: str, flags: Mapping[str, Any], env: str | tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the settings of the batch."""
        from pathlib import Path

        from gspo_env.saved import check_model
        from gspo_env.training.batches import batch_settings

        tree = batch_settings(Path(folder)).settings(flags, env=env)
        run = Path(folder).parents[1]
        check_model(run, str(tree.get("model", "")), str(flags.get("model", "")))
        return tree


@settings
class Replay(OfBatch):
    """Take the update of a kept batch again, with the same or with other settings.

    With other settings, or an `--output` of its own, the result is written as a run that
    `train --resume` continues.
    """

    def run(self) -> None:
        """Prints how the update differs from the run's, and where it is."""
        print(f"gspo-env {__version__}: loading PyTorch and transformers", flush=True)
        from gspo_env.env.registration import load_agent

        batch = load_agent("gspo").replay(self.folder, self.step, self.resolved)
        changes = batch.changes(batch.config)
        update = batch.update()
        tokens = sum(int(sample.mask.sum()) for sample in update.samples)
        print(f"batch    step {batch.step}: {len(update.places)} episodes, {tokens} tokens")
        for name, (old, new) in changes.items():
            print(visible(f"changed  {name} from {old!r} to {new!r}"))
        difference = batch.difference(update)
        if difference is None:
            print(f"weights  the run has kept none after step {batch.step} to compare with")
        elif difference:
            print(f"weights  differ from the run's by up to {difference:.3g}")
        else:
            print("weights  equal those of the run to the last digit")
        for name in _SHOWN:
            if name in update.metrics:
                print(f"{name.removeprefix('train/')}  {figure(update.metrics[name], '.6g')}")
        if changes or batch.config.output != batch.own.output:
            folder = batch.save(update)
            print(visible(f"saved    resume with: gspo-env train --resume {folder}"))
