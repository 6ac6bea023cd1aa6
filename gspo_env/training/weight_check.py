"""Compares an engine's log-probabilities with the trainer's after an update of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import product

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.engines.base import (
    Completion,
    Engine,
    Sampling,
    check_completion,
)
from gspo_env.errors import EngineError
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
        (generate, prompt, Sampling(max_tokens=max_tokens, temperature=temperature, seed=n))
        for n, (generate, prompt) in enumerate(product(_copies(engine), prompts))
    ]
    completions = await asyncio.gather(
        *(generate(prompt, sampling) for generate, prompt, sampling in requests)
    )
    samples = []
    for (_, prompt, sampling), done in zip(requests, completions, strict=True):
        check_completion(done, sampling, vocab_size)
        samples.append(_sample(prompt, done))
    scores = await run(lambda: [score(sample) for sample in samples])
    pairs = zip(completions, scores, strict=True)
    differences = [np.abs(np.asarray(done.logprobs) - values) for done, values in pairs]
    return float(np.mean(np.concatenate(differences)))


def _copies(engine: Engine) -> list[Callable[[Sequence[int], Sampling], Awaitable[Completion]]]:
    """Returns a function for each copy of the engine, which samples with it if it can be chosen."""
    return [partial(engine.generate_on, copy) for copy in range(max(1, engine.copies))]


def _sample(prompt: Sequence[int], done: Completion) -> Sample:
    return Sample(
        token_ids=np.asarray([*prompt, *done.token_ids], dtype=np.int64),
        turn_ids=np.asarray([-1] * len(prompt) + [0] * len(done.token_ids), dtype=np.int64),
        advantages=np.zeros(len(done.token_ids)),
        engine_logprobs=np.asarray(done.logprobs),
    )


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
        EngineError: The difference is above the bound, or the engine does not answer.
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
        raise EngineError(
            "after an update of the weights, the engine's log-probabilities of a probe differ from "
            f"the trainer's by {difference_mean:.3g} on average; expected at most {bound:g} in "
            f"{' and '.join(sorted(dtypes))}: the engine computes another model, or some weights "
            "did not reach it; choose the engine `transformers`, or raise sync_tolerance of this "
            "one if you know why they differ"
        )
    return {"train/sync_logprob_diff": difference_mean}
