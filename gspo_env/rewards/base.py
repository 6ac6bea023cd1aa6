"""Rewards of finished episodes that see the whole group."""

from __future__ import annotations

import asyncio
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gspo_env.env.info import PARTS, REWARD, read_value
from gspo_env.errors import EnvironmentContractError
from gspo_env.rollout.failures import FaultLog, describe, lost
from gspo_env.types import Episode, Fault, Group

_log = FaultLog()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rating:
    """What a group reward says about one episode.

    Example:
        >>> Rating(rewards=(None, 0.7), parts={"judge_unparsable": 0.0}).rewards
        (None, 0.7)
    """

    rewards: tuple[float | None, ...] = ()
    """(K,) the reward of each turn before weighting; None adds nothing. An episode without any
    number, from this or another reward, is not scored, unless it is alone in its group."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the episode, logged as `rollout/reward/NAME`."""
    fault: Fault | None = None
    """Why there is no rating: the episode then counts as lost, not as one with a reward of 0."""


class GroupReward(ABC):
    """A reward that sees the finished episodes of a group together.

    Environments with `rewards=[...]` take it there; others call `score_group` in `group_reward`.
    """

    name: str = "group_reward"
    """Name of its metric."""

    @abstractmethod
    async def __call__(self, group: Group) -> Sequence[Rating]:
        """Returns a rating for each episode of the group, failed ones included."""


async def score_group(
    rewards: Sequence[tuple[GroupReward, float]], success_from: float | None, group: Group
) -> Group:
    """Adds group rewards to the rewards of the turns.

    The outcome grows by them, unless it is the environment's own. If a reward raises, all episodes
    of the group count as lost.

    Args:
        rewards: The rewards with their weights.
        success_from: Minimum reward of the last turn that counts as success; None leaves that to
            the environment, or else to an outcome above 0.
        group: The finished episodes.
    """
    rows = await asyncio.gather(*(_rate(reward, group) for reward, _ in rewards))
    episodes = list(group.episodes)
    for (reward, weight), ratings in zip(rewards, rows, strict=True):
        for g, rating in enumerate(ratings):
            if episodes[g].turns and not episodes[g].failed:
                is_alone = len(episodes) == 1
                episodes[g] = _add(
                    episodes[g], reward.name, weight, rating, success_from, is_alone=is_alone
                )
    return replace(group, episodes=tuple(episodes))


async def _rate(reward: GroupReward, group: Group) -> Sequence[Rating]:
    owner, turns = f"the reward {reward.name}", [len(e.turns) for e in group.episodes]
    try:
        ratings = list(await reward(group))
        if len(ratings) != len(turns):
            raise EnvironmentContractError(
                f"{owner} has {len(ratings)} ratings, expected one for each of {len(turns)} "
                "episodes"
            )
        return [_read(owner, *pair) for pair in zip(ratings, turns, strict=True)]
    except Exception as error:  # a user's code: the episodes are lost, the run continues
        return [Rating(fault=describe(owner, error))] * len(turns)


def _read(owner: str, rating: Rating, turns: int) -> Rating:
    """Returns a rating with plain numbers."""
    if not isinstance(rating, Rating) or len(rating.rewards) not in (0, turns):
        raise EnvironmentContractError(
            f"{owner} is {reprlib.repr(rating)}, expected a Rating with a number or None for each "
            f"of {turns} turns"
        )
    numbers = (
        None if r is None else read_value(owner, "number", r, REWARD) for r in rating.rewards
    )
    parts = read_value(owner, "parts", rating.parts, PARTS)
    return replace(rating, rewards=tuple(numbers), parts=parts)


def _add(
    episode: Episode,
    name: str,
    weight: float,
    rating: Rating,
    success_from: float | None,
    *,
    is_alone: bool,
) -> Episode:
    if rating.fault is not None:
        _log.note(episode.task, rating.fault)
        return lost(episode, rating.fault)
    turns = list(episode.turns)
    answered = is_alone or any(value is not None for value in rating.rewards)
    scored = (answered and weight != 0) or turns[-1].info.scored
    turns[-1] = replace(turns[-1], info=replace(turns[-1].info, scored=scored))
    for k, value in enumerate(rating.rewards):
        parts = {} if value is None else {name: value}
        parts |= rating.parts if k == len(turns) - 1 else {}
        info = replace(turns[k].info, reward_parts={**turns[k].info.reward_parts, **parts})
        turns[k] = replace(turns[k], info=info, reward=turns[k].reward + weight * (value or 0.0))
    ending, last = episode.ending, turns[-1]
    if success_from is not None:
        success = last.reward >= success_from
        turns[-1] = replace(last, info=replace(last.info, success=success))
        ending = replace(ending, success=ending.ended and success)
    return replace(episode, turns=tuple(turns), ending=ending)
