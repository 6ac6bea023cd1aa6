"""What scores a group of episodes after they were played, read as strictly as a step."""

from __future__ import annotations

from dataclasses import replace

from gspo_env.env.info import PARTS, REWARD, fault, read_value
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
                reward=read_value(env_id, f"{call} reward", turn.reward, REWARD),
                info=replace(
                    turn.info,
                    reward_parts=read_value(
                        env_id, f"{call} reward_parts", turn.info.reward_parts, PARTS
                    ),
                ),
            )
            for turn in episode.turns
        )
        outcome = episode.ending.outcome
        if outcome is not None:
            outcome = read_value(env_id, f"{call} outcome", outcome, REWARD)
        return replace(episode, turns=turns, ending=replace(episode.ending, outcome=outcome))

    return replace(scored, episodes=tuple(map(parse, scored.episodes)))
