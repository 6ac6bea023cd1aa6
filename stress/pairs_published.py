"""Combinations of settings that others have published, for `pairs.py --published`.

Each has its source, what it sets (sizes are smaller here) and what it sets that this project lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TRL = "huggingface/trl docs/source/paper_index.md"
SKYRL = "NovaSky-AI/SkyRL examples/train/algorithms/"
VERL = "volcengine/verl "
GRPO: dict[str, Any] = {"advantage": "outcome", "advantage.scale": "std", "advantage.ddof": 1}
DAPO: dict[str, Any] = {
    **GRPO, "loss": "grpo", "loss.aggregation": "token_mean", "loss.clip_low": 0.2,
    "loss.clip_high": 0.28, "credit.train_on_truncated": False, "rollout.group_size": 8,
}  # fmt: skip
GSPO: dict[str, Any] = {
    **GRPO, "loss": "gspo", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4,
    "learner.minibatches": 4, "rollout.group_size": 8,
}  # fmt: skip
DR_GRPO: dict[str, Any] = {
    "advantage": "outcome", "advantage.scale": "none", "loss": "dr_grpo", "loss.clip_low": 0.2,
    "loss.clip_high": 0.2, "loss.max_tokens": 24, "rollout.group_size": 8,
}  # fmt: skip
DECAY = {"learner.weight_decay": 0.1}
ONE_TURN = {"env": "dataset"}


@dataclass(frozen=True)
class Published:
    """A published combination."""

    source: str
    settings: dict[str, Any]
    lacking: str = ""


PUBLISHED = {
    "GSPO, TRL": Published(f"{TRL}, arXiv 2507.18071", {**GSPO, **ONE_TURN}),
    "GSPO, verl": Published(
        f"{VERL}examples/gspo_trainer/test_gspo_3b_math.sh",
        {**GSPO, **ONE_TURN, **DECAY, "learner.checkpointing": True},
    ),
    "GSPO-token, EasyR1": Published(
        "verigle/EasyR1 examples/qwen2_5_vl_7b_geo3k_gspo.sh",
        {**GSPO, **ONE_TURN, "learner.minibatches": 1},
        "images in prompts",
    ),
    "DAPO, TRL": Published(f"{TRL}, arXiv 2503.14476", {**DAPO, **ONE_TURN}),
    "DAPO, verl": Published(
        f"{VERL}recipe/dapo/run_dapo_qwen2.5_32b.sh",
        {**DAPO, **ONE_TURN, **DECAY, "supply.max_resamples": 2, "learner.minibatches": 4},
        "a penalty of long answers as a setting: it is part of a reward function",
    ),
    "DAPO with dual clip, SkyRL": Published(
        f"{SKYRL}dapo/run_dapo_gsm8k.sh",
        {**DAPO, **ONE_TURN, **DECAY, "loss.dual_clip": 10.0, "supply.max_resamples": 2,
         "learner.minibatches": 4},
    ),
    "80/20, TRL": Published(
        f"{TRL}, arXiv 2506.01939", {**DAPO, **ONE_TURN, "learner.entropy_share": 0.2}
    ),
    "Dr. GRPO, TRL": Published(f"{TRL}, arXiv 2503.20783", {**DR_GRPO, **ONE_TURN}),
    "Dr. GRPO, SkyRL": Published(
        f"{SKYRL}drgrpo/run_drgrpo_gsm8k.sh", {**DR_GRPO, **ONE_TURN, "learner.minibatches": 4}
    ),
    "Lite PPO, TRL": Published(
        f"{TRL}, arXiv 2508.08221",
        {"advantage": "outcome", "advantage.scale": "batch", "loss": "grpo", **ONE_TURN,
         "loss.aggregation": "token_mean", "rollout.temperature": 0.99, "rollout.group_size": 8},
        "top_p 0.99 and top_k 100",
    ),
    "truncated importance sampling, TRL": Published(
        f"{TRL}, fengyao.notion.site/off-policy-rl",
        {**GRPO, "loss": "grpo", "loss.correction": "truncated", "loss.correction_cap": 2.0,
         "supply.max_staleness": 1},
        "a truncated ratio of the whole sequence (sequence_truncate)",
    ),
    "IcePop": Published(
        "arXiv 2510.18855",
        {**GRPO, "loss": "icepop", "loss.mask_low": 0.5, "loss.mask_high": 5.0,
         "supply.max_staleness": 1},
    ),
    "ScaleRL, TRL": Published(
        f"{TRL}, arXiv 2510.13786",
        {"advantage": "outcome", "advantage.scale": "batch", "loss": "cispo", "loss.cap": 5.0,
         "rollout.group_size": 8, "model_dtype": "bfloat16", "supply.max_staleness": 2},
    ),
    "ScaleRL, SkyRL": Published(
        f"{SKYRL}scalerl/run_scalerl_gsm8k.sh",
        {"advantage": "outcome", "advantage.scale": "batch", "loss": "cispo", "env": "dataset",
         "supply.max_resamples": 2, "supply.max_success": 0.9, "learner.minibatches": 4},
        "the mean over the tokens of a prompt (prompt_mean)",
    ),
    "CISPO, SkyRL": Published(
        f"{SKYRL}cispo/run_cispo_gsm8k.sh",
        {**GRPO, **ONE_TURN, "loss": "cispo", "loss.cap": 5.0, "learner.minibatches": 4},
    ),
    "SAPO, SkyRL": Published(
        f"{SKYRL}sapo/run_sapo_qwen3_4b_aime.sh",
        {**GRPO, **ONE_TURN, **DECAY, "loss": "sapo", "loss.tau_pos": 1.0, "loss.tau_neg": 1.05,
         "learner.minibatches": 4, "credit.train_on_truncated": False},
    ),
    "DeepSeek-V3.2, TRL": Published(
        f"{TRL}, arXiv 2512.02556",
        {**GRPO, "loss": "grpo", "loss.kl_coef": 0.001},
        "KL times the ratio of the policies (use_bias_correction_kl)",
    ),
    "RLOO, TRL": Published(
        f"{TRL}, arXiv 2402.14740",
        {"advantage": "outcome", "advantage.baseline": "leave_one_out", "rollout.group_size": 2,
         "loss": "grpo", "loss.kl_coef": 0.03, "learner.minibatches": 2, **ONE_TURN},
        "KL in the reward: it is in the loss",
    ),
    "RLOO, verl": Published(
        f"{VERL}examples/rloo_trainer/run_qwen2-7b.sh",
        {"advantage": "outcome", "advantage.baseline": "leave_one_out", "rollout.group_size": 8,
         "loss": "grpo", "loss.kl_coef": 0.001, "learner.minibatches": 4, **ONE_TURN},
        "KL in the reward: it is in the loss",
    ),
    "MaxRL, SkyRL": Published(
        f"{SKYRL}maxrl/run_maxrl_gsm8k.sh, arXiv 2602.02710",
        {"advantage": "outcome", "advantage.scale": "mean", "loss": "grpo", "loss.kl_coef": 0.001,
         "learner.minibatches": 4, **ONE_TURN},
    ),
    "REINFORCE++ with a baseline of the group": Published(
        f"{SKYRL}reinforce++/run_reinforce++.sh, arXiv 2501.03262",
        {"advantage": "outcome", "advantage.scale": "batch", "loss": "grpo", "loss.kl_coef": 0.001},
        "a baseline of the batch alone, and KL in the reward (k2)",
    ),
    "GiGPO, verl-agent": Published(
        "langfengQ/DrMAS examples/gigpo_trainer/run_alfworld.sh",
        {"advantage": "gigpo", "advantage.gamma": 0.95, "advantage.scale": "std", "loss": "grpo",
         "advantage.ddof": 1, "loss.kl_coef": 0.01, "rollout.group_size": 8,
         "learner.checkpointing": True},
        "a penalty of invalid actions as a setting: it is the environment's",
    ),
    "MT-GRPO": Published(
        "arXiv 2505.11821",
        {"env": "Both", "advantage": "turn_plus_outcome", "advantage.scale": "std",
         "advantage.turn_weight": 1.0, "loss": "grpo"},
    ),
    "wiki-search, prime-rl": Published(
        "PrimeIntellect-ai/prime-rl configs/basic/wiki-search/rl.toml",
        {"env": "lookup", "advantage": "outcome", "loss": "icepop", "loss.old_logprobs": "engine",
         "rollout.group_size": 8, "learner.lora_rank": 8, "supply.max_staleness": 1},
    ),
    "SPO": Published(
        "arXiv 2509.13232",
        {**GRPO, **ONE_TURN, "advantage.scale": "batch", "loss": "grpo", "rollout.group_size": 1},
        "a baseline of a task over steps: a group of one is refused",
    ),
}  # fmt: skip
"""By the name of the method and of who has published it."""
