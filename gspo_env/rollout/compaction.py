"""Compaction: the policy summarizes a conversation that outgrows the context, and goes on with it.

    sequence 1   system, task, action, observation, ..., action, instruction, summary
    sequence 2   system, task, summary, observation, action, ...

The summary is a turn of the episode, of the kind `summary`: it is sampled, credited and trained.
Its reward is 0, it has no state, and the environment does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.errors import ConfigError, PromptLengthError
from gspo_env.registry import name_of
from gspo_env.rollout.collector import Collector, RolloutPlugin
from gspo_env.rollout.play import PolicyInput, PolicyOutput
from gspo_env.rollout.policy import EnginePolicy
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.settings import Prose, settings
from gspo_env.tools.calls import parse_message
from gspo_env.types import Episode, Group, Message, ResetInfo, StepInfo, StopReason

_INSTRUCTION = (
    "Summarize your work on the task so far in a few sentences: what you have found out, what you "
    "have done, and what to do next. After this you see only the task, your summary, and the "
    "answer to your last action."
)


@settings
class Summary(RolloutPlugin):
    """Asks the policy for a summary before its conversation outgrows `rollout.max_context`.

    It asks once the next action could leave no room for a summary. The summary counts as one of
    `rollout.max_turns`. An episode whose summary has no text ends by `max_context`, and one whose
    summary reaches its limit of tokens by `max_turn_tokens`.
    """

    instruction: Prose = _INSTRUCTION
    """What the policy is asked, as a user's message."""
    summary_tokens: Annotated[int, Ge(1)] = 256
    """Maximum tokens of a summary; `rollout.max_turn_tokens` bounds it too."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if not self.instruction.strip():
            raise ConfigError("compaction.instruction is empty; expected a request for a summary")

    def check(self, config: Any, chat: ChatTokenizer) -> None:
        """Checks the other settings of a run before it begins; see `wrap`."""
        self._reserve(config.rollout, chat)

    def check_episode(self, env: TextEnvironment, episode: Episode) -> None:
        """See `RolloutPlugin.check_episode`.

        Raises:
            ConfigError: The environment sends whole conversations, which it compacts itself.
        """
        edits = any(turn.info.messages is not None for turn in episode.turns[:-1])
        if edits or attribute(env, "takes_cut_actions", False):
            raise self.refusal(episode.task.env_id)

    def refusal(self, env: object) -> ConfigError:
        """Returns the error about an environment that sends whole conversations."""
        return ConfigError(
            f"compaction is {name_of('compaction', self)!r} and {env} sends its own conversations, "
            "which it compacts itself; expected compaction 'none'"
        )

    def wrap(self, collector: Collector) -> Collector:
        """Returns a collector of compacted episodes.

        Raises:
            ConfigError: The episodes are not played in this process, or the context is too small.
        """
        reserved = self._reserve(collector.config, collector.chat)
        return replace(
            collector, policy=partial(CompactingPolicy, compaction=self, reserved=reserved)
        )

    def _reserve(self, limits: RolloutConfig, chat: ChatTokenizer) -> int:
        """Returns the tokens of the instruction and of a summary."""
        if limits.ray_workers:
            raise ConfigError(
                f"compaction is {name_of('compaction', self)!r} and rollout.workers "
                f"{limits.workers!r}; expected rollout.workers 'asyncio'"
            )
        asking = len(chat.follow(self.instruction, -1))
        summary = min(self.summary_tokens, limits.max_turn_tokens)
        needed = asking + summary + limits.max_turn_tokens
        if needed >= limits.max_context:
            raise ConfigError(
                f"rollout.max_context is {limits.max_context}; expected more than {needed} with "
                f"compaction: the instruction has {asking} tokens, a summary up to {summary}, and "
                f"an action up to {limits.max_turn_tokens}"
            )
        return asking + summary

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns the metrics of the episodes of a step."""
        episodes = [e for group in groups for e in group.episodes if e.turns and not e.failed]
        summaries = [[*self._summaries(episode)] for episode in episodes]
        ends = [e for e, turns in zip(episodes, summaries, strict=True) if turns]
        unfinished = sum(
            e.stop_reason is StopReason.MAX_CONTEXT or e.turns[-1].kind == "summary" for e in ends
        )
        count, total = max(1, len(episodes)), sum(map(len, summaries))
        metrics = {
            "rollout/compaction/per_episode": total / count,
            "rollout/compaction/episodes": len(ends) / count,
            "rollout/compaction/unfinished": unfinished / count,
        }
        lengths = [pair for turns in summaries for pair in turns if pair[1]]
        if lengths:
            before, after = np.mean(lengths, axis=0)
            metrics["rollout/compaction/tokens_before"] = float(before)
            metrics["rollout/compaction/tokens_after"] = float(after)
        return metrics

    def _summaries(self, episode: Episode) -> Iterator[tuple[int, int]]:
        """Yields the tokens before and after each compaction; 0 after one that failed."""
        lengths: list[int] = []
        parents = episode.parents
        prompts: list[int] = []
        for turn, parent in zip(episode.turns, parents, strict=True):
            before = 0 if parent is None else lengths[parent]
            prompts.append(before + len(turn.prompt_ids))
            lengths.append(prompts[-1] + len(turn.action_ids))
        for k, turn in enumerate(episode.turns):
            if turn.kind == "summary" and (parent := parents[k]) is not None:
                yield lengths[parent], (prompts[k + 1] if k + 1 < len(prompts) else 0)


