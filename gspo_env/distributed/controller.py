"""Training on several ranks: rank 0 tells the others each step, and all take it together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gspo_env.batch.packing import pack
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.distributed.deal import (
    Share,
    pack_shares,
    split_over_ranks,
    unpack_shares,
)
from gspo_env.distributed.learner import ShardedLearner
from gspo_env.distributed.ranks import OneRankFailed, Ranks
from gspo_env.distributed.shards import ModelSpec, full_tensor, gather_weights, reshard, shard
from gspo_env.errors import GspoEnvError, ModelError
from gspo_env.learner import state
from gspo_env.learner.log import PassNumbers, UpdateStats, numbers_of
from gspo_env.learner.loss import Loss
from gspo_env.learner.minibatch import split
from gspo_env.learner.settings import LearnerConfig
from gspo_env.learner.stats import TokenValues, token_values
from gspo_env.model.check import RunMode, check_model
from gspo_env.model.scorer import Scorer

PROBE_BOUND = 1e-3
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

    def __init__(self, ranks: Ranks, blueprint: ModelSpec, plan: Plan, whole: Any) -> None:
        self.ranks, self.whole = ranks, whole
        make = partial(shard, ranks, blueprint, plan.config, whole)
        self.learner = ShardedLearner(
            ranks,
            make(),
            partial(make, frozen=True),
            plan.loss,
            plan.config,
            total_steps=plan.total_steps,
            temperature=plan.temperature,
        )
        reshard(self.learner.model)

    def update(self, shares: Sequence[Share]) -> UpdateStats:
        stats = self.learner.take_shares(shares)
        reshard(self.learner.model)
        gather_weights(self.learner.model, self.whole)
        return stats

    def gathered(self) -> list[tuple[str, Tensor]]:
        """Gathers the tensors of the state on rank 0; the other ranks keep none."""
        reshard(self.learner.model)
        kept = []
        for name, tensor in state.tensors(self.learner):
            full = full_tensor(tensor)
            if self.whole is not None:
                kept.append((name, full.detach().to("cpu", copy=True)))
        return kept

    def placed(self, name: str, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a tensor of the state, whose values rank 0 has."""
        kind, _, rest = name.partition(".")
        masters = self.learner.masters.tensors
        like: Any = None
        if kind == "weights":
            like = masters.get(rest)
        elif kind == "optimizer":
            like = list(masters.values())[int(rest.partition(".")[0])]
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
        blueprint, check = ModelSpec.of(whole), check_model(whole)
        ranks.say("learner", blueprint=asdict(blueprint), config=text)
        self._ranks, self._plan = ranks, plan
        self._member = _Member(ranks, blueprint, plan, whole)
        how = {"packed": check.way is not RunMode.ALONE, "padded": check.padded}
        self._scorer = Scorer(whole, whole, plan.temperature, **how)
        self._sharing = check.way is RunMode.SHARED
        self.policy = whole
        self.tokens: dict[tuple[int, int], TokenValues] = {}
        self._check_shards()

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """See `Learner.pack`."""
        return pack(samples, self._ranks.device, share=self._sharing)

    def logprobs(self, row: PackedBatch) -> Tensor:
        """Computes the log-probabilities of the model tokens by the whole model, (N,)."""
        with torch.no_grad():
            return self._scorer(row)[0].logprobs_N

    def update(
        self, samples: Sequence[Sample], seed: int = 0, keep: Collection[int] = ()
    ) -> dict[str, float]:
        """See `Learner.update`; minibatches are those of one process, dealt by whole episodes."""
        plan = self._plan
        engine = plan.loss.needs_engine_logprobs
        parts = split(samples, plan.config.minibatches, seed, engine=engine)
        dealt = [split_over_ranks(part, self._ranks.size) for part in parts]
        self._ranks.say("update", keep=[int(number) for number in keep])
        for rank in range(1, self._ranks.size):
            self._ranks.send(rank, *pack_shares([shares[rank] for shares in dealt]))
        stats = self._member.update([shares[0] for shares in dealt])
        others: list[PassNumbers] = []
        self.tokens = token_values(stats.passes, keep)
        for rank in range(1, self._ranks.size):
            others += unpack_numbers(*self._ranks.receive(rank))
            self.tokens |= unpack_tokens(*self._ranks.receive(rank))
        return stats.metrics(others)

    def state(self) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
        """See `Learner.state`; the tensors are gathered before this returns."""
        self._ranks.say("state")
        return state.numbers(self._member.learner), iter(self._member.gathered())

    def restore(self, named: Iterable[tuple[str, Tensor]], saved: Mapping[str, Any]) -> None:
        """See `Learner.restore`."""
        self._ranks.say("restore", numbers=saved)

        def parts() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named:
                if name.partition(".")[0] in _KINDS:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    self._ranks.say("tensor", name=name, dtype=dtype, shape=list(tensor.shape))
                    yield name, self._member.placed(name, tensor)
            self._ranks.say("restored")

        state.restore(self._member.learner, parts(), saved)
        gather_weights(self._member.learner.model, self.policy)

    def _check_shards(self) -> None:
        """Compares the model in shards with the whole one on a row.

        Raises:
            ModelError: They are different models.
        """
        apart = self._member.learner.probe()
        whole = self.logprobs(self._member.learner.probe_row())
        found = float((apart - whole).abs().max())
        dtype = next(self.policy.parameters()).dtype
        bound = PROBE_BOUND if dtype.itemsize >= 4 else _HALF_BOUND
        if not found <= bound:
            raise ModelError(
                f"the model in shards gives log-probabilities that differ by {found:.3g} from the "
                f"whole model's; expected at most {bound:g}: use one process"
            )


