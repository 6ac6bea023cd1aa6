"""Makes `trl_cases.json`: losses and gradients of TRL's own GRPO trainer on random numbers.

    pip install "trl==1.16.0" && python tests/data/make_trl_cases.py

`GRPOTrainer._compute_loss` is called as it is; only the model pass before it is replaced, by the
log-probabilities of the case.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from trl import GRPOTrainer

ROWS, TOKENS = 6, 7
VARIANTS = {
    "grpo": {},
    "dr_grpo": {"aggregation": "token_sum", "max_tokens": 11},
    "bnpo": {"aggregation": "token_mean"},
    "delta": {"dual_clip": 1.5},
}
"""Our settings for TRL's loss types, and for its upper bound `delta`."""


def trl_loss(logprobs, case, level, variant):
    """The loss that TRL computes from these log-probabilities."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=0.0,
        loss_type="grpo" if variant == "delta" else variant,
        max_completion_length=11,
        epsilon_low=case["clip_low"],
        epsilon_high=case["clip_high"],
        args=SimpleNamespace(delta=1.5 if variant == "delta" else None),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=Accelerator(cpu=True),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    blank = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    inputs = {
        "prompt_ids": blank[:, :1],
        "prompt_mask": blank[:, :1] + 1,
        "completion_ids": blank,
        "completion_mask": torch.tensor(case["mask"]).double(),
        "advantages": torch.tensor(case["advantages"], dtype=torch.float64),
        "old_per_token_logps": torch.tensor(case["old_logprobs"], dtype=torch.float64),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def main() -> None:
    """Random cases: clipping active and not, both levels, ragged lengths, all variants once."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for clip_low, clip_high, drift in ((3e-4, 4e-4, 3e-3), (0.2, 0.27, 0.8), (0.03, 0.05, 0.5)):
        old = -3 * torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64)
        noise = torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, TOKENS + 1, (ROWS, 1), generator=generator)
        case = {
            "clip_low": clip_low,
            "clip_high": clip_high,
            "old_logprobs": old.tolist(),
            "logprobs": (old + drift * noise).tolist(),
            "mask": (torch.arange(TOKENS) < lengths).tolist(),
            "advantages": torch.randn(ROWS, generator=generator, dtype=torch.float64).tolist(),
        }
        runs = [("sequence", "grpo"), ("token", "grpo")]
        if clip_low == 0.2:
            runs += [("token", variant) for variant in ("dr_grpo", "bnpo", "delta")]
        for level, variant in runs:
            logprobs = torch.tensor(case["logprobs"], dtype=torch.float64, requires_grad=True)
            loss = trl_loss(logprobs, case, level, variant)
            loss.backward()
            answer = {"loss": float(loss.detach()), "gradient": logprobs.grad.tolist()}
            options = {"ratio_level": level, **VARIANTS[variant]}
            cases.append({**case, "options": options, **answer})
    Path(__file__).with_name("trl_cases.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
