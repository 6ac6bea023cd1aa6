"""The environments that an agent plays in: made, tried out and split into tasks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gspo_env.config import Config
from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.env.info import declared_score
from gspo_env.env.registration import Member, label, resolve_env
from gspo_env.errors import ConfigError
from gspo_env.rollout.failures import FaultLog, close_quietly
from gspo_env.rollout.play import try_out
from gspo_env.rollout.pool import EnvPool, EnvPools
from gspo_env.runtime.threads import in_thread
from gspo_env.training.split import Split, hold_out, join, read_resets, share_out
from gspo_env.types import ResetInfo, Score, Task

Make = Callable[[Member, Config], TextEnvironment]
"""Makes an environment of a config."""


@dataclass(frozen=True, slots=True)
class Place:
    """One environment of a run."""

    member: Member
    env_id: str
    """The `env_id` of its tasks."""
    env: TextEnvironment
    """One of its kind, whose declarations are read."""
    config: Config
    maker: Make

    def make(self) -> TextEnvironment:
        """Makes another one."""
        return self.maker(self.member, self.config)

    @property
    def score(self) -> Score | None:
        """The score that the environment declares."""
        return declared_score(self.env_id, self.env)


class Environments:
    """The environments of a config: nearly always one.

    Args:
        config: The settings of the run.
        owner: The thread in which they are made and tried out ends with this object.
        make: Makes one.

    Raises:
        EnvironmentContractError: One of them raised, or broke the contract.
        EnvironmentHangError: One of them did not return in time.
        UnknownEnvironmentError: One of them is not found.
    """

    def __init__(self, config: Config, owner: object, make: Make) -> None:
        members = config.environments
        ids = [member.env_id for member in members]
        self.config = config
        self.env_id = ids[0] if len(ids) == 1 else label(config.env)
        """The `env_id` of the tasks of an only environment, or a name for all of them."""
        limits = config.rollout
        own = limits.isolation == "process"  # then the child has limits of its own
        self.guard = in_thread(owner, self.env_id, None if own else limits.episode_timeout)
        """Calls a function in the thread of the environments."""
        self.places: dict[str, Place] = {}
        for env_id, member in zip(ids, members, strict=True):
            env = self.guard(make, member, config)
            self.guard(try_out, env_id, env, limits.max_retries)
            self.places[env_id] = Place(member, env_id, env, config, make)
        self._splits: dict[int, Split] = {}

    @property
    def first(self) -> Place:
        """The first environment."""
        return next(iter(self.places.values()))

    @property
    def envs(self) -> dict[str, TextEnvironment]:
        """One of each kind, by the `env_id` of its tasks."""
        return {env_id: place.env for env_id, place in self.places.items()}

    @property
    def weights(self) -> dict[str, float]:
        """The weights, by the `env_id` of the tasks."""
        return {env_id: place.member.weight for env_id, place in self.places.items()}

    @property
    def scores(self) -> dict[str, Score | None]:
        """The score that each environment declares."""
        return {env_id: place.score for env_id, place in self.places.items()}

    def close(self) -> None:
        """Closes the environments; what they declare can still be read."""
        for place in self.places.values():
            self.guard(close_quietly, place.env)

    @contextmanager
    def pool(self) -> Iterator[EnvPools]:
        """Yields a pool of them, and closes it afterwards."""
        faults = FaultLog()
        pools = {n: EnvPool(p.make, p.env, faults=faults) for n, p in self.places.items()}
        pool = EnvPools(pools, faults)
        try:
            yield pool
        finally:
            pool.close()

    def split(self, count: int, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Split:
        """Returns the tasks of an evaluation and the task keys that training does not play.

        Several environments have tasks in proportion to their weights, and at least one each.

        Args:
            count: Tasks of the evaluation.
            run: Runs a coroutine on the loop of the agent.
        """
        if count < len(self.places):
            raise ConfigError(
                f"an evaluation has {count} tasks of {len(self.places)} environments; expected at "
                "least one of each"
            )
        if count not in self._splits:
            with self.pool() as pool:

                def read(tasks: Sequence[Task]) -> list[ResetInfo | None]:
                    return list(run(read_resets(pool, self.config.rollout, tasks)))

                weights = list(self.weights.values())
                shares = zip(self.places.values(), share_out(count, weights), strict=True)
                splits = [
                    hold_out(place.env_id, n, read, attribute(place.env, "num_tasks", None))
                    for place, n in shares
                ]
            self._splits[count] = join(self._share_keys(splits))
        return self._splits[count]

    def _share_keys(self, splits: Sequence[Split]) -> list[Split]:
        """Holds the keys of an environment out in all members that are this environment.

        They may have the same tasks, such as rows with another reward function.
        """
        ids = [resolve_env(place.member.spec) for place in self.places.values()]
        held: dict[str, frozenset[str]] = dict.fromkeys(ids, frozenset())
        for spec, split in zip(ids, splits, strict=True):
            held[spec] = held[spec].union(*split.held_out.values())
        return [
            replace(split, held_out={env_id: held[spec]} if held[spec] else {})
            for env_id, spec, split in zip(self.places, ids, splits, strict=True)
        ]
