"""Starts the embedded engine, after checking that it samples from the model's own distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_env.engines.base import Engine
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.engines.embedded.kv_cache import KVCache
from gspo_env.errors import ModelError
from gspo_env.model.check import (
    LONG,
    SHARED_TOKENS,
    Difference,
    ModelCheck,
    ModelProbe,
    RunMode,
    check_model,
    model_name,
    note_check,
    noted_check,
)

if TYPE_CHECKING:
    from gspo_env.engines.embedded.unpacked import UnbatchedEngine

_NOTE = "_gspo_engine_check"


def start_embedded(model: Any, *, max_slots: int, max_context: int, copy: bool = False) -> Engine:
    """Starts the engine for a model; see `gspo_env.engines.Transformers.start`.

    Args:
        model: The learner's causal LM.
        max_slots: Maximum number of concurrent sequences.
        max_context: Maximum tokens of one sequence.
        copy: Whether the engine gets a copy of the weights.
    """
    check = check_engine(model, max_context)

    def start(model: Any) -> TransformersEngine | UnbatchedEngine:
        if check.mode is not RunMode.UNPACKED:
            return TransformersEngine(model, max_slots=max_slots, max_context=max_context)
        from gspo_env.engines.embedded.unpacked import UnbatchedEngine

        return UnbatchedEngine(
            model, max_slots=max_slots, max_context=max_context, whole_turns=check.whole_turns
        )

    if not copy:
        return start(model)
    from gspo_env.engines.embedded.copy import CopyEngine

    return CopyEngine(model, start)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCheck:
    """How the embedded engine runs a model."""

    mode: RunMode
    reason: str = ""
    """Why no faster mode is taken; empty for the fastest."""
    batches: Difference | None = None
    """Of continuous batching."""
    model_cache: Difference | None = None
    """Of the model's own cache; None if it is not used."""
    whole_turns: bool = True
    """Whether the own cache takes several new tokens in one pass."""


def check_engine(model: Any, max_context: int) -> EngineCheck:
    """Checks a model that the embedded engine is to run, and notes the result for later calls.

    If batches of the engine give other log-probabilities, the model is run one sequence at a time,
    by the learner too; so call this before a learner is made.

    Raises:
        ModelError: Its own cache gives other log-probabilities, or `max_context` is too large.
    """
    prepared = noted_check(model) is not None
    check = check_model(model, max_context=max_context)
    if check.longest is not None and max_context > check.longest:
        raise ModelError(
            f"{model_name(model)} changes the positions of all tokens of a sequence beyond "
            f"{check.longest} tokens, so those in a cache become wrong; max_context is "
            f"{max_context}, expected at most {check.longest}"
        )
    noted: EngineCheck | None = getattr(model, _NOTE, None)
    if noted is None or noted.mode is not check.mode:
        noted = _measure(model, check, prepared)
        setattr(model, _NOTE, noted)
    return noted


def _measure(model: Any, check: ModelCheck, prepared: bool) -> EngineCheck:
    """Measures batches of the engine, and the model's own cache if they differ.

    Args:
        model: The model.
        check: How the learner runs it.
        prepared: Whether a learner may already depend on `check`.
    """
    probe, batches = ModelProbe(model), None
    if check.mode is not RunMode.UNPACKED:
        batches = probe.measure(lambda: _step(probe))
        if batches.within(probe.bound):
            return EngineCheck(mode=check.mode, reason=check.reason, batches=batches)
        if prepared:
            raise ModelError(
                f"{model_name(model)} cannot be sampled by the embedded engine: batches {batches}; "
                "start the engine before the learner, or choose the engine vllm"
            )
        check = probe.unpacked(check, f"batches of the engine {batches}")
        note_check(model, check)
    probe.use_own_attention()
    whole = True
    model_cache = probe.measure(lambda: _continue(probe, [22, 23, 28, 29, 30]))
    if not model_cache.within(probe.bound):
        whole = False
        model_cache = probe.measure(lambda: _continue(probe, list(range(22, 31))))
    if not model_cache.within(probe.bound):
        raise ModelError(
            f"{model_name(model)} cannot be sampled by the embedded engine: {check.reason}, and "
            f"turns with its own cache {model_cache}; expected the engine vllm, or another model"
        )
    return EngineCheck(
        mode=check.mode,
        reason=check.reason,
        batches=batches,
        model_cache=model_cache,
        whole_turns=whole,
    )


def _step(probe: ModelProbe) -> float:
    """Feeds a prompt, a copy of its prefix with another continuation, and single tokens of both.

    These are the steps of the embedded engine; each gives the next token's log-probability.
    """
    cache = KVCache(probe.model, 2, LONG)

    def feed(*spans: tuple[int, int, int]) -> float:
        """Feeds tokens from `start` to `stop` of each sequence n, given as (n, start, stop)."""
        logits = cache.forward(
            probe.model,
            [n for n, _, _ in spans],
            [start for _, start, _ in spans],
            [probe.ids[n][start:stop].tolist() for n, start, stop in spans],
        )
        return probe.difference(logits, [(n, stop) for n, _, stop in spans])

    differences = [feed((0, 0, 24))]
    cache.copy([0], [1], [SHARED_TOKENS])
    differences.append(feed((0, 24, 25), (1, SHARED_TOKENS, 23)))
    differences += [feed((0, 25 + n, 26 + n), (1, 23 + n, 24 + n)) for n in range(2)]
    return max(differences)


def _continue(probe: ModelProbe, stops: list[int]) -> float:
    """Feeds a prompt to the model's own cache, then the tokens up to each stop."""
    from gspo_env.engines.embedded.unpacked import ModelCache

    cache, differences = ModelCache(probe.model), []
    for start, stop in zip([0, *stops], stops, strict=False):
        logits = cache.feed(probe.ids[0][start:stop].tolist())
        differences.append(probe.difference(logits, [(0, stop)]))
    return max(differences)
