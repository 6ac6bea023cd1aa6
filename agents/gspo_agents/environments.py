"""The environments that an agent plays in: made, tried out and split into tasks.

A worker process imports this module too, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from gspo_env.config import Config
from gspo_env.env.base import TextEnvironment, attribute, num_eval_tasks
from gspo_env.env.info import declared_score
from gspo_env.env.registration import Member, find_spec, label
from gspo_env.errors import ConfigError, EnvironmentHangError
from gspo_env.rollout.failures import FaultLog, close_quietly
from gspo_env.rollout.play import try_out
from gspo_env.rollout.pool import EnvPool, EnvPools, make_member
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runtime.threads import in_thread
from gspo_env.training.split import (
    Split,
    hold_out,
    join,
    read_resets,
    share_out,
)
from gspo_env.types import ResetInfo, Score, Task

_CLOSE_SECONDS = 10.0
"""Seconds that an environment may take to close after an error, with the call that still runs."""


def make_pool(config: Config, faults: FaultLog) -> EnvPools:
    """Makes the environments of a worker."""
    isolated = config.rollout.isolation == "process"
    pools = {
        m.env_id: EnvPool(partial(make_member, m, config.rollout), isolated=isolated, faults=faults)
        for m in config.environments
    }
    return EnvPools(pools, faults)


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

    def __init__(
        self,
        config: Config,
        owner: object,
        make: Callable[[Member, RolloutConfig], TextEnvironment],
    ) -> None:
        self.config, self._make = config, make
        self.members = {member.env_id: member for member in config.environments}
        """The settings of each environment, by the `env_id` of its tasks."""
        self.env_id = next(iter(self.members)) if len(self.members) == 1 else label(config.env)
        """The `env_id` of the tasks of an only environment, or a name for all of them."""
        limits = config.rollout
        isolated = limits.isolation == "process"  # then the child has limits of its own
        self._thread = in_thread(owner)
        seconds = None if isolated else limits.episode_timeout
        self.guard = partial(self._thread.guard, self.env_id, seconds)
        """Calls a function in the thread of the environments."""
        self.envs: dict[str, TextEnvironment] = {}
        """One environment of each kind, whose declarations are read."""
        with self.closing(only_after_error=True):
            for env_id, member in self.members.items():
                self.envs[env_id] = self.guard(make, member, limits)
                self.guard(try_out, env_id, self.envs[env_id], limits.max_retries)
        self._splits: dict[int, Split] = {}

    @property
    def weights(self) -> dict[str, float]:
        """The weights, by the `env_id` of the tasks."""
        return {env_id: member.weight for env_id, member in self.members.items()}

    @property
    def scores(self) -> dict[str, Score | None]:
        """The score that each environment declares."""
        return {env_id: declared_score(env_id, env) for env_id, env in self.envs.items()}

    @contextmanager
    def closing(self, *, only_after_error: bool = False) -> Iterator[Mapping[str, TextEnvironment]]:
        """Yields `envs`, and closes them; what they declare can still be read.

        After an error, which may be a signal, nothing waits for an environment that hangs.
        """
        try:
            yield self.envs
        except BaseException:
            with suppress(EnvironmentHangError):
                for env in self.envs.values():
                    self._thread.guard(self.env_id, _CLOSE_SECONDS, close_quietly, env)
            raise
        if not only_after_error:
            self.close()

    def close(self) -> None:
        """Closes the environments; what they declare can still be read."""
        for env in self.envs.values():
            self.guard(close_quietly, env)

    @contextmanager
    def pool(self) -> Iterator[EnvPools]:
        """Yields a pool of them, and closes it afterwards."""
        faults = FaultLog()
        pools = {
            env_id: EnvPool(
                partial(self._make, member, self.config.rollout), self.envs[env_id], faults=faults
            )
            for env_id, member in self.members.items()
        }
        with closing(EnvPools(pools, faults)) as pool:
            yield pool

    @property
    def num_eval_tasks(self) -> int:
        """The number of all tasks for evaluation.

        Raises:
            ConfigError: An environment does not declare it.
        """
        return sum(num_eval_tasks(*item) for item in self.envs.items())

    def split(self, count: int, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Split:
        """Returns the tasks of an evaluation and the task keys that training does not play.

        Several environments have tasks in proportion to their weights, and at least one each; or
        all of their tasks, if these are so many.

        Args:
            count: Tasks of the evaluation.
            run: Runs a coroutine on the loop of the agent.
        """
        if count < len(self.envs):
            raise ConfigError(
                f"an evaluation has {count} tasks of {len(self.envs)} environments; expected at "
                "least one of each"
            )
        if count not in self._splits:
            with self.pool() as pool:

                def read(tasks: Sequence[Task]) -> list[ResetInfo | None]:
                    return list(run(read_resets(pool, self.config.rollout, tasks)))

                shares = [attribute(env, "num_eval_tasks", None) for env in self.envs.values()]
                if None in shares or sum(shares) != count:
                    shares = share_out(count, list(self.weights.values()))
                splits = [
                    hold_out(env_id, share, read, attribute(env, "num_tasks", None))
                    for (env_id, env), share in zip(self.envs.items(), shares, strict=True)
                ]
            self._splits[count] = join(self._share_keys(splits))
        return self._splits[count]

    def _share_keys(self, splits: Sequence[Split]) -> list[Split]:
        """Holds the keys of an environment out in all members that are this environment.

        They may have the same tasks, such as rows with another reward function.
        """
        kinds = [find_spec(member.spec).entry_point for member in self.members.values()]
        held: dict[Any, frozenset[str]] = dict.fromkeys(kinds, frozenset())
        for kind, split in zip(kinds, splits, strict=True):
            held[kind] = held[kind].union(*split.held_out.values())
        return [
            replace(split, held_out={env_id: held[kind]} if held[kind] else {})
            for env_id, kind, split in zip(self.members, kinds, splits, strict=True)
        ]
