"""Losses, models and samples that the tests on a pretend GPU share."""

from dataclasses import replace

import numpy as np
from conftest import make_samples

from gspo_env.learner import GRPO, GSPO, DrGRPO
from support import architectures

LOSSES = {
    "GSPO": GSPO(),
    "GRPO": GRPO(dual_clip=3.0),
    "DrGRPO": DrGRPO(),
    "turns": GSPO(ratio_level="turn", ratio_mean=0.5),
    "DAPO": GSPO(ratio_level="token", aggregation="token_mean"),
    "KL": GSPO(kl_coef=0.1),
    "truncated": GSPO(correction="truncated"),
    "mask": GSPO(correction="mask", ratio_mean=1.0),
    "engine": GSPO(old_logprobs="engine"),
}


def with_prefix(rng, count=6, length=40):
    """Samples that share their first tokens."""
    prefix = rng.integers(1, 200, length)
    return [
        replace(
            sample,
            token_ids=np.concatenate([prefix, sample.token_ids]),
            turn_ids=np.concatenate([np.full(length, -1), sample.turn_ids]),
        )
        for sample in make_samples(rng, count)
    ]


def experts():
    return architectures.build("Mixtral", vocab_size=200, router_aux_loss_coef=0.1)


def hybrid():
    """A model with linear attention, which takes one sequence a row."""
    return architectures.build("Qwen3.5", vocab_size=260)
