"""Who plays the episodes of an agent: this process, or workers in other ones.

A worker imports this module too, so that it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.config import Config
from gspo_env.engines.vllm.settings import VLLMServer
from gspo_env.env.base import TextEnvironment
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError
from gspo_env.registry import name_of
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.failures import FaultLog
from gspo_env.rollout.mix import Member
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
    if not isinstance(engine, VLLMServer):
        raise ConfigError(
            f"workers is {limits.workers!r} and the engine is {name_of('engine', engine)!r}; "
            "expected --engine vllm-server, on whose servers the workers sample"
        )
    if limits.ray_address and not engine.addresses:
        raise ConfigError(
            f"ray_address is {limits.ray_address!r} and the engine has no addresses; expected "
            "--addresses of servers that all machines reach: those that a run starts listen on "
            "this machine only"
        )
    from gspo_env.distributed.ray import require_ray

    require_ray()


@contextmanager
def open_collector(
    config: Config,
    start_engine: Callable[[], Any],
    chat: ChatTokenizer,
    pool: EnvPool | EnvPools,
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
    count = limits.ray_workers
    if not count:
        yield Collector(start_engine(), chat, pool, limits, vocab_size)
        return
    from gspo_env.distributed.pool import WorkerCollector, WorkerPool
    from gspo_env.distributed.ray import RayCluster
    from gspo_env.distributed.worker import WorkerSetup

    with closing(RayCluster(count, limits.ray_address)) as cluster:
        engine = start_engine()  # while the cluster starts
        setup = WorkerSetup(
            make_pool=partial(make_pool, config),
            tokenizer=chat.tokenizer,
            history=chat.history,
            config=limits,
            vocab_size=vocab_size,
            fleet=engine.fleet,
        )
        cluster.connect(setup)
        with closing(WorkerPool(cluster.start, engine, limits)) as crew:
            yield WorkerCollector(engine, chat, pool, limits, vocab_size, crew=crew)


def make_pool(config: Config, faults: FaultLog) -> EnvPool | EnvPools:
    """Makes the environments of a worker."""
    isolated = config.rollout.isolation == "process"
    made = {
        member.env_id: EnvPool(
            partial(make_member, member, config), isolated=isolated, faults=faults
        )
        for member in config.environments
    }
    return EnvPools(made, faults) if len(made) > 1 else next(iter(made.values()))


def make_member(member: Member, config: Config) -> TextEnvironment:
    """Makes an environment of a config, in a process of its own if the config says so."""
    if config.rollout.isolation == "process":
        return IsolatedEnv(member.spec, dict(member.kwargs), config.rollout.episode_timeout)
    return make_env(member.spec, **member.kwargs)
