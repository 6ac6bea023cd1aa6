"""What another library cannot carry of an environment, and where it goes instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_env.env.base import overrides
from gspo_env.errors import EnvironmentContractError
from gspo_env.export.stepper import Stepper
from gspo_env.rollout.play import play_now
from gspo_env.tools.tool import Tool
from gspo_env.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What decides how an environment is exported."""

    tools: tuple[Tool, ...]
    """The tools of the first episode."""
    goes_on: bool
    """Whether an episode goes on after a first action without a call."""
    overridden: frozenset[str]
    """Methods and values of `TextEnv` that the environment replaces."""


_TABLE = (
    ("trl", "", "the rewards of turns: TRL trains on one reward, the outcome; they are in the "
     "extra column `turn_rewards`, with `reward_parts`, `success` and `stop_reason`"),
    ("trl", "", "truncation: a completion that TRL cuts has the outcome of a cut episode; "
     "`stop_reason` says so"),
    ("trl", "goes_on", "actions as text: they are the argument of the tool `act`; a message "
     "without a call is the last action"),
    ("trl", "tools", "the text and the reasoning beside a call: the environment does not see it"),
    ("trl", "tools", "several calls in one message: each is a turn of its own"),
    ("trl", "tools", "limits in the JSON schema of arguments other than types and choices"),
    ("trl", "", "conversations, tools, stop texts and token limits that change during an episode; "
     "a warning names the environment where it happens"),
    ("verifiers", "", "the rewards of turns, `stop_reason` and truncation: they are in "
     "`trace.info['gspo_env']`; the reward is the outcome, `success` and `reward_parts` metrics"),
    ("verifiers", "tools", "several calls in one message: one text answers all of them"),
    ("verifiers", "tools", "the role of an answer to a call that the model's server leaves in the "
     "text: it is a user's message"),
    ("openenv", "", "truncation: `done` ends both; the last observation's metadata has "
     "`episode`, with `truncated`, `success` and the outcome"),
    ("openenv", "", "the conversation, the tools and their changes: they are in the metadata, and "
     "the trainer has to use them"),
    ("openenv", "", "`task_key`, `state_key` and keys of your own in `info`, which may hold the "
     "solution: they stay on the server"),
    ("trl verifiers", "", "masks and advantages of tokens (`token_mask`, `token_advantages`)"),
    ("trl verifiers openenv", "group_reward", "`group_reward`: no episode sees its group"),
    ("trl verifiers openenv", "snapshot", "snapshots, and with them forks"),
    ("trl verifiers openenv", "takes_cut_actions", "actions that are cut: their episode ends"),
    ("trl verifiers openenv", "rewards_by_agent", "rewards of each agent: they are `reward_parts`"),
)  # fmt: skip
"""Libraries, what an environment must have for the line to hold, and the line."""


def look(env: str | type, env_kwargs: dict[str, Any]) -> Facts:
    """Plays one turn of an environment.

    Raises:
        EnvironmentContractError: It failed.
    """
    stepper = Stepper(env, **env_kwargs)
    task = Task(env_id=stepper.env_id, seed=0)
    try:
        episode = play_now(stepper.env, task, lambda now: "", max_turns=1)
        if episode.failed:
            raise EnvironmentContractError(f"{stepper.env_id}: {episode.error}")
        names = ("group_reward", "snapshot", "takes_cut_actions", "rewards_by_agent")
        return Facts(
            tools=episode.prompt.tools,
            goes_on=not episode.ending.ended,
            overridden=frozenset(name for name in names if overrides(stepper.env, name)),
        )
    finally:
        stepper.close()


def left_out(peer: str, facts: Facts) -> list[str]:
    """Returns a line for each thing that a library cannot carry of an environment."""
    holds = {"", *facts.overridden}
    holds |= {"tools"} if facts.tools else set()
    holds |= {"goes_on"} if facts.goes_on else set()
    return [line for peers, needs, line in _TABLE if peer in peers.split() and needs in holds]
