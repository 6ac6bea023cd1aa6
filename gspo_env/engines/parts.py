"""Actions with `Sampling.ends`, for engines that only know ids that end an action."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from gspo_env.engines.base import Completion, Sampling

_PART = 64
"""Most tokens that are sampled at once."""


async def sample_parts(
    part: Callable[[Sequence[int], Sampling], Awaitable[Completion]],
    prompt_ids: Sequence[int],
    sampling: Sampling,
) -> Completion:
    """Samples an action with `Sampling.ends` through an engine that does not know it.

    The action is sampled in parts, and what follows its end is dropped: what is kept has the
    distribution of an action that stops there.

    Args:
        part: Samples the next ids after a prompt.
        prompt_ids: The prompt.
        sampling: How the whole action is sampled.
    """
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    starts: list[tuple[int, int]] = []
    while True:
        remaining = sampling.max_tokens - len(ids)
        seed = (sampling.seed + len(ids)) % 2**63
        request = replace(sampling, max_tokens=min(remaining, _PART), ends=None, seed=seed)
        done = await part([*prompt_ids, *ids], request)
        starts += version_starts(done, len(ids))
        start, ids, logprobs = len(ids), ids + done.token_ids, logprobs + done.logprobs
        ends = (n for n in range(start + 1, len(ids) + 1) if sampling.ended(ids[:n]))
        end = next(ends, None)
        if end is not None or len(ids) >= sampling.max_tokens:
            reason = "length" if end is None else "stop"
            return Completion.of(ids[:end], logprobs[:end], reason, starts)


def version_starts(done: Completion, before: int = 0) -> list[tuple[int, int]]:
    """Inverse of `version_runs`; `before` tokens precede those of the completion."""
    starts = []
    for version, tokens in done.weights_versions or [(done.weights_version, 0)]:
        starts.append((version, before))
        before += tokens
    return starts
