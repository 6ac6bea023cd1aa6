"""An engine whose next action may be given: typed by a person, or that of an earlier episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_env.engines.base import Completion, Engine, NamedTensors, Sampling
from gspo_env.types import Turn

if TYPE_CHECKING:
    from gspo_env.chat.tokenizer import ChatTokenizer


class ScriptedEngine(Engine):
    """Returns the next action if one is given; otherwise samples it from another engine.

    Args:
        engine: Samples.
        chat: Encodes a given text.
    """

    def __init__(self, engine: Engine, chat: ChatTokenizer) -> None:
        self.engine, self.chat = engine, chat
        self.next: str | Turn | None = None
        """The next action: a text, or a turn whose tokens are repeated."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """See `Engine.generate`; a given text has log-probabilities of 0."""
        action, self.next = self.next, None
        if action is None:
            return await self.sample(prompt_ids, sampling, session)
        if isinstance(action, Turn):
            return Completion(
                token_ids=action.action_ids,
                logprobs=action.logprobs,
                finish_reason="stop" if sampling.ended(action.action_ids) else "length",
                weights_version=action.weights_version,
                weights_versions=action.weights_versions,
            )
        end = self.chat.end_of_turn
        ids = (*self.chat.encode(action), self.chat.stop_ids[0] if end is None else end)
        ids = ids[: sampling.max_tokens]
        reason = "stop" if sampling.ended(ids) else "length"
        return Completion.of(ids, (0.0,) * len(ids), reason, [(0, 0)])

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None
    ) -> Completion:
        """Samples an action."""
        return await self.engine.generate(prompt_ids, sampling, session)

    def release(self, session: str) -> None:
        """See `Engine.release`."""
        self.engine.release(session)

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `Engine.update_weights`."""
        await self.engine.update_weights(named_tensors, version)

    def close(self) -> None:
        """See `Engine.close`."""
        self.engine.close()