def serve(ranks: Ranks, plan_of: Callable[[str], Plan]) -> None:
    """Does what rank 0 says until it ends the run.

    Args:
        ranks: The ranks, of which this is not the first.
        plan_of: Makes the plan from the run's config in TOML.

    Raises:
        OneRankFailed: Rank 0 has ended without saying so, or goes on after an error of this rank,
            or a row does not fit into memory.
    """
    member: _Member | None = None
    failure: GspoEnvError | None = None
    while (told := ranks.listen())["command"] != "end":
        if told["command"] == "learner":
            failure = None
        elif failure is not None:
            raise OneRankFailed(
                f"rank 0 said {told['command']!r} after an error of rank {ranks.rank} alone: "
                f"{failure}"
            ) from failure
        try:
            member = _do(ranks, told, member, plan_of)
        except OneRankFailed:
            raise
        except GspoEnvError as error:
            member, failure = None, error  # rank 0 has it too, reports it and ends the run


def _do(
    ranks: Ranks, told: Mapping[str, Any], member: _Member | None, plan_of: Callable[[str], Plan]
) -> _Member:
    """Does one thing that rank 0 said; returns this rank's part."""
    command = told["command"]
    if command == "learner":
        blueprint = ModelSpec(**told["blueprint"])
        member = _Member(ranks, blueprint, plan_of(told["config"]), None)
        member.learner.probe()
        return member
    if member is None:
        raise OneRankFailed(f"rank 0 said {command!r}, and rank {ranks.rank} has no model")
    if command == "update":
        stats = member.update(unpack_shares(*ranks.receive(0)))
        ranks.send(0, *pack_numbers(numbers_of(stats.passes, stats.clip_range)))
        ranks.send(0, *pack_tokens(token_values(stats.passes, told["keep"])))
    elif command == "state":
        member.gathered()
    elif command == "restore":
        state.restore(member.learner, _told_tensors(ranks, member), told["numbers"])
        gather_weights(member.learner.model, None)
    else:
        raise OneRankFailed(f"rank 0 said {command!r}, which rank {ranks.rank} does not know")
    return member


def _told_tensors(ranks: Ranks, member: _Member) -> Iterator[tuple[str, Tensor]]:
    while (told := ranks.listen())["command"] == "tensor":
        empty = torch.empty(told["shape"], dtype=getattr(torch, told["dtype"]))
        yield told["name"], member.placed(told["name"], empty)


def pack_numbers(rows: Sequence[PassNumbers]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the numbers of passes as JSON and tensors."""
    header = {"rows": [[r.computed, r.tokens, r.own, r.episodes] for r in rows]}
    return header, _flat([row.values for row in rows])


def unpack_numbers(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[PassNumbers]:
    """Inverse of `pack_numbers`."""
    values = _by_row(tensors, len(header["rows"]))
    return [
        PassNumbers(values=found, computed=computed, tokens=tokens, own=own, episodes=episodes)
        for (computed, tokens, own, episodes), found in zip(header["rows"], values, strict=True)
    ]


def pack_tokens(
    found: Mapping[tuple[int, int], TokenValues],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the values of tokens as JSON and tensors."""
    names = [field.name for field in fields(TokenValues)]
    rows = [
        {n: torch.from_numpy(v) for n in names if (v := getattr(each, n)) is not None}
        for each in found.values()
    ]
    return {"turns": list(found)}, _flat(rows)


def unpack_tokens(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[tuple[int, int], TokenValues]:
    """Inverse of `pack_tokens`."""
    rows = _by_row(tensors, len(header["turns"]))
    return {
        (episode, turn): TokenValues(**{name: tensor.numpy() for name, tensor in row.items()})
        for (episode, turn), row in zip(header["turns"], rows, strict=True)
    }


def _flat(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns copies of the tensors of all rows, under names that begin with the row's number."""
    return {f"{n}.{k}": v.clone() for n, row in enumerate(rows) for k, v in row.items()}


def _by_row(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Inverse of `_flat`."""
    rows: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        n, _, name = key.partition(".")
        rows[int(n)][name] = tensor
    return rows
