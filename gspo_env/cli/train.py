"""`gspo-env train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo_env import __version__
from gspo_env.cli.options import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Train(Run):
    """Train a policy with GSPO on a text environment."""

    resume: str = ""
    """Folder of a run to go on with, under its own settings; only `--steps`, `--save-every` and
    `--keep` may be given with it."""

    @classmethod
    def saved(cls, folder: str, given: Mapping[str, Any], env: str) -> dict[str, Any]:
        """Returns the settings of a run to go on with."""
        from gspo_env.training.state import newest_settings

        return newest_settings(folder).settings(given, env=env)

    def run(self) -> None:
        """Trains."""
        from gspo_env.env.registration import load_agent
        from gspo_env.tracking.several import check_trackers

        config = self.resolved
        check_trackers(config.tracker)  # before demonstrations, which may take long
        # before the imports, which take seconds
        print(f"gspo-env {__version__}: loading PyTorch and transformers", flush=True)
        kind = load_agent("gspo")
        if not self.resume:
            kind(config=config).train()
            return
        agent = kind.resume(self.resume, config)
        if agent.finished:
            steps = agent.config.steps
            print(f"{self.resume} is finished: all {steps} steps are done; --steps adds more")
        else:
            agent.train()
