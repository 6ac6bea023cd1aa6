"""What people look for under another name: settings that are gone, and those of other libraries."""

from __future__ import annotations

_RENAMED = {
    "embedded": "recipe",
    "held_out_tasks": "eval_tasks",
    "history": "rewritten_history",
    "match_rms": "credit.rms",
    "objective": "loss",
    "precision": "model_dtype",
    "timeout": "rollout.episode_timeout",
    "tracking": "tracker",
    # options of TRL
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
    **{name: f"it is called {setting}" for name, setting in _RENAMED.items()},
    "train_on_truncated": "it is called credit.train_on_truncated",
    "dropout": _DROPOUT,
    "lora_dropout": _DROPOUT,
    "profile": "run with `torch.profiler`: `with torch.profiler.profile() as trace: agent.train()`,"
    " then `trace.export_chrome_trace('trace.json')`",
    "view.live": "run `gspo-env view` again, which writes the page anew",
    "view.port": "`gspo-env view` writes a file and opens it",
    "supply.straggler_quantile": "bound an episode with --episode-timeout, or let the rollout"
    " continue during updates with --max-staleness",
    "compare.until": "choose --seeds; the report says which differences they can show",
    "compare.budget": "Ctrl-C stops a comparison, and the same command resumes it",
    "compare.most_seeds": "choose --seeds",
    "compare.like": "the report of the earlier comparison says which differences its seeds show",
    "compare.difference": "the report says which differences the seeds can show",
    "command.report": "`gspo-env view RUN` shows one run, MLflow compares many",
    "budget": _BRANCHES,
    "continuations": _BRANCHES,
    "every": _BRANCHES,
    "cache": "every run warms up its model anew, which takes seconds",
    "train.processes": "start the processes with `torchrun --standalone --local-addr 127.0.0.1"
    " --nproc-per-node N -m gspo_env train`",
    "train.max_restarts": "pass --max-restarts to torchrun, and --output to `gspo-env train`",
}
"""What serves in place of a setting or a flag that is gone, or that people expect.

A key has underscores; it is the name alone, or with what stands before it: the section of the
settings, such as `rollout.NAME`, or the command, such as `view.NAME`.
"""

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
    """Returns what serves in place of the first of these names that is in `REMOVED`, or nothing."""
    return next((REMOVED[name] for name in names if name in REMOVED), "")
