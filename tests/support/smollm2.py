"""Answers of SmolLM2 that an engine samples, as the learner takes them."""

import asyncio

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.engines import Sampling

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France, and what is it known for?",
    "List five uses of a paper clip.",
    "How does a bicycle stay upright?",
)


def sampled_answers(engine, tokenizer, *, before="", answers=2, tokens=48, temperature=1.0):
    """Returns samples of several answers to each question, which follows a text."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": before + question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
        for _ in range(answers)
    ]

    async def sample():
        requests = (
            engine.generate(ids, Sampling(max_tokens=tokens, temperature=temperature, seed=n))
            for n, ids in enumerate(prompts)
        )
        return await asyncio.gather(*requests)

    return [
        Sample(
            token_ids=np.array([*prompt, *done.token_ids]),
            turn_ids=np.repeat([-1, 0], [len(prompt), len(done.token_ids)]),
            advantages=np.ones(len(done.token_ids)),
            engine_logprobs=np.array(done.logprobs),
        )
        for prompt, done in zip(prompts, asyncio.run(sample()), strict=True)
    ]
