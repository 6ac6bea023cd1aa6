"""A copy of the learner's weights for an engine in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gspo_env.engines.base import Completion, NamedTensors, Sampling
from gspo_env.engines.transformers import TransformersEngine
from gspo_env.engines.unbatched import UnbatchedEngine
from gspo_env.errors import EngineError


class OwnWeights:
    """An engine with a copy of the learner's model, adapters included.

    The engine samples while the learner updates its weights in another thread. The learner must not
    change them during `update_weights` and `update_in_flight`, which copy them.

    Args:
        model: The learner's causal LM.
        start: Starts the engine for the copy.
    """

    copies = 1
    tolerance: float | None = None

    def __init__(
        self, model: Any, start: Callable[[Any], TransformersEngine | UnbatchedEngine]
    ) -> None:
        self._learned = model
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._engine = start(self._model)
        self.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")

    @property
    def weights_version(self) -> int:
        """The version of the copy."""
        return self._engine.weights_version

    @property
    def fed_tokens(self) -> int:
        """Tokens that were computed since the start."""
        return self._engine.fed_tokens

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`."""
        return await self._engine.generate(prompt_ids, sampling, session)

    def release(self, session: str) -> None:
        """Drops the cache of a session."""
        self._engine.release(session)

    async def sleep(self) -> None:
        """Does nothing: requests may run while the learner updates."""

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Waits for requests in flight, then copies the weights and clears the cache.

        Raises:
            EngineError: Requests still run after minutes.
        """
        await self._engine.drain()
        self._copy()
        await self._engine.update_weights(named_tensors, version)

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Copies the weights; see `UpdatesInFlight.update_in_flight`."""
        self._copy()
        await self._engine.update_in_flight(named_tensors, version)

    def close(self) -> None:
        """Frees the cache and rejects further requests."""
        self._engine.close()

    def _copy(self) -> None:
        with torch.no_grad():
            own, learned = _tensors(self._model), _tensors(self._learned)
            if changed := own.keys() ^ learned.keys():
                raise EngineError(
                    f"the model has other weights than at the start of the engine, such as "
                    f"{min(changed)}; start the engine again"
                )
            for name, tensor in own.items():
                tensor.copy_(learned[name])


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
