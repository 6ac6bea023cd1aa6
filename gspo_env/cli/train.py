"""`gspo-env train`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo_env import __version__
from gspo_env.cli.options import Run
from gspo_env.config import Config, from_dict, to_dict
from gspo_env.redaction import redact, visible
from gspo_env.registry import load_function
from gspo_env.tracking.base import flatten
from gspo_env.trust import find_saved, read_saved

_SHOWN = (
    *("env", "recipe.name", "advantage.name", "loss.name", "engine.name", "tracker.name"),
    *("learner.learning_rate", "steps", "seed"),
)
"""Settings that are named first where a run takes them from a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train(Run):
    """Train a policy with GSPO on a text environment."""

    resume: str = ""
    """Folder of a run to resume with its settings. Only `--steps`, `--save-every` and `--keep` can
    change, and `--env FILE.py:CLASS` if the file of its environment was changed or moved."""

    @classmethod
    def saved(
        cls, folder: str, flags: Mapping[str, Any], env: str | tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the settings of a run to resume."""
        from gspo_env.training.resume import saved_settings

        return saved_settings(folder).settings(flags, env=env)

    def run(self) -> None:
        """Trains, in this process or as one of several that torchrun started."""
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            load_function("gspo_env.distributed.launch:run_as_rank", "launch")(self._train)
        else:
            self._train()

    def _train(self, ranks: Any = None) -> None:
        from gspo_env.env.registration import load_agent, resolve_env
        from gspo_env.tracking.multi import check_trackers

        config = self.resolved
        if not self.resume:
            for member in config.environments:  # before the imports, which take seconds
                resolve_env(member.spec)
            if text := inherited(config):
                print(text)
        check_trackers(config.tracker)  # before demonstrations, which may take long
        print(f"gspo-env {__version__}: loading PyTorch and transformers", flush=True)
        kind = load_agent("gspo")
        together, run = {}, self.resume
        if ranks is not None:
            together["ranks"] = ranks
            restarted_run = load_function("gspo_env.distributed.launch:restarted_run", "launch")
            run = restarted_run(config) or run
        if not run:
            kind(config=config, **together).train()
            return
        agent = kind.resume(run, config, **together)
        if agent.finished:
            steps = agent.config.steps
            print(f"{run} is finished: all {steps} steps are done; --steps adds more")
        else:
            agent.train()


def inherited(config: Config) -> str:
    """Describes the settings that a run takes from the folder of its model; may be empty."""
    saved = read_saved(config.model) if config.model else None
    if saved is None:
        return ""
    new, old, usual = (
        flatten(redact(to_dict(each))) for each in (config, from_dict(saved.tree), Config())
    )
    for name in ("model", "output"):
        new.pop(name)
    same = {k: v for k, v in new.items() if old.get(k) == v != usual.get(k)}
    first = [f"{name.removesuffix('.name')} {same.pop(name)}" for name in _SHOWN if name in same]
    if same:
        first.append(f"{len(same)} more in {find_saved(config.model)}")
    text = ", ".join(first) or "all as by default"
    return visible(f"settings of {config.model}, unless a flag says otherwise: {text}")
