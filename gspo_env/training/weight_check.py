"""Compares an engine's log-probabilities with the trainer's after an update of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import product

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.engines.base import Engine, Sampling, check_completion
from gspo_env.errors import EngineError, above
from gspo_env.learner.settings import Trainer
from gspo_env.rollout.collector import Collector
from gspo_env.runtime.loops import ActiveTimeout
from gspo_env.types import FloatArray

TOLERANCE = {"float32": 1e-3}
"""Greatest mean difference by dtype. Engine and trainer compute the same in another order; a right
update differs by 1e-6, and by less than 1e-4 with long sums on a GPU."""
HALF_TOLERANCE = 0.3
"""The same in half precision, where engine and trainer differ about as much as the trainer differs
from itself in float32. Measured on random networks of 4 and 8 layers: 0.01 in float16; in bfloat16
0.03 to 0.07, and 0.05 to 0.18 with experts, since rounding can choose another expert."""

_TEXTS = (
    "Hello!",
    "Count from one to twenty in words, then explain in two sentences why the sky is blue.",
    'Call the tool with {"name": "lookup", "arguments": {"key": "amber"}} and report its result.',
    "A train leaves at 9:40 and arrives at 11:05. How many minutes does it take? Think first.",
)
_NEW_TOKENS = 16


class WeightsDifferError(EngineError):
    """Engine and trainer differ by more than the bound after an update of the weights."""

    def __init__(self, message: str, difference: float) -> None:
        super().__init__(message)
        self.difference = difference


Run = Callable[[Callable[[], list[FloatArray]]], Awaitable[list[FloatArray]]]
"""Runs a function, such as in another thread."""


async def _run_inline(function: Callable[[], list[FloatArray]]) -> list[FloatArray]:
    return function()


async def difference(
    engine: Engine,
    score: Callable[[Sample], FloatArray],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    run: Run = _run_inline,
) -> float:
    """Samples a continuation of each prompt and has the trainer score the same tokens.

    Each copy of the engine gets every prompt.

    Args:
        engine: The engine, which serves all prompts at the same time.
        score: Returns the trainer's log-probabilities (N,) of a sample's model tokens.
        prompts: Token ids.
        max_tokens: Length of each continuation.
        temperature: Of both log-probabilities.
        vocab_size: See `gspo_env.engines.check_completion`.
        run: Runs the trainer's computation.

    Returns:
        Mean absolute difference of the log-probabilities over all sampled tokens (natural log).
    """
    requests = [
        (copy, prompt, Sampling(max_tokens=max_tokens, temperature=temperature, seed=n))
        for n, (copy, prompt) in enumerate(product(range(max(1, engine.copies)), prompts))
    ]
    completions = await asyncio.gather(*(engine.generate_on(*request) for request in requests))
    samples = []
    for (_, prompt, sampling), done in zip(requests, completions, strict=True):
        check_completion(done, sampling, vocab_size)
        count = len(done.token_ids)
        samples.append(
            Sample(
                token_ids=np.asarray([*prompt, *done.token_ids], dtype=np.int64),
                turn_ids=np.asarray([-1] * len(prompt) + [0] * count, dtype=np.int64),
                advantages=np.zeros(count),
                engine_logprobs=np.asarray(done.logprobs),
            )
        )
    scores = await run(lambda: [score(sample) for sample in samples])
    engine_logprobs = [np.asarray(done.logprobs) for done in completions]
    return float(np.mean(np.abs(np.concatenate(engine_logprobs) - np.concatenate(scores))))


async def check_sync(
    collector: Collector, learner: Trainer, run: Run = _run_inline
) -> dict[str, float]:
    """Compares engine and trainer on fixed prompts, if the engine has a copy of the weights.

    Args:
        collector: Has the engine.
        learner: The trainer.
        run: Runs the trainer's computation.

    Returns:
        The metric `train/sync_logprob_diff`; nothing for an engine on the learner's own weights.

    Raises:
        WeightsDifferError: The difference is above the bound.
        EngineError: The engine does not answer.
    """
    engine, limits = collector.engine, collector.config
    if not engine.copies:
        return {}
    new = min(_NEW_TOKENS, limits.max_turn_tokens)
    prompts = [collector.chat.start(text)[: limits.max_context - new] for text in _TEXTS]

    def score(sample: Sample) -> FloatArray:
        row = learner.pack([sample])
        return learner.logprobs(row).double().cpu().numpy()

    clock = ActiveTimeout(limits.episode_timeout)
    try:
        async with clock:
            difference_mean = await difference(
                engine,
                score,
                prompts,
                max_tokens=new,
                vocab_size=collector.vocab_size,
                temperature=limits.temperature,
                run=run,
            )
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise EngineError(
            f"after an update of the weights, the engine did not answer a probe of {new} tokens "
            f"within {limits.episode_timeout:g} s (rollout.episode_timeout)"
        ) from error
    dtypes = {engine.dtype, str(next(learner.policy.parameters()).dtype).removeprefix("torch.")}
    usual = max(TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in dtypes)
    bound = usual if engine.tolerance is None else engine.tolerance
    if not difference_mean <= bound:
        raise WeightsDifferError(
            "after an update of the weights, the engine's log-probabilities of a probe differ from "
            f"the trainer's by {above(difference_mean, bound)} on average; expected at most "
            f"{bound:g} in {' and '.join(sorted(dtypes))}: the engine computes another model, or "
            "some weights did not reach it; choose the engine `transformers`, or raise "
            "sync_tolerance of this one if you know why they differ",
            difference_mean,
        )
    return {"train/sync_logprob_diff": difference_mean}
