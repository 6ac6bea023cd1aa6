"""The interface between rollout and engine: token ids in, sampled ids and log-probabilities out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from gspo_env.errors import EngineError
from gspo_env.settings import settings
from gspo_env.types import VersionRuns

if TYPE_CHECKING:
    import torch

NamedTensors = Iterable["tuple[str, torch.Tensor]"]
"""Weights under the names of the model's checkpoint."""
_DRAIN_SECONDS = 600.0
"""Maximum time that an update of the weights waits for requests in flight."""
_LARGEST = 2**63
"""All ids are below it, because arrays hold them as 64-bit integers."""
_SHOWN = 8
"""Wrong values that an error shows."""
_ROUNDING = 1e-4
"""Amount by which rounding may lift a log-probability above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one action is sampled."""

    max_tokens: int
    """Maximum tokens of an action, including the stop id."""
    temperature: float = 1.0
    """0 is greedy; its log-probabilities are those of temperature 1."""
    stop_ids: tuple[int, ...] = ()
    ends: Callable[[Sequence[int]], bool] | None = None
    """Whether the ids sampled so far end the action although no stop id does, such as when their
    text contains a stop text. It may look at the last ids only."""
    seed: int = 0
    """The same seed, prompt and weights give the same action, independent of the batch."""

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the last of the sampled ids ends the action."""
        return token_ids[-1] in self.stop_ids or bool(self.ends and self.ends(token_ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled action."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id at the sampling temperature (natural log)."""
    finish_reason: Literal["stop", "length"]
    weights_version: int
    """The lowest version of the weights that sampled one of the ids."""
    weights_versions: VersionRuns = ()
    """The version of each id, where the weights changed while the action was sampled."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: Any,
        version_starts: Sequence[tuple[int, int]],
    ) -> Completion:
        """Makes a completion; see `version_runs` for `version_starts`."""
        lowest, runs = version_runs(version_starts, len(token_ids))
        return cls(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            weights_version=lowest,
            weights_versions=runs,
        )


class Engine:
    """Samples actions from a policy, as token ids. An engine never sees an environment.

    A subclass implements `generate` and `update_weights`; the other methods do nothing by default.
    """

    copies: int = 0
    """Number of copies of the weights, such as one for each server; training compares them after
    each update. 0 samples with the learner's own weights, so not during an update."""
    dtype: str = ""
    """Dtype of the copies, such as `bfloat16`."""
    tolerance: float | None = None
    """Greatest mean difference of the copies from the trainer's log-probabilities; None follows
    from the dtype."""
    undo_updates: bool = False
    """Whether training undoes an update after which the copies differ by more than `tolerance`."""
    adapter_only: bool = False
    """Whether updates of the weights are those of the learner's LoRA adapter alone."""
    updates_in_flight: bool = False
    """Whether the engine implements `update_in_flight`."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; `session` names the episode, whose earlier turns may be cached."""
        raise NotImplementedError

    async def generate_on(
        self, copy: int, prompt_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        """Samples one action with one of several `copies`, counted from 0."""
        return await self.generate(prompt_ids, sampling)

    def release(self, session: str) -> None:
        """Drops the cache of a session."""

    async def forget(self) -> None:
        """Empties its cache, so that later samples do not depend on earlier requests.

        An engine whose samples have the same bits in a resumed run has to implement it.
        """

    async def sleep(self) -> None:
        """Frees memory for the learner until the next `update_weights`."""

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Waits for requests in flight and loads the weights; later completions carry `version`."""
        raise NotImplementedError

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Loads the learner's weights between two tokens of the requests that run.

        The requests continue with the new weights, and their keys and values are computed anew. So
        each token has the log-probability that the trainer with its version of the weights gives
        it, after the prompt and all tokens before it. `Completion.weights_versions` has the version
        of each.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the engine since its start, which training records."""
        return {}

    def close(self) -> None:
        """Frees everything."""


@settings
class Transformers:
    """Continuous batching in this process, over the learner's own weights or a copy of them."""

    own_weights: bool = False
    """Whether the engine has a copy of the weights, so that it samples while the learner updates
    its own. The copy needs the memory of the weights once more, and during an update that of the
    trained ones a third time."""

    def start(self, model: Any, *, max_slots: int, max_context: int) -> Engine:
        """Starts the engine for a model, one sequence a pass if the model needs that.

        Args:
            model: The learner's causal LM.
            max_slots: Maximum number of concurrent sequences.
            max_context: Maximum tokens of one sequence.

        Raises:
            ModelError: The model gives other log-probabilities with a cache.
        """
        from gspo_env.engines.embedded.start import start_embedded

        return start_embedded(
            model, max_slots=max_slots, max_context=max_context, copy=self.own_weights
        )


def check_room(prompt_ids: Sequence[int], sampling: Sampling, max_context: int) -> None:
    """Checks that a prompt and the longest action fit into the context.

    Raises:
        EngineError: They do not fit, or the prompt is empty.
    """
    if not prompt_ids or len(prompt_ids) + sampling.max_tokens > max_context:
        raise EngineError(
            f"a prompt of {len(prompt_ids)} tokens and an action of {sampling.max_tokens} "
            f"do not fit a context of {max_context} tokens"
        )


def version_runs(starts: Sequence[tuple[int, int]], tokens: int) -> tuple[int, VersionRuns]:
    """Returns `weights_version` and `weights_versions` of a completion.

    Args:
        starts: The versions that were in use, each with the number of tokens sampled before it.
        tokens: Number of tokens of the completion.

    Example:
        >>> version_runs([(3, 0), (4, 5), (5, 9)], 8)
        (3, ((3, 5), (4, 3)))
    """
    if len(starts) == 1:
        return starts[0][0], ()
    ends = [min(start, tokens) for _, start in starts[1:]] + [tokens]
    runs: list[tuple[int, int]] = []
    for (version, start), end in zip(starts, ends, strict=True):
        if end > start and runs and runs[-1][0] == version:
            runs[-1] = version, runs[-1][1] + end - start
        elif end > start:
            runs.append((version, end - start))
    lowest = min((version for version, _ in runs), default=starts[0][0])
    return lowest, tuple(runs) if len(runs) > 1 else ()


async def drained(requests: Callable[[], int], seconds: float = _DRAIN_SECONDS) -> None:
    """Waits until no request is in flight; a cancelled one leaves as soon as the engine sees it.

    Args:
        requests: Returns the number of requests in flight.
        seconds: Maximum time.

    Raises:
        EngineError: Some still run after that time.
    """
    clock = asyncio.get_running_loop()
    deadline = clock.time() + seconds
    while count := requests():
        if clock.time() > deadline:
            raise EngineError(
                f"weights cannot change while requests are running: {count} still run after "
                f"{seconds:g} s"
            )
        await asyncio.sleep(0.0 if seconds - (deadline - clock.time()) < 0.1 else 0.01)


def check_completion(done: Completion, sampling: Sampling, vocab_size: int | None = None) -> None:
    """Checks what an engine returned, before anything is learned from it.

    Args:
        done: The completion.
        sampling: What was asked.
        vocab_size: Number of ids of the model; None if it is unknown.

    Raises:
        EngineError: A field has a wrong type or length, an id or a log-probability is impossible,
            or the reason for the end contradicts the ids.
    """
    if not isinstance(done, Completion):
        raise EngineError(f"an engine returned {type(done).__name__}; expected a Completion")
    try:
        fault = _fault(done, sampling, _LARGEST if vocab_size is None else vocab_size)
    except (TypeError, ValueError, OverflowError) as error:
        fault = "a field", error, "sequences of numbers"
    if fault is not None:
        name, value, expected = fault
        shown = repr(value)
        shown = f"{shown[:100]}..." if len(shown) > 100 else shown
        raise EngineError(f"a completion is malformed: {name} is {shown}; expected {expected}")


def _fault(done: Completion, sampling: Sampling, end: int) -> tuple[str, Any, str] | None:
    """Returns what is wrong with a completion, its value, and what is allowed."""
    ids, logprobs, most = done.token_ids, done.logprobs, sampling.max_tokens
    version, runs = done.weights_version, done.weights_versions
    count = len(ids)
    if not 0 < count <= most:
        return "number of token_ids", count, f"1 to {most}"
    if len(logprobs) != count:
        return "number of logprobs", len(logprobs), f"{count}, as of token_ids"
    if wrong_ids := [i for i in ids if not 0 <= i < end or index(i) != i]:
        return "token_ids", wrong_ids[:_SHOWN], f"ids from 0 to below {end}"
    # no NaN is between two numbers
    if wrong := [p for p in logprobs if not -math.inf < p <= _ROUNDING]:
        return "logprobs", wrong[:_SHOWN], "finite numbers up to 0 (are the weights finite?)"
    if index(version) < 0:
        return "weights_version", version, "an integer from 0"
    covered = [tokens for _, tokens in runs]
    if runs and not (
        min(covered) > 0 and sum(covered) == count and min(v for v, _ in runs) == version
    ):
        expected = f"runs (version, tokens) of {count} tokens, the lowest {version}"
        return "weights_versions", runs, expected
    reason = "stop" if sampling.ended(ids) else "length"
    if done.finish_reason != reason:
        return "finish_reason", done.finish_reason, repr(reason)
    if reason == "length" and count < most:
        return "number of token_ids", count, f"{most}, because no stop id ends them"
    if not set(sampling.stop_ids).isdisjoint(ids[:-1]):
        return "token_ids", ids, "a stop id at the end only"
    return None
