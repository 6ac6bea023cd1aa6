"""Training on several ranks: rank 0 tells the others each step, and all take it together."""

from __future__ import annotations

import logging
import os
import signal
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gspo_env.batch.packing import pack
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.config import Config, from_dict, learner_arguments, to_toml
from gspo_env.distributed.learner import ShardedLearner
from gspo_env.distributed.messages import (
    Share,
    pack_passes,
    pack_shares,
    split_over_ranks,
    unpack_passes,
    unpack_shares,
)
from gspo_env.distributed.ranks import OneRankFailed, Ranks, join
from gspo_env.distributed.shards import ModelSpec, full_tensor, gather_weights, reshard, shard
from gspo_env.errors import GspoEnvError, ModelError, above
from gspo_env.files import step_folders
from gspo_env.learner import state
from gspo_env.learner.losses import Loss
from gspo_env.learner.minibatch import advantage_metrics, split
from gspo_env.learner.restore import restore
from gspo_env.learner.settings import LearnerConfig
from gspo_env.learner.stats import TokenValues, UpdateStats
from gspo_env.model.check import RunMode, check_model
from gspo_env.model.scorer import Scorer
from gspo_env.runtime.processes import die_with_parent

CHECK_BOUND = 1e-3
"""Largest difference in nats between the whole model and the one in shards, in float32."""
_HALF_BOUND = 0.3
_KINDS = ("weights", "buffers", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings that all ranks share."""

    loss: Loss
    config: LearnerConfig
    total_steps: int
    temperature: float


class _Member:
    """What rank 0 and the others do alike, in the same order."""

    def __init__(self, ranks: Ranks, spec: ModelSpec, plan: Plan, whole: Any) -> None:
        self.ranks, self.whole = ranks, whole
        make_shards = partial(shard, ranks, spec, plan.config, whole)
        self.learner = ShardedLearner(
            ranks,
            make_shards(),
            partial(make_shards, frozen=True),
            plan.loss,
            plan.config,
            total_steps=plan.total_steps,
            temperature=plan.temperature,
        )
        reshard(self.learner.policy)

    def update(self, shares: Sequence[Share]) -> UpdateStats:
        stats = self.learner.take_shares(shares)
        reshard(self.learner.policy)
        gather_weights(self.learner.policy, self.whole)
        return stats

    def gather_state(self) -> list[tuple[str, Tensor]]:
        """Gathers the tensors of the state on rank 0; the other ranks keep none."""
        reshard(self.learner.policy)
        gathered = []
        for name, tensor in state.tensors(self.learner):
            full = full_tensor(tensor)
            if self.whole is not None:
                gathered.append((name, full.detach().to("cpu", copy=True)))
        return gathered

    def distribute(self, name: str, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a tensor of the state, whose values rank 0 has."""
        kind, _, rest = name.partition(".")
        masters = self.learner.masters.tensors
        like: Any = None
        if kind == "weights":
            like = masters.get(rest)
        elif kind == "optimizer":
            groups = self.learner.optimizer.param_groups
            weights = [weight for group in groups for weight in group["params"]]
            like = weights[int(rest.partition(".")[0])]
        if isinstance(like, DTensor) and like.shape == tensor.shape:
            tensor = tensor.to(self.ranks.device)
            return distribute_tensor(tensor, like.device_mesh, like.placements)
        return self.ranks.broadcast(tensor.contiguous())


class Controller:
    """The learner of rank 0, which has the whole model and leads the other ranks.

    The whole model plays and is saved. After each update it gets the weights that train from the
    shards, before anything is sent to an engine.

    Args:
        ranks: The ranks, whose others are in `serve`.
        whole: The model.
        plan: The settings.
        text: The run's config in TOML, from which the other ranks make the same plan.

    Raises:
        ConfigError: The optimiser cannot work on shards.
        ModelError: The other ranks cannot build the model, or score it otherwise.
    """

    def __init__(self, ranks: Ranks, whole: Any, plan: Plan, text: str) -> None:
        whole.to(ranks.device)
        spec, check = ModelSpec.of(whole), check_model(whole)
        ranks.command("learner", spec=asdict(spec), config=text)
        self._ranks, self._plan = ranks, plan
        self._member = _Member(ranks, spec, plan, whole)
        packed = check.mode is not RunMode.UNPACKED
        self._scorer = Scorer(whole, plan.temperature, packed=packed, padded=check.padded)
        self._share_prefixes = check.mode is RunMode.SHARED
        self.policy = whole
        self.tokens: dict[tuple[int, int], TokenValues] = {}
        self._check_shards()

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """See `Learner.pack`."""
        return pack(samples, self._ranks.device, share=self._share_prefixes)

    def logprobs(self, row: PackedBatch) -> Tensor:
        """Computes the log-probabilities of the model tokens by the whole model, (N,)."""
        with torch.no_grad():
            return self._scorer(row)[0].logprobs_N

    def update(
        self, samples: Sequence[Sample], seed: int = 0, keep: Collection[int] = ()
    ) -> dict[str, float]:
        """See `Learner.update`; each rank gets whole episodes of every minibatch."""
        plan, others = self._plan, range(1, self._ranks.size)
        needed = plan.loss.needs_engine_logprobs
        parts = split(samples, plan.config.minibatches, seed, needs_engine_logprobs=needed)
        minibatches = [split_over_ranks(part, self._ranks.size) for part in parts]
        self._ranks.command("update")
        for rank in others:
            self._ranks.send(rank, *pack_shares([shares[rank] for shares in minibatches]))
        stats = self._member.update([shares[0] for shares in minibatches])
        passes = [*stats.passes]
        for rank in others:
            passes += unpack_passes(*self._ranks.receive(rank))
        stats = replace(stats, passes=passes)
        self.tokens = stats.token_values(keep)
        return stats.metrics() | advantage_metrics(parts)

    def state(self) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
        """See `Learner.state`; the tensors are gathered before this returns."""
        self._ranks.command("state")
        return state.numbers(self._member.learner), iter(self._member.gather_state())

    def restore(self, named: Iterable[tuple[str, Tensor]], saved: Mapping[str, Any]) -> None:
        """See `Learner.restore`."""
        self._ranks.command("restore", numbers=saved)

        def parts() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named:
                if name.partition(".")[0] in _KINDS:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    self._ranks.command("tensor", name=name, dtype=dtype, shape=list(tensor.shape))
                    yield name, self._member.distribute(name, tensor)
            self._ranks.command("restored")

        restore(self._member.learner, parts(), saved)
        gather_weights(self._member.learner.policy, self.policy)

    def _check_shards(self) -> None:
        """Compares the model in shards with the whole one on a row.

        Raises:
            ModelError: They are different models.
        """
        sharded_N = self._member.learner.score_check_row()
        whole_N = self.logprobs(self._member.learner.check_row())
        difference = float((sharded_N - whole_N).abs().max())
        dtype = next(self.policy.parameters()).dtype
        check = check_model(self.policy)
        bound = max(CHECK_BOUND, check.bound) if dtype.itemsize >= 4 else _HALF_BOUND
        if not difference <= bound:
            raise ModelError(
                "the model in shards gives log-probabilities that differ by "
                f"{above(difference, bound)} from the whole model's; expected at most {bound:g}: "
                "use one process"
            )


def serve(ranks: Ranks, plan_of: Callable[[str], Plan]) -> None:
    """Follows the commands of rank 0 until it ends the run.

    Args:
        ranks: The ranks, of which this is not the first.
        plan_of: Makes the plan from the run's config in TOML.

    Raises:
        OneRankFailed: Rank 0 has died, or continues after an error of this rank, or a row does
            not fit into memory.
    """
    member: _Member | None = None
    failure: GspoEnvError | None = None
    while (message := ranks.next_command())["command"] != "end":
        if message["command"] == "learner":
            failure = None
        elif failure is not None:
            raise OneRankFailed(
                f"rank 0 commands {message['command']!r} after an error of rank {ranks.rank} "
                f"alone: {failure}"
            ) from failure
        try:
            member = _follow(ranks, message, member, plan_of)
        except OneRankFailed:
            raise
        except GspoEnvError as error:
            member, failure = None, error  # rank 0 has it too, reports it and ends the run


def _follow(
    ranks: Ranks, message: Mapping[str, Any], member: _Member | None, plan_of: Callable[[str], Plan]
) -> _Member:
    """Follows one command; returns this rank's part."""
    command = message["command"]
    if command == "learner":
        member = _Member(ranks, ModelSpec(**message["spec"]), plan_of(message["config"]), None)
        member.learner.score_check_row()
    elif member is None:
        raise OneRankFailed(f"rank 0 commands {command!r}, and rank {ranks.rank} has no model")
    elif command == "update":
        stats = member.update(unpack_shares(*ranks.receive(0)))
        ranks.send(0, *pack_passes(stats.passes))
    elif command == "state":
        member.gather_state()
    elif command == "restore":
        restore(member.learner, _receive_tensors(ranks, member), message["numbers"])
        gather_weights(member.learner.policy, None)
    return member


def _receive_tensors(ranks: Ranks, member: _Member) -> Iterator[tuple[str, Tensor]]:
    while (message := ranks.next_command())["command"] == "tensor":
        empty = torch.empty(message["shape"], dtype=getattr(torch, message["dtype"]))
        yield message["name"], member.distribute(message["name"], empty)


def run_as_rank(train: Callable[[Ranks], None]) -> None:
    """Joins the other ranks; rank 0 trains, and the others serve it until it ends the run.

    Args:
        train: Trains, given the ranks; called by rank 0.

    Raises:
        TrainingError: Rank 0 has died.
    """
    die_with_parent(os.getppid())
    with join() as ranks:
        if ranks.rank == 0:
            train(ranks)
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the run ends
        logging.getLogger("gspo_env").setLevel(logging.ERROR)  # rank 0 warns of the same
        serve(ranks, lambda text: Plan(**learner_arguments(from_dict(tomllib.loads(text)))))


def make_controller(ranks: Ranks, model: Any, config: Config) -> Controller:
    """Makes the learner of rank 0."""
    return Controller(ranks, model, Plan(**learner_arguments(config)), to_toml(config))


def restarted_run(config: Config) -> str:
    """Returns the folder of the run that torchrun started these ranks again for, or ''."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resumable = config.output and step_folders(Path(config.output, "checkpoints"))
    return config.output if restarted and resumable else ""
