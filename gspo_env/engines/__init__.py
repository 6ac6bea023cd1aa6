"""Engines: how a rollout samples actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gspo_env.engines.base import Completion, Engine, Sampling

if TYPE_CHECKING:
    from gspo_env.config import Config

__all__ = ["Completion", "Engine", "Sampling", "make_engine"]


def make_engine(config: Config, model: Any) -> Engine:
    """The engine that a config names, holding the weights of a model."""
    limits = config.rollout
    sizes = {"max_slots": limits.concurrency, "max_context": limits.max_context}
    if config.engine == "vllm":
        from gspo_env.engines.vllm.local import VLLMEngine

        return VLLMEngine(model, config.vllm, **sizes)
    if config.engine == "vllm-server":
        from gspo_env.engines.vllm.server import VLLMServerEngine

        return VLLMServerEngine(model, config.vllm, config.server, **sizes)
    from gspo_env.engines.transformers import TransformersEngine

    return TransformersEngine(model, **sizes)
