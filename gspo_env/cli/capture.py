"""`gspo-env capture`."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from gspo_env.errors import ConfigError
from gspo_env.registry import check_values

if TYPE_CHECKING:
    from gspo_env.chat import ChatTokenizer
    from gspo_env.types import Episode, ResetInfo, StepInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """Record the conversations of a program with the model of a run, as JSON lines to imitate."""

    model: str = ""
    """A run's folder, a model's folder or a hub id."""
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
    """Episodes to record, of tasks that are not held out for evaluation."""
    temperature: float | None = None
    """Sampling temperature; that of the training by default."""
    seed: int = 0
    """Seed of the tasks and of the sampling."""

    def run(self) -> None:
        """Plays the episodes, writes the file and prints what it has."""
        from gspo_env.env.registration import load_agent
        from gspo_env.seeding import derive_seed
        from gspo_env.types import Task

        kwargs = self._arguments()
        heat = {} if self.temperature is None else {"temperature": self.temperature}
        env = "gspo/Program-v0"
        agent = load_agent("gspo").load(self.model, env, env_kwargs=kwargs, rollout=heat)
        seeds = (derive_seed("capture", self.seed, n) % 10**9 for n in range(self.episodes))
        tasks = [Task(env_id=agent.env_id, seed=seed) for seed in seeds]
        try:
            groups = agent.evaluate(tasks, seed=self.seed)
        finally:
            agent.close()
        played = [episode for group in groups for episode in group.episodes]
        whole = [episode for episode in played if not episode.failed]
        lines = [line for episode in whole for line in to_lines(episode, agent.chat)]
        with Path(self.out).open("x", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        failed = sum(episode.failed for episode in played)
        wins = sum(bool(episode.success) for episode in played)
        print(f"episodes       {len(played)}, {wins} with success, {failed} failed")
        print(f"conversations  {len(lines)} in {self.out}")

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments of the environment.

        Raises:
            ConfigError: Something is missing, or the file exists.
        """
        for name in ("model", "data", "out"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is ''; expected --{name}, see gspo-env capture --help")
        if bool(self.program) == bool(self.command):
            raise ConfigError("expected one of --program and --command")
        check_values(self)
        if Path(self.out).exists():
            raise ConfigError(f"{self.out!r} exists; expected a new file")
        if not Path(self.out).absolute().parent.is_dir():
            raise ConfigError(f"the folder of {self.out!r} does not exist")
        try:
            command = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"command is {self.command!r}: {error}") from error
        started = {"program": self.program} if self.program else {"command": command}
        return {**started, "data": self.data, "rewards": list(self.rewards)}


def to_lines(episode: Episode, chat: ChatTokenizer) -> list[str]:
    """Returns the conversations of an episode as lines of a file.

    There is one for each turn that no other turn continues; it ends with the answer of that turn as
    the program received it.
    """
    from gspo_env.env.base import clean
    from gspo_env.recipes.conversations import Conversation
    from gspo_env.tool_calls import read_action

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
        action = chat.parser.parse(
            turn.action_ids, chat.stop_ids, turn.prompt_ids, tools, request.stop
        )
        answer, _ = read_action(
            clean(turn.text), tools, action.message, in_reasoning=turn.in_reasoning
        )
        conversation = Conversation(
            messages=(*request.messages, answer),
            tools=tools,
            reward=episode.outcome,
            task_key=episode.reset.task_key,
        )
        more = {"success": episode.success, "agent": request.agent}
        lines.append(conversation.line(**more, seed=episode.task.seed))
    return lines