class CompactingPolicy(EnginePolicy):
    """Samples the actions of one episode, and summaries in between.

    Args:
        compaction: The settings.
        reserved: Tokens of the instruction and of a summary.
    """

    def __init__(self, *args: Any, compaction: Summary, reserved: int) -> None:
        super().__init__(*args)
        self.compaction, self.reserved = compaction, reserved
        self.first: tuple[Message, ...] = ()
        """The conversation of the first turn, with which every sequence begins."""
        self.begin = 0
        """The first turn of the running sequence."""
        self.follows: int | None = None
        """The turn after the last summary, with which a sequence begins."""

    async def __call__(self, inputs: PolicyInput) -> PolicyOutput:
        """See `gspo_env.rollout.play.Policy`.

        Raises:
            ConfigError: The environment sends whole conversations, which it compacts itself.
        """
        if not self.first:
            self.first = inputs.prompt.first_messages(inputs.observation)
        is_new = inputs.turn == self.follows
        is_custom = isinstance(inputs.info, StepInfo) and inputs.info.messages is not None
        if inputs.takes_cuts or (is_custom and not is_new):
            raise self.compaction.refusal(inputs.env)
        if self.answers_itself(inputs):
            return await self._summarize(inputs)
        output = await super().__call__(inputs)
        if not is_new:
            return output
        self.begin = inputs.turn
        return replace(output, fork="compacted")

    def answers_itself(self, inputs: PolicyInput) -> bool:
        """Returns whether the next action could leave no room for a summary, and this turn does."""
        if self.transcript is None or inputs.turn == self.follows:
            return False
        if not self.begin < inputs.turn < self.limits.max_turns - 1:
            return False
        room, tokens = self.limits.max_context - self.reserved, len(self.transcript.ids)
        most = inputs.info.max_tokens or self.limits.max_turn_tokens
        try:
            if len(self._read(self.transcript, inputs).ids) + most <= room:
                return False
        except PromptLengthError:
            pass
        return tokens <= room

    async def _summarize(self, inputs: PolicyInput) -> PolicyOutput:
        """Samples a summary, and begins the next conversation with it."""
        question = self.compaction.instruction
        info = StepInfo(max_tokens=self.compaction.summary_tokens)
        output = await super().__call__(
            replace(inputs, observation=question, role="user", info=info)
        )
        output = replace(output, question=question)
        if output.stop is not None:
            return output
        summary = parse_message(output.text, (), in_reasoning=output.in_reasoning)[0]
        if not (summary.content.strip() or summary.tool_calls):
            return replace(output, stop=StopReason.MAX_CONTEXT)
        latest = Message(role=inputs.role, content=inputs.observation)
        answer = Message(role="assistant", content=output.text)
        self.follows = inputs.turn + 1
        return replace(output, info=_next_info(inputs.info, (*self.first, answer, latest)))


def _next_info(info: ResetInfo | StepInfo, messages: tuple[Message, ...]) -> StepInfo:
    """Returns an info with another conversation."""
    return StepInfo(
        messages=messages,
        observation_role=getattr(info, "observation_role", "user"),
        tools=info.tools,
        max_tokens=info.max_tokens,
        stop=info.stop,
        agent=info.agent,
    )
