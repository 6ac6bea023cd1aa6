"""`gspo-env capture`."""

from __future__ import annotations

import asyncio
import logging
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from gspo_env.errors import ConfigError, raised_as
from gspo_env.registry import load_function
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.tools.tool import Tool
    from gspo_env.types import Episode, Group, Message, ResetInfo, StepInfo, Turn

logger = logging.getLogger(__name__)


@settings
class Capture:
    """Record conversations of an environment or a program, as JSON lines to imitate."""

    model: str = ""
    """A run's folder, a model's folder, a hub id, or `scripted`: the environment's own
    `expert_action`."""
    env: str = ""
    """The environment; a program has flags of its own."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as `hops=4`."""
    program: str = ""
    """The program, as in `gspo/Program-v0`: `FILE.py:FUNCTION` or `module:FUNCTION`."""
    command: str = ""
    """A command with its arguments, instead of the program."""
    data: str = ""
    """The tasks, such as a .jsonl file."""
    rewards: tuple[str, ...] = ()
    """Rewards of an episode; by default, what the program returns."""
    out: str = ""
    """The file to write; it must not exist."""
    episodes: Annotated[int, Ge(1)] = 100
    """Tasks to play, none of which is held out for evaluation."""
    samples: Annotated[int, Ge(1)] = 1
    """Episodes of each task."""
    best: Annotated[int, Ge(0)] = 0
    """Record so many episodes of each task, those with the highest rewards; 0 records all."""
    keep: str = ""
    """Record only episodes with this condition, such as "reward >= 1 and turns < 4"; it compares
    `reward`, `success`, `turns` or a named part of the reward with a number."""
    judge: str = ""
    """A group reward that adds its score, such as `judges.py:JUDGE`."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Sampling temperature; that of the training by default."""
    seed: int = 0
    """Seed of the tasks and of the sampling."""

    def run(self) -> None:
        """Plays the episodes, writes the file and prints what it has."""
        from gspo_env.env.registration import load_agent

        kwargs, conditions = self._arguments(), read_conditions(self.keep)
        heat = {} if self.temperature is None else {"temperature": self.temperature}
        env = self.env or "gspo/Program-v0"
        scripted, more = self.model == "scripted", {"seed": self.seed}
        if scripted:
            agent, more = load_agent("scripted")(env, **kwargs), {}
        else:
            agent = load_agent("gspo").load(self.model, env, env_kwargs=kwargs, rollout=heat)
        tasks = agent.training_tasks(self.episodes, self.seed)
        groups = agent.evaluate(tasks, self.samples, **more)
        if self.judge:
            groups = asyncio.run(_judge(self.judge, groups))
        played = [episode for group in groups for episode in group.episodes]
        whole = [
            episode
            for group in groups
            for episode in _best(group, self.best)
            if all(condition(figures_of(episode)) for condition in conditions)
        ]
        if self.keep and not whole:
            names = sorted({name for episode in played for name in figures_of(episode)})
            raise ConfigError(
                f"keep is {self.keep!r}, which none of {len(played)} episodes meets; expected a "
                f"condition on {', '.join(names)} that some meet"
            )
        lines = [line for episode in whole for line in to_lines(episode)]
        with Path(self.out).open("x", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        failed = sum(episode.failed for episode in played)
        wins = sum(bool(episode.success) for episode in played)
        print(f"episodes       {len(played)}, {wins} with success, {failed} failed")
        print(f"recorded       {len(whole)} episodes")
        print(f"conversations  {len(lines)} in {self.out}")

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments of the environment.

        Raises:
            ConfigError: Something is missing, or the file exists.
        """
        is_one = len(list(filter(None, (self.env, self.program, self.command)))) == 1
        for name in ("model", "out") if self.env or not is_one else ("model", "data", "out"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is ''; expected --{name}, see gspo-env capture --help")
        if not is_one:
            raise ConfigError("expected one of --env, --program and --command")
        if self.model == "scripted" and self.temperature is not None:
            raise ConfigError(
                f"temperature is {self.temperature}, and a scripted agent samples nothing; "
                "expected none"
            )
        check_new_file(self.out)
        if self.env:
            return self.env_kwargs
        with raised_as(ConfigError, f"command is {self.command!r}", ValueError):
            command = shlex.split(self.command)
        started = {"program": self.program} if self.program else {"command": command}
        return {**started, "data": self.data, "rewards": list(self.rewards)}


def check_new_file(name: str) -> None:
    """Refuses a file that exists or cannot be made, before work is done for it.

    Raises:
        ConfigError: It is such a file.
    """
    mend = "; expected a new file in a folder that can be written"
    with raised_as(ConfigError, f"cannot make {name!r}", OSError, mend=mend):
        Path(name).open("x").close()
    Path(name).unlink()


Condition = Callable[[Mapping[str, float]], bool]
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def read_conditions(text: str) -> list[Condition]:
    """Reads conditions such as "reward >= 1 and turns < 4"; none of an empty text.

    Raises:
        ConfigError: A condition has another form.
    """

    def read(part: str) -> Condition:
        match = re.fullmatch(r"(\w+) *(>=|<=|==|>|<) *(-?\d+(?:\.\d+)?)", part.strip())
        if match is None:
            raise ConfigError(f"keep has {part!r}; expected a form such as 'reward >= 1'")
        name, compare, bound = match[1], _COMPARISONS[match[2]], float(match[3])
        return lambda numbers: name in numbers and compare(numbers[name], bound)

    return [read(part) for part in text.split(" and ")] if text else []


def figures_of(episode: Episode) -> dict[str, float]:
    """Returns what conditions compare."""
    from gspo_env.rollout.metrics import EpisodeStats

    named = {"success": float(bool(episode.success)), "turns": float(len(episode.turns))}
    return {**EpisodeStats.of([episode]).reward_parts, "reward": episode.outcome, **named}


def _best(group: Group, count: int) -> list[Episode]:
    """Returns the episodes with the highest rewards, or all for a count of 0."""
    played = [episode for episode in group.episodes if episode.turns and not episode.failed]
    return sorted(played, key=lambda episode: -episode.outcome)[:count] if count else played


async def _judge(name: str, groups: Sequence[Group]) -> list[Group]:
    """Adds the scores of a group reward.

    Raises:
        ConfigError: There is none of this name.
    """
    from gspo_env.rewards import GroupReward, score_group

    reward = load_function(name, "judge")
    if not isinstance(reward, GroupReward):
        raise ConfigError(f"judge is {name!r}; expected a gspo_env.rewards.GroupReward")
    return await asyncio.gather(*(score_group([(reward, 1.0)], None, group) for group in groups))


def to_lines(episode: Episode) -> list[str]:
    """Returns the conversations of an episode as lines of a file.

    The turns of an environment are one conversation. Where the environment gives the whole
    conversation at each turn, as a program does, there is one for each turn that no other turn
    continues; it ends with the answer of that turn as the program received it.
    """
    from gspo_env.redaction import clean

    first = episode.reset.messages
    is_whole = bool(first) and first[-1].role != "assistant"
    if not is_whole and not any(episode.turns[k].info.messages for k in episode.action_turns):
        return _lines(episode, _messages(episode), episode.prompt.tools)
    infos = [turn.info for turn in episode.turns[:-1]]
    requests: list[ResetInfo | StepInfo] = [episode.reset, *infos]
    parents = set(episode.parents)
    lines = []
    for k, (turn, request) in enumerate(zip(episode.turns, requests, strict=True)):
        if k in parents or not request.messages:
            continue
        if clean(request.messages[-1].content) != turn.observation:
            logger.warning("A turn that follows a refused request is not recorded.")
            continue
        tools = tuple(request.tools or ())
        answer = _answer(turn, tools)
        lines += _lines(episode, (*request.messages, answer), tools, agent=request.agent)
    return lines


def _messages(episode: Episode) -> list[Message]:
    """Returns the conversation of an episode of a text environment."""
    messages = [*episode.prompt.first_messages(episode.turns[0].observation)]
    turns = iter(episode.action_turns)
    for message in episode.played_messages():
        if message.role == "assistant":
            k = next(turns)
            message = _answer(episode.turns[k], episode.prompt.tools)
            calls = [replace(c, id=f"call_{k}_{n}") for n, c in enumerate(message.tool_calls)]
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool" and messages[-1].tool_calls:  # it may answer a malformed call
            message = replace(message, tool_call_id=f"call_{k}_0")
        messages.append(message)
    return messages


def _answer(turn: Turn, tools: Sequence[Tool]) -> Message:
    """Returns the action of a turn as a message."""
    from gspo_env.redaction import clean
    from gspo_env.tools.request import read_action

    text = clean(turn.text)
    return read_action(text, tools, turn.message, in_reasoning=turn.in_reasoning)[0]


def _lines(
    episode: Episode, messages: Sequence[Message], tools: Sequence[Tool], **more: Any
) -> list[str]:
    """Returns a conversation as a line, or no line if its answers are all empty.

    An empty answer has the weight 0, since it cannot be imitated.
    """
    from gspo_env.recipes.conversations import Conversation

    answers = {n: m for n, m in enumerate(messages) if m.role == "assistant"}
    empty = {n for n, m in answers.items() if not (m.content or m.tool_calls or m.reasoning)}
    if len(empty) == len(answers):
        return []
    conversation = Conversation(
        messages=tuple(messages),
        tools=tuple(tools),
        reward=episode.outcome,
        task_key=episode.reset.task_key,
        unweighted=frozenset(empty),
    )
    return [conversation.line(success=episode.success, **more, seed=episode.task.seed)]
