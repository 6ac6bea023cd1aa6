"""Failures of environments: each costs one attempt at an episode, is logged once and counted."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from gspo_env.env.base import TextEnvironment
from gspo_env.errors import (
    ConfigError,
    EnvironmentContractError,
    EnvironmentCrashError,
    EnvironmentHangError,
    RolloutError,
)
from gspo_env.runtime.threads import call_env, foreign, log_once
from gspo_env.types import Ending, Episode, Fault, Group, StopReason, Task

logger = logging.getLogger(__name__)

_REASONS = {
    EnvironmentContractError: StopReason.INVALID,
    ConfigError: StopReason.INVALID,  # a whole sentence, of one of our own environments
    EnvironmentCrashError: StopReason.CRASH,
    EnvironmentHangError: StopReason.ENV_TIMEOUT,
}


class EnvironmentFailed(Exception):
    """An environment raised, broke the contract, hung or crashed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def describe(what: str, error: Exception) -> Fault:
    """Describes a failure of an environment.

    Args:
        what: The call, such as `step('yes')`.
        error: What it raised.
    """
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            text = str(error)
            return Fault(reason=reason, message=text, where=text.partition(" is ")[0])
    raised = foreign(error)
    return Fault(
        reason=StopReason.ERROR,
        message=f"{what} raised {raised.name}: {raised.text} ({raised.where})",
        where=f"{raised.name} at {raised.where}",
        traceback=raised.trace,
    )


def hang(method: str, seconds: float | None) -> Fault:
    """Describes a call that did not return before the episode's time was over."""
    message = f"{method} had not returned when the {seconds:g} s of its episode were over"
    return Fault(
        reason=StopReason.ENV_TIMEOUT,
        message=message,
        where=f"{method.partition('(')[0]}() did not return",
    )


@asynccontextmanager
async def limited(call: str, seconds: float | None) -> AsyncIterator[None]:
    """Bounds a call of an environment.

    Args:
        call: Names it, such as `abandon()`.
        seconds: Its limit.

    Raises:
        EnvironmentFailed: What runs inside raised, or was not over in time.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except Exception as error:
        fault = hang(call, seconds) if limit.expired() else describe(call, error)
        raise EnvironmentFailed(fault) from error


def lost(episode: Episode, fault: Fault) -> Episode:
    """Returns an episode that was played and cannot be scored."""
    return replace(
        episode, ending=replace(episode.ending, reason=fault.reason, success=False, fault=fault)
    )


def lose_unscored(group: Group, log: FaultLog) -> Group:
    """Returns a group in which the episodes that nothing has scored are lost."""
    fault = Fault(
        reason=StopReason.UNSCORED,
        message="nothing scored the episode: each of its rewards is None",
        where="no reward",
    )

    def checked(episode: Episode) -> Episode:
        if episode.failed or not is_unscored(episode):
            return episode
        log.note(episode.task, fault)
        return lost(episode, fault)

    return replace(group, episodes=tuple(map(checked, group.episodes)))


def is_unscored(episode: Episode) -> bool:
    """Returns whether each reward of an episode is None."""
    answers = {turn.info.scored for turn in episode.turns}
    return False in answers and True not in answers


def failed_episode(task: Task, fault: Fault) -> Episode:
    """Returns the episode of an environment that could not be made."""
    return Episode(
        task=task,
        turns=(),
        ending=Ending(reason=fault.reason, success=False, fault=fault),
    )


@dataclass(slots=True)
class FaultLog:
    """Logs the first failure of each cause and counts all."""

    first: Fault | None = None
    counts: Counter[StopReason] = field(default_factory=Counter)
    """Failures by reason, those that were played again included."""
    _causes: Counter[str] = field(default_factory=Counter)

    def note(self, task: Task, fault: Fault) -> None:
        """Counts a failure."""
        self.first = self.first or fault
        self.counts[fault.reason] += 1
        self._causes[fault.where] += 1
        if self._causes[fault.where] == 1:
            logger.error("episode of %s (seed %d): %s", task.env_id, task.seed, fault.message)

    def summarise(self) -> None:
        """Logs how often each cause occurred that occurred more than once, and forgets them."""
        for where, count in self._causes.most_common(20):
            if count > 1:
                logger.error("%d failures of environments: %s", count, where)
        self._causes.clear()


def close_quietly(env: TextEnvironment) -> None:
    """Closes an environment; an exception is logged, once for each line: its episodes are over."""
    try:
        call_env(env.close)
    except Exception as error:
        log_once("close()", error)


def refuse_failures(episodes: Sequence[Episode], rate: float = 0.5) -> None:
    """Raises an error if too many episodes failed in their environment.

    Args:
        episodes: Every episode of a collection.
        rate: The largest share that may fail. It is an error in any case if all do.

    Raises:
        RolloutError: More episodes failed, after every retry.
    """
    failed = [e for e in episodes if e.failed]
    if len(failed) > rate * len(episodes) or len(failed) == len(episodes) > 0:
        raise RolloutError(
            f"{len(failed)} of {len(episodes)} episodes failed in their environment, where at most "
            f"{rate:.0%} may; the first error: {failed[0].error}"
        )
