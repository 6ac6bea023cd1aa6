"""Engines: how a rollout samples actions."""

from gspo_env.engines.base import Completion, Engine, Sampling

__all__ = ["Completion", "Engine", "Sampling"]
