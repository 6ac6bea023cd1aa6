"""A copy of the learner's weights for an engine in this process."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gspo_env.engines.base import Completion, Engine, NamedTensors, Sampling
from gspo_env.errors import EngineError

if TYPE_CHECKING:
    from gspo_env.engines.embedded.engine import TransformersEngine
    from gspo_env.engines.embedded.unpacked import UnbatchedEngine


class CopyEngine(Engine):
    """An engine with a copy of the learner's model, adapters included.

    The engine samples while the learner updates its weights in another thread. The learner must not
    change them during `update_weights` and `update_in_flight`, which copy them in a thread: the
    event loop and the engine continue with the old weights until all are copied, which needs the
    memory of the trained ones once more.

    Args:
        model: The learner's causal LM.
        start: Starts the engine for the copy.
    """

    copies = 1
    updates_in_flight = True

    def __init__(
        self, model: Any, start: Callable[[Any], TransformersEngine | UnbatchedEngine]
    ) -> None:
        self._learner_model = model
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._engine = start(self._model)
        self.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")

    @property
    def weights_version(self) -> int:
        """The version of the copy."""
        return self._engine.weights_version

    @property
    def fed_tokens(self) -> int:
        """Tokens computed since the engine started."""
        return self._engine.fed_tokens

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`."""
        return await self._engine.generate(prompt_ids, sampling, session)

    def release(self, session: str) -> None:
        """Drops the cache of a session."""
        self._engine.release(session)

    async def forget(self) -> None:
        """Clears the cache; see `Engine.forget`."""
        await self._engine.forget()

    async def sleep(self) -> None:
        """Frees a large cache on a CPU; see `Engine.sleep`."""
        await self._engine.sleep()

    def close(self) -> None:
        """Frees the cache and rejects further requests."""
        self._engine.close()

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Waits for requests in flight, then copies the weights and clears the cache.

        Raises:
            EngineError: Requests still run after minutes.
        """
        copied = await asyncio.to_thread(self._copied)
        await self._engine.drain()
        self._take(copied)
        await self._engine.update_weights(named_tensors, version)

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Copies the weights; see `Engine.update_in_flight`."""
        self._take(await asyncio.to_thread(self._copied))
        await self._engine.update_in_flight(named_tensors, version)

    def _copied(self) -> dict[str, torch.Tensor]:
        """Returns copies of what training changes.

        Raises:
            EngineError: The model has other weights than when the engine started.
        """
        copied, learned = _tensors(self._model), _tensors(self._learner_model)
        if changed := copied.keys() ^ learned.keys():
            raise EngineError(
                f"the model has other weights than when the engine started, such as "
                f"{min(changed)}; start the engine again"
            )
        return {
            name: tensor.detach().to(copied[name].device, copy=True)
            for name, tensor in learned.items()
            if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
        }

    def _take(self, copied: dict[str, torch.Tensor]) -> None:
        """Puts the copies in the place of the old weights, between two steps of the engine."""
        tensors = _tensors(self._model)
        for name, tensor in copied.items():
            tensors[name].data = tensor


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
