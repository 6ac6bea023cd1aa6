"""Samples without a cache: `gspo-env train --engine examples/own_engine.py:Plain`."""

import random
from dataclasses import dataclass

import torch

from gspo_env.engines import Completion, Engine
from gspo_env.engines.embedded.engine import sample
from gspo_env.model.attention import PackedAttention


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Computes the whole sequence again for each token, with the weights of the learner."""

    def start(self, model, *, max_slots, max_context):
        return PlainEngine(model)


class PlainEngine(Engine):
    def __init__(self, model):
        self.model, self.version = model.eval(), 0

    @torch.inference_mode()
    async def generate(self, prompt_ids, sampling, session=None):
        ids, logprobs, draw = list(prompt_ids), [], random.Random(sampling.seed).random
        while len(logprobs) < sampling.max_tokens and not (
            logprobs and ids[-1] in sampling.stop_ids
        ):
            row = self.model(torch.tensor([ids]), ragged=PackedAttention([len(ids)]))
            [token], [logprob] = sample(row.logits[:, -1], [sampling.temperature], [draw()])
            ids.append(token)
            logprobs.append(logprob)
        reason = "stop" if ids[-1] in sampling.stop_ids else "length"
        taken = {"token_ids": tuple(ids[len(prompt_ids) :]), "logprobs": tuple(logprobs)}
        return Completion(**taken, finish_reason=reason, weights_version=self.version)

    async def update_weights(self, named_tensors, version):
        self.version = version  # the weights are the learner's own
