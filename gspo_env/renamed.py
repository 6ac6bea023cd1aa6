"""What serves in place of a name that is removed, or that other libraries use."""

from __future__ import annotations

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
