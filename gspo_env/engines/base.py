"""The interface between rollout and engine: token ids in, sampled ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from gspo_env.errors import EngineError

if TYPE_CHECKING:
    import torch

NamedTensors = Iterable["tuple[str, torch.Tensor]"]
"""Weights under the names of the model's checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one action is sampled."""

    max_tokens: int
    """Maximum tokens of an action, including the stop id."""
    temperature: float = 1.0
    """0 is greedy; its log-probabilities are those of temperature 1."""
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    """The same seed, prompt and weights give the same action, independent of the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled action."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id at the sampling temperature (natural log)."""
    finish_reason: Literal["stop", "length"]
    weights_version: int


class Engine(Protocol):
    """Samples actions from a policy, as token ids. An engine never sees an environment."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; `session` names the episode, whose earlier turns may be cached."""

    def release(self, session: str) -> None:
        """Drops the cache of a session."""

    async def sleep(self) -> None:
        """Frees memory for the learner until the next `update_weights`."""

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Loads the learner's weights; later completions carry `version`."""

    def close(self) -> None:
        """Frees everything."""


@runtime_checkable
class CopiesWeights(Protocol):
    """An engine with its own copies of the weights: training compares them after each update."""

    copies: int
    """Number of copies, such as one for each server."""
    dtype: str
    """Dtype of the weights, such as `bfloat16`."""
    tolerance: float | None
    """Greatest mean difference from the trainer's log-probabilities; None follows from the dtype.
    """

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """See `Engine.generate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformers:
    """Continuous batching over the learner's own weights, in this process."""

    def start(self, model: Any, *, max_slots: int, max_context: int) -> Engine:
        """Starts the engine with the weights of a model, one sequence a pass if it needs that.

        Args:
            model: The learner's causal LM.
            max_slots: Maximum number of concurrent sequences.
            max_context: Maximum tokens of one sequence.

        Raises:
            ModelError: The model gives other log-probabilities with a cache.
        """
        from gspo_env.engines.transformers import TransformersEngine
        from gspo_env.engines.unbatched import UnbatchedEngine
        from gspo_env.model.check import Way, check_engine

        check = check_engine(model, max_context)
        if check.way is not Way.ALONE:
            return TransformersEngine(model, max_slots=max_slots, max_context=max_context)
        return UnbatchedEngine(
            model, max_slots=max_slots, max_context=max_context, whole_turns=check.whole_turns
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
