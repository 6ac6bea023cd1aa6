"""An engine that plays on a copy of the learner's weights while the learner changes its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gspo_env.engines.base import Completion, Engine, NamedTensors, Sampling


class BesideEngine:
    """An embedded engine on a copy of a model, which takes the weights when it is told to.

    Args:
        model: The learner's causal LM.
        start: Starts an engine that shares the weights of the model that it gets.
    """

    def __init__(self, model: Any, start: Callable[[Any], Engine]) -> None:
        self._model = model
        self._copy = copy.deepcopy(model).requires_grad_(False)
        self._engine = start(self._copy)
        self.copies = 1
        self.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.tolerance: float | None = None

    @property
    def weights_version(self) -> int:
        """The version of the copy."""
        return int(getattr(self._engine, "weights_version", 0))

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`."""
        return await self._engine.generate(prompt_ids, sampling, session)

    def release(self, session: str) -> None:
        """Drops the cache of a session."""
        self._engine.release(session)

    async def sleep(self) -> None:
        """Does nothing: the rollout goes on while the learner updates."""

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Waits for the requests that run, and copies the learner's weights.

        Args:
            named_tensors: Not read: the copy has the learner's modules, so the tensors are copied
                as they are, without the names and forms of a checkpoint.
            version: See `Engine.update_weights`.

        Raises:
            EngineError: Requests still run after minutes.
        """
        await self._engine.update_weights((), version)
        with torch.no_grad():
            for own, new in zip(self._tensors(self._copy), self._tensors(self._model), strict=True):
                own.copy_(new)

    def close(self) -> None:
        """Frees everything."""
        self._engine.close()

    def _tensors(self, model: Any) -> list[torch.Tensor]:
        return [*model.parameters(), *model.buffers()]
