"""A program of two ranks: trains on both and in one process, and writes how much they differ.

Rank 0 writes a JSON object with a result for each case to the file that is its argument.
"""

import copy
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a program
from gspo_env.batch.sample import Sample
from gspo_env.distributed.controller import Controller, Plan, serve
from gspo_env.distributed.ranks import join
from gspo_env.errors import GspoEnvError
from gspo_env.learner import GRPO, GSPO, DrGRPO, Learner, LearnerConfig
from gspo_env.model.adapters import add_adapter
from support import architectures
from support.learners import sample_of

LOSSES: dict[str, Any] = {
    **{"GSPO": GSPO, "GRPO": GRPO, "DrGRPO": DrGRPO},
    "stale turns": partial(
        GRPO, aggregation="turn_mean", clip_low=0.01, clip_high=0.01, clip_staleness=-1.0
    ),
}
PLAIN = {
    "minibatches": 1,
    "warmup_steps": 0,
    "learning_rate": 1.0,
    "max_grad_norm": 0.0,
    "optimizer": "torch.optim:SGD",  # a weight less its value before is the gradient
    "microbatch_tokens": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "tied head": {"tied": True},
    "LoRA": {"config": {"lora_rank": 2}},
    "LoRA, tied head": {"config": {"lora_rank": 2}, "tied": True},
    "one rank has no episode": {"count": 1},
    "one rank has no episode, LoRA": {"count": 1, "config": {"lora_rank": 2}},
    "three episodes": {"count": 3},
    "clipped": {"config": {"max_grad_norm": 0.5}},
    "token loss": {"loss": "GRPO"},
    "constant length": {"loss": "DrGRPO"},
    "a mean of each turn, a clip by age": {
        "loss": "stale turns",
        "updates": 2,
        "config": {"minibatches": 2, "learning_rate": 0.1},
    },
    "an entropy that adapts": {
        "updates": 2,
        "config": {"minibatches": 2, "entropy_coef": 0.1, "entropy_target": 9.0},
    },
    "episodes of several sequences over several rows": {"sequences": 3, "updates": 2},
    "minibatches, reference": {
        "kl": 0.1,
        "updates": 2,
        "config": {"minibatches": 3, "learning_rate": 0.1},
    },
    "minibatches, reference, LoRA": {
        "kl": 0.1,
        "updates": 2,
        "config": {"minibatches": 3, "learning_rate": 0.1, "lora_rank": 2},
    },
    "checkpointing": {"config": {"checkpointing": True}},
    "mixture of experts": {"model": "mixture"},
    "own attention, a sequence a row": {"model": "alone"},
    "a step without a finite gradient": {"infinite": True, "updates": 2},
}


def shape(kind: str, tied: bool) -> Any:
    """A tiny model with random weights, large enough to prefer some ids."""
    if kind == "alone":
        return architectures.build("LFM2", mark_ids=[5, 60]).double()
    small = {"hidden_size": 16, "num_hidden_layers": 2, "mark_ids": [5, 60]}
    if kind == "mixture":
        # the balance of routers would be over other rows; the kernel of experts has no float64
        return architectures.build("Qwen3-MoE", router_aux_loss_coef=0.0, **small)
    return architectures.build("Qwen3", tie_word_embeddings=tied, **small).double()


def samples_of(count: int, sequences: int, infinite: bool) -> list[Sample]:
    """Samples of different lengths, `sequences` of each episode."""
    rng = np.random.default_rng(0)
    found = []
    for n in range(count * sequences):
        length = int(rng.integers(5, 45))
        turns = np.where(rng.random(length) < 0.5, np.arange(length) // 8, -1)
        turns[0], turns[-1] = -1, length // 8
        fields = {"advantages": np.full((turns >= 0).sum(), np.inf)} if infinite and n == 0 else {}
        episode = n // sequences if sequences > 1 else None
        tokens = rng.integers(1, 97, length)
        found.append(sample_of(rng, tokens, turns, episode=episode, **fields))
    return found


def plan_of(text: str) -> Plan:
    told = json.loads(text)
    return Plan(
        loss=LOSSES[told["loss"]](kl_coef=told["kl"]),
        config=LearnerConfig(**told["config"]),
        total_steps=8,
        temperature=1.0,
    )


def shown(tokens: Any) -> dict[str, Any]:
    """The ratios and entropies of kept tokens, by episode and turn."""
    return {str(key): [v.ratio.tolist(), v.entropy.tolist()] for key, v in sorted(tokens.items())}


def compare(ranks: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Trains on the ranks and in this process; returns how much weights and metrics differ."""
    settings = LearnerConfig(**{**PLAIN, **case.get("config", {})})
    told = {"loss": case.get("loss", "GSPO"), "kl": case.get("kl", 0.0), "config": asdict(settings)}
    plan = plan_of(json.dumps(told))
    whole = shape(case.get("model", ""), case.get("tied", False))
    if settings.lora_rank:
        whole = add_adapter(whole, settings.lora_rank)
        for name, weight in whole.named_parameters():
            if "lora_B" in name and not plan.loss.needs_reference:
                weight.data.normal_(std=0.1)
    plain = replace(settings, lora_rank=settings.lora_rank)
    alone = Learner(copy.deepcopy(whole), plan.loss, plain, total_steps=8)
    begun = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    together = Controller(ranks, whole, plan, json.dumps(told))
    found: dict[str, Any] = {}
    for update in range(case.get("updates", 1)):
        infinite = case.get("infinite", False) and update == 0
        samples = samples_of(case.get("count", 9), case.get("sequences", 1), infinite)
        one, two = (each.update(samples, update, range(4)) for each in (alone, together))
        found[f"tokens {update}"] = {"one": shown(alone.tokens), "two": shown(together.tokens)}
        found[f"metrics {update}"] = {"one": one, "two": two}
    weights = dict(alone.policy.named_parameters())
    pairs = [(weights[name], weight) for name, weight in whole.named_parameters()]
    found["difference"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    moved = [float((weight - begun[name]).detach().abs().max()) for name, weight in weights.items()]
    return found | {"moved": max(moved)}


def main() -> None:
    torch.set_num_threads(1)
    with join() as ranks:
        if ranks.rank:
            serve(ranks, plan_of)
            return
        results: dict[str, Any] = {}
        for name in sys.argv[2:] or CASES:
            case = CASES[name]
            try:
                results[name] = compare(ranks, case)
            except GspoEnvError as error:
                results[name] = {"error": str(error)}
                break
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
