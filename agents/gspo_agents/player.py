"""One player of one conversation."""

from __future__ import annotations

import random
from collections.abc import Callable

from gspo_env.chat.conversation import Transcript
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines import Completion, Sampling
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Prompt, Role


class Player:
    """One player in one conversation; what it samples is kept token by token.

    Args:
        chat: The tokenizer.
        prompt: What the player reads before the first observation.
        generate: Samples an action for token ids.
        limits: Limits of the rollout.
        temperature: 0 is greedy.
    """

    def __init__(
        self,
        chat: ChatTokenizer,
        prompt: Prompt,
        generate: Callable[[list[int], Sampling], Completion],
        limits: RolloutConfig,
        temperature: float = 0.0,
    ) -> None:
        self._chat, self._limits, self._temperature = chat, limits, temperature
        self._transcript, self._generate = Transcript(chat, prompt), generate

    @property
    def ids(self) -> list[int]:
        """The token ids of the conversation so far."""
        return self._transcript.ids

    def __call__(self, rng: random.Random, observation: str) -> str:
        """Returns an action as an opponent of an environment; `rng` draws the seed."""
        return self.act(observation, seed=rng.getrandbits(62))

    def act(self, observation: str, role: Role = "user", seed: int = 0) -> str:
        """Returns the action that follows an observation.

        Raises:
            EngineError: The conversation is longer than `rollout.max_context`.
        """
        self._transcript.read(observation, role)
        sampling = Sampling(
            max_tokens=self._limits.max_turn_tokens,
            temperature=self._temperature,
            stop_ids=self._chat.stop_ids,
            seed=seed,
        )
        done = self._generate(self._transcript.ids, sampling)
        self._transcript.write(done.token_ids)
        return self._chat.decode(done.token_ids)
