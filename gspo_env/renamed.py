"""What serves in place of a name that is wrong, removed, or of another library."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection
from typing import Any

from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, find, name_of

_TRL = {
    "beta": "loss.kl_coef",
    "bf16": "model_dtype",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "gradient_checkpointing": "learner.checkpointing",
    "importance_sampling_level": "loss.ratio_level",
    "max_completion_length": "rollout.max_turn_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_generations": "rollout.group_size",
    "num_iterations": "learner.minibatches",
    "output_dir": "output",
    "report_to": "tracker",
    "scale_rewards": "advantage.scale",
    "torch_dtype": "model_dtype",
    "use_vllm": "engine",
    "vllm_mode": "engine",
}
_DROPOUT = "dropout is off, because the policy that trains has to be the one that was sampled"
_BRANCHES = "it is a setting of --branching studies/credit/branches.py:Every"

REMOVED = {
    **{name: f"it is called {setting}" for name, setting in _TRL.items()},
    "dropout": _DROPOUT,
    "lora_dropout": _DROPOUT,
    "command.report": "`gspo-env view RUN` shows one run, MLflow compares many",
    "budget": _BRANCHES,
    "continuations": _BRANCHES,
    "every": _BRANCHES,
}
"""By name: a setting's, such as `beta` or `rollout.beta`, or `command.` with that of a command."""

_NO_ADAPTER = "it has no built-in adapter; docs/built-in.md shows how to write one"

ENVIRONMENTS = {
    **dict.fromkeys(("gspo/GEM-v0", "gspo/MiniGrid-v0", "gspo/SkyRL-v0"), _NO_ADAPTER),
    **{
        f"gspo/{name}-v0": f"it is studies/diagnostics.py:{name}Env in the repository"
        for name in ("Density", "Distractor", "Misleading", "Recurring")
    },
}
"""What serves in place of an environment that is gone."""


def instead_of(*names: str) -> str:
    """Returns what serves in place of the first of these names that has an entry, or nothing."""
    return next((REMOVED[name] for name in names if name in REMOVED), "")


def hint_for_flag(config: Any, name: str, paths: Collection[str]) -> str:
    """Returns a hint for a flag: the choice that has the setting, or those with similar names.

    Args:
        config: The config.
        name: The flag, dotted.
        paths: The dotted names of all settings.
    """
    section, _, last = name.rpartition(".")
    if instead := instead_of(name, last):
        return f": {instead}"
    for kind in BUILTIN:
        if section in ("", kind) and (hint := _owners(kind, getattr(config, kind), last)):
            return hint
    lasts = {path.rpartition(".")[2]: path for path in paths}
    near = " or ".join(lasts[n] for n in difflib.get_close_matches(last, lasts, n=3))
    return f"; perhaps you mean {near}" if near else "; `gspo-env train --help all` lists all"


def unknown_field(table: Any, name: str, where: str, paths: Collection[str]) -> str:
    """Returns the sentence for a field that a table of settings lacks.

    Args:
        table: The settings.
        name: The field.
        where: The dotted name of the table with a dot behind it; empty for the whole config.
        paths: The dotted names of the settings of a neutral config.
    """
    if instead := instead_of(where + name, name):
        return f"there is no setting {where}{name}: {instead}"
    names = [f.name for f in dataclasses.fields(table)]
    hint = _owners(where[:-1], table, name) if where[:-1] in BUILTIN else ""
    if not hint and (others := [path for path in paths if path.rpartition(".")[2] == name]):
        hint = f"; did you mean {' or '.join(others)}?"
    near = ", ".join(difflib.get_close_matches(name, names, n=3) or sorted(names)) or "nothing"
    return f"unknown field {where}{name!r}{hint or f'; expected one of: {near}'}"


def _owners(kind: str, choice: Any, setting: str) -> str:
    """Returns which choices of a kind have a setting, and what the present one takes."""
    owners = [n for n in BUILTIN[kind] if any(f.name == setting for f in _settings(kind, n))]
    takes = ", ".join(f.name for f in dataclasses.fields(choice)) or "nothing"
    other = f"{kind} is {name_of(kind, choice)!r}, which takes {takes}"
    hint = f"; to select one, add --{kind} {owners[0]}" if len(owners) > 1 else ""
    return f": it is a setting of {', '.join(owners)}, and {other}{hint}" if owners else ""


def _settings(kind: str, name: str) -> tuple[dataclasses.Field[Any], ...]:
    try:
        return dataclasses.fields(find(kind, name))
    except ConfigError:  # its library is missing
        return ()
