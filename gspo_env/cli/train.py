"""`gspo-env train`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo_env import __version__
from gspo_env.cli.options import Run
from gspo_env.redaction import visible
from gspo_env.settings import settings


@settings
class Train(Run):
    """Train a policy with GSPO on a text environment."""

    resume: str = ""
    """Folder of a run to resume with its settings. Only `--steps`, `--stop-at-success`,
    `--save-every` and `--keep` can change, and `--env FILE.py:CLASS` if the file of its environment
    was changed or moved."""

    @classmethod
    def saved(
        cls, folder: str, flags: Mapping[str, Any], env: str | tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the settings of a run to resume."""
        from gspo_env.saved import check_model
        from gspo_env.training.resume import saved_settings

        tree = saved_settings(folder).settings(flags, env=env)
        check_model(Path(folder), str(tree.get("model", "")), str(flags.get("model", "")))
        return tree

    def run(self) -> None:
        """Trains, in this process or as one of several that torchrun started."""
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from gspo_env.distributed.controller import run_as_rank

            run_as_rank(self._train)
        else:
            self._train()

    def _train(self, ranks: Any = None) -> None:
        from gspo_env.env.registration import load_agent, resolve_env
        from gspo_env.health.startup import asks_environments, check_config

        config = self.resolved
        if not self.resume:
            for member in config.environments:  # before the imports, which take seconds
                resolve_env(member.spec)
            if config.model:
                _name_model(config.model)
        if ranks is None:  # which may have begun the run before they were restarted
            check_config(replace(config, output="") if self.resume else config)
            if not self.resume and asks_environments(config):
                from gspo_env.health.episodes import check_comparison

                check_comparison([config])
        print(f"gspo-env {__version__}: loading PyTorch and transformers", flush=True)
        kind = load_agent("gspo")
        together, run = {}, self.resume
        if ranks is not None:
            together["ranks"] = ranks
            from gspo_env.distributed.controller import restarted_run

            run = restarted_run(config) or run
        if not run:
            kind(config=config, **together).train()
            return
        agent = kind.resume(run, config, **together)
        if agent.finished:
            from gspo_env import runs

            flags = "--stop-at-success 0 or --steps" if agent.config.stop_at_success else "--steps"
            print(f"{run} is finished: {runs.Run.open(run).progress}; {flags} adds more")
        else:
            agent.train()


def _name_model(model: str) -> None:
    """Prints which weights and settings a folder of a training gives."""
    from gspo_env.model.weights import find_weights
    from gspo_env.saved import find_saved

    if file := find_saved(model):
        print(visible(f"settings of {file} apply, unless a flag says otherwise"))
        print(visible(f"model {find_weights(model)}"))
