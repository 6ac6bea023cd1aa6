"""The policy of an episode that an engine samples."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gspo_env.chat.conversation import PromptIds, Transcript
from gspo_env.engines.base import Sampling, check_completion
from gspo_env.errors import ChatTemplateError, EnvironmentContractError, PromptLengthError
from gspo_env.rollout.failures import EnvironmentFailed, describe
from gspo_env.rollout.play import PolicyInput, PolicyOutput
from gspo_env.rollout.progress import EpisodeProgress
from gspo_env.seeding import derive_seed
from gspo_env.types import Prompt, ResetInfo, StepInfo, StopReason

if TYPE_CHECKING:
    from gspo_env.rollout.collector import Collector


class EnginePolicy:
    """Samples the actions of one episode from an engine, token-exact.

    Args:
        collector: Plays the episode.
        progress: Records what the episode waits for.
        seed: Seed of the episode's draws.
        temperature: Sampling temperature.
    """

    def __init__(
        self, collector: Collector, progress: EpisodeProgress, seed: int, temperature: float
    ) -> None:
        self.engine, self.chat, self.limits = collector.engine, collector.chat, collector.config
        self.vocab_size, self.weights_ready = collector.vocab_size, collector.weights_ready
        self.progress, task = progress, progress.task
        self.seed, self.temperature = seed, temperature
        self.session = f"{task.env_id}:{task.seed}:{seed}:{temperature}"
        self.sessions: dict[int, str] = {}
        """The engine's name of each sequence that it may have cached."""
        self.transcript: Transcript | None = None

    async def __call__(self, inputs: PolicyInput) -> PolicyOutput:
        """See `gspo_env.rollout.play.Policy`."""
        if self.transcript is None:
            self.transcript = Transcript(self.chat, inputs.prompt, self.limits.max_context)
        limits, info = self.limits, inputs.info
        try:
            prompt = self._read(self.transcript, inputs)
            max_tokens = limits.answer_tokens(
                len(prompt.ids), info.max_tokens, fills=inputs.takes_cuts
            )
        except PromptLengthError as error:
            return PolicyOutput(
                text=str(error), stop=StopReason.MAX_CONTEXT, prompt_tokens=error.tokens
            )
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            stop_ids=self.chat.stop_ids,
            ends=self.chat.ends(info.stop),
            seed=derive_seed(self.seed, inputs.turn),
        )
        if not self.weights_ready.is_set():
            await self.weights_ready.wait()
        started = time.perf_counter()
        session = self._session(self.transcript, prompt.session)
        self.progress.wait_for("the engine", inputs.turn)
        completion = await self.engine.generate(prompt.ids, sampling, session)
        self.progress.wait_for("their environments", inputs.turn)
        check_completion(completion, sampling, self.vocab_size)
        text = self.chat.decode(completion.token_ids)
        parsed = self.transcript.write(completion.token_ids)
        is_cut = completion.finish_reason == "length"
        return PolicyOutput(
            text=text.partition(parsed.stop_text)[0] if parsed.stop_text else text,
            message=parsed.message,
            in_reasoning=parsed.in_reasoning,
            stop_text=parsed.stop_text,
            parent=prompt.parent,
            fork=prompt.fork,
            prompt_ids=prompt.prompt_ids,
            prompt_tokens=len(prompt.ids),
            action_ids=completion.token_ids,
            logprobs=completion.logprobs,
            weights_version=completion.weights_version,
            weights_versions=completion.weights_versions,
            seconds=time.perf_counter() - started,
            stop=StopReason.MAX_TURN_TOKENS if is_cut else None,
        )

    def count(self, request: ResetInfo | StepInfo) -> int:
        """Returns how many tokens the prompt of a request has, while the environment steps.

        Raises:
            PromptLengthError: It is too long by its characters.
            ChatTemplateError: The template refuses the conversation.
        """
        transcript = self.transcript or Transcript(self.chat, Prompt(), self.limits.max_context)
        return len(transcript.read("", request=request).ids)

    def answers_itself(self, inputs: PolicyInput) -> bool:
        """Returns whether the next action is the answer to a question of its own."""
        return False

    def release(self) -> None:
        """Drops what the engine caches of the episode."""
        for session in self.sessions.values():
            self.engine.release(session)

    def _read(self, transcript: Transcript, inputs: PolicyInput) -> PromptIds:
        """Returns the prompt.

        Raises:
            EnvironmentFailed: The template rejects the conversation that the environment returned.
        """
        try:
            return transcript.read(inputs.observation, inputs.role, inputs.info)
        except ChatTemplateError as error:
            if isinstance(error, PromptLengthError) or not inputs.info.messages:
                raise
            text = f"{inputs.env}: the conversation of info: {error}"
            fault = describe("reading its conversation", EnvironmentContractError(text))
            raise EnvironmentFailed(fault) from error

    def _session(self, transcript: Transcript, number: int) -> str:
        """Names the cache of a sequence; releases the caches that are no longer used."""
        used = transcript.session_ids()
        if used != tuple(self.sessions):
            for unused in self.sessions.keys() - set(used):
                self.engine.release(self.sessions[unused])
            self.sessions = {n: f"{self.session}/{n}" if n else self.session for n in used}
        return self.sessions[number]
