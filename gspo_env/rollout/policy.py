"""The policy of an episode that an engine samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_env.chat.conversation import PromptIds, Transcript
from gspo_env.engines.base import Sampling, check_completion
from gspo_env.errors import ChatTemplateError, EnvironmentContractError
from gspo_env.rollout.failures import EnvironmentFailed, describe
from gspo_env.rollout.play import PolicyInput, PolicyOutput
from gspo_env.rollout.progress import Wait
from gspo_env.seeding import derive_seed
from gspo_env.types import StopReason

if TYPE_CHECKING:
    from gspo_env.rollout.collector import Collector


class EnginePolicy:
    """Samples the actions of one episode from an engine, token-exact.

    Args:
        collector: Plays the episode.
        wait: Notes what the episode waits for.
        seed: Seed of the episode's draws.
        temperature: Sampling temperature.
    """

    def __init__(self, collector: Collector, wait: Wait, seed: int, temperature: float) -> None:
        """Names the session of the episode."""
        self.engine, self.chat, self.limits = collector.engine, collector.chat, collector.config
        self.wait, task = wait, wait.task
        self.session = f"{task.env_id}:{task.seed}:{seed}:{temperature}"
        self.sessions: dict[int, str] = {}
        self.used: tuple[int, ...] = ()
        self.seed, self.temperature = seed, temperature
        self.vocab_size, self.weights_stay = collector.vocab_size, collector._weights_stay
        self.transcript: Transcript | None = None
        self.unfit: int | None = None

    async def __call__(self, now: PolicyInput) -> PolicyOutput:
        """See `gspo_env.rollout.play.Policy`."""
        if self.transcript is None:
            self.transcript = Transcript(self.chat, now.prompt)
        opening = self._read(self.transcript, now)
        asked = now.request.max_tokens
        limit = self.limits.max_turn_tokens if asked is None else asked
        limit = min(limit, self.limits.max_turn_tokens)
        if len(opening.ids) + limit > self.limits.max_context:
            self.unfit = None if now.turn else len(opening.ids)
            return PolicyOutput(stop=StopReason.MAX_CONTEXT, prompt_tokens=len(opening.ids))
        sampling = Sampling(
            max_tokens=limit,
            temperature=self.temperature,
            stop_ids=self.chat.stop_ids,
            ends=self.chat.ends(now.request.stop),
            seed=derive_seed(self.seed, now.turn),
        )
        if not self.weights_stay.is_set():
            await self.weights_stay.wait()
        started = time.perf_counter()
        session = self._session(self.transcript, opening.session)
        self.wait.on("the engine", now.turn)
        done = await self.engine.generate(opening.ids, sampling, session)
        self.wait.on("their environments", now.turn)
        check_completion(done, sampling, self.vocab_size)
        saying = self.transcript.write(done.token_ids)
        return PolicyOutput(
            text=_until(self.chat.decode(done.token_ids), now.request.stop),
            message=saying.message,
            parent=opening.parent,
            fork=opening.fork,
            prompt_ids=opening.prompt_ids,
            prompt_tokens=len(opening.ids),
            action_ids=done.token_ids,
            logprobs=done.logprobs,
            weights_version=done.weights_version,
            weights_versions=done.weights_versions,
            seconds=time.perf_counter() - started,
            stop=StopReason.MAX_TURN_TOKENS if done.finish_reason == "length" else None,
        )

    def release(self) -> None:
        """Drops what the engine caches of the episode."""
        for session in self.sessions.values():
            self.engine.release(session)

    def _read(self, transcript: Transcript, now: PolicyInput) -> PromptIds:
        """Returns the prompt.

        Raises:
            EnvironmentFailed: The template refuses the conversation that the environment gave.
        """
        try:
            return transcript.read(now.observation, now.role, now.request)
        except ChatTemplateError as error:
            if not now.request.messages:
                raise
            told = EnvironmentContractError(f"{now.env}: the conversation of info: {error}")
            raise EnvironmentFailed(describe("reading its conversation", told)) from error

    def _session(self, transcript: Transcript, number: int) -> str:
        """Names the cache of a sequence; releases the caches that are not used any more."""
        used = transcript.session_ids()
        if used != self.used:
            for unused in self.sessions.keys() - set(used):
                self.engine.release(self.sessions[unused])
            self.sessions = {n: f"{self.session}/{n}" if n else self.session for n in used}
            self.used = used
        return self.sessions[number]


def _until(text: str, stop: Sequence[str]) -> str:
    """Returns a text up to the first of the stop texts."""
    if not stop:
        return text
    places = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(places)] if places else text
