"""What scores a group of episodes after they were played, read as strictly as a step."""

from __future__ import annotations

from dataclasses import replace

from gspo_env.env.info import REWARD, STEP, fault, read_value
from gspo_env.errors import EnvironmentContractError
from gspo_env.types import Episode, Group


def parse_scored(group: Group, scored: object) -> Group:
    """Parses the result of `group_reward`: the group with other rewards.

    Raises:
        EnvironmentContractError: It is something else, or a number has an invalid value.
    """
    env_id, call = group.task.env_id, "group_reward()"
    if not isinstance(scored, Group):
        raise fault(env_id, f"{call} result", scored, "a Group")
    turns, expected = ([len(e.turns) for e in g.episodes] for g in (scored, group))
    if turns != expected:
        raise EnvironmentContractError(
            f"{env_id}: {call} result has episodes of {turns} turns, expected {expected}"
        )

    def parse(episode: Episode) -> Episode:
        turns = tuple(
            replace(
                turn,
                reward=read_reward(env_id, f"{call} reward", turn.reward),
                info=replace(
                    turn.info,
                    reward_parts=read_parts(env_id, f"{call} reward_parts", turn.info.reward_parts),
                ),
            )
            for turn in episode.turns
        )
        outcome = episode.ending.outcome
        if outcome is not None:
            outcome = read_reward(env_id, f"{call} outcome", outcome)
        return replace(episode, turns=turns, ending=replace(episode.ending, outcome=outcome))

    return replace(scored, episodes=tuple(map(parse, scored.episodes)))


def read_reward(owner: str, what: str, value: object) -> float:
    """Returns a reward.

    Raises:
        EnvironmentContractError: It is not a number that `step` may return.
    """
    number: float = read_value(owner, what, value, REWARD)
    return number


def read_parts(owner: str, what: str, value: object) -> dict[str, float]:
    """Returns numbers by name.

    Raises:
        EnvironmentContractError: They are something else.
    """
    parts: dict[str, float] = read_value(owner, what, value, STEP["reward_parts"])
    return parts
