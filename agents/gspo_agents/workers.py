"""Who plays the episodes of an agent: this process, or workers in other ones.

A worker imports this module too, so that it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.config import Config
from gspo_env.env.base import TextEnvironment
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.registration import Member, make_env
from gspo_env.errors import ConfigError
from gspo_env.registry import load_function, name_of
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.failures import FaultLog
from gspo_env.rollout.pool import EnvPool, EnvPools


def check_workers(config: Config) -> None:
    """Checks that the workers of a config can play.

    Raises:
        ConfigError: They need another engine, or servers that they can reach.
        MissingExtraError: Ray is not installed.
    """
    limits, engine = config.rollout, config.engine
    if not limits.ray_workers:
        return
    if name_of("engine", engine) != "vllm-server":
        raise ConfigError(
            f"workers is {limits.workers!r} and the engine is {name_of('engine', engine)!r}; "
            "expected --engine vllm-server, on whose servers the workers sample"
        )
    if limits.ray_address and not getattr(engine, "addresses", ()):
        raise ConfigError(
            f"ray_address is {limits.ray_address!r} and the engine has no addresses; expected "
            "--addresses of servers that all machines reach: those that a run starts listen on "
            "this machine only"
        )
    load_function("gspo_env.distributed.ray:require_ray", "workers")()


@contextmanager
def open_collector(
    config: Config,
    start_engine: Callable[[], Any],
    chat: ChatTokenizer,
    pool: EnvPools,
    vocab_size: int,
) -> Iterator[Collector]:
    """Yields what collects the episodes of a config; ends its workers afterwards.

    Args:
        config: The settings.
        start_engine: Returns the engine.
        chat: Renders the conversations.
        pool: The environments of this process.
        vocab_size: Number of ids of the model.
    """
    limits = config.rollout
    if not limits.ray_workers:
        yield Collector(start_engine(), chat, pool, limits, vocab_size)
        return
    open_workers = load_function("gspo_env.distributed.ray:open_workers", "workers")
    make = partial(make_pool, config)
    with open_workers(start_engine, chat, pool, limits, vocab_size, make) as collector:
        yield collector


def make_pool(config: Config, faults: FaultLog) -> EnvPools:
    """Makes the environments of a worker."""
    isolated = config.rollout.isolation == "process"
    pools = {
        member.env_id: EnvPool(
            partial(make_member, member, config), isolated=isolated, faults=faults
        )
        for member in config.environments
    }
    return EnvPools(pools, faults)


def make_member(member: Member, config: Config) -> TextEnvironment:
    """Makes an environment of a config, in a process of its own if the config says so."""
    if config.rollout.isolation == "process":
        return IsolatedEnv(member.spec, dict(member.kwargs), config.rollout.episode_timeout)
    return make_env(member.spec, **member.kwargs)
