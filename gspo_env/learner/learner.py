"""The learner: samples in, one optimiser step for each minibatch out."""

from __future__ import annotations

import copy
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gspo_env.batch.packing import by_episode, microbatches, pack
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.errors import BatchError, ConfigError, TrainingError
from gspo_env.learner import state
from gspo_env.learner.losses import ClippedLoss, Loss, LossInput
from gspo_env.learner.masters import MasterWeights
from gspo_env.learner.memory import detect_out_of_memory, split_until_it_fits
from gspo_env.learner.minibatch import (
    TOKEN_PARTS,
    Microbatch,
    Minibatch,
    advantage_metrics,
    check_output,
    rows_with_split_episodes,
    split,
    with_model_tokens,
)
from gspo_env.learner.parallel import AT_ONCE, ParallelRows
from gspo_env.learner.settings import LearnerConfig, make_optimizer, rate_factor, undecayed
from gspo_env.learner.stats import PassStats, TokenValues, UpdateStats, to_cpu
from gspo_env.model.check import RunMode, check_model
from gspo_env.model.head import adapter_is_zero, is_adapted, mark_ids
from gspo_env.model.scorer import Scorer
from gspo_env.model.threads import tokens_of_pass

if TYPE_CHECKING:
    from gspo_env.learner.entropy import EntropyControl

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Learner:
    """Trains a causal LM on samples: `prepare`, `score`, then `backward` and `step` in turn.

    Dropout is off in every pass, so that all passes describe the same policy.

    Args:
        model: A `transformers` causal LM, or one wrapped by PEFT.
        loss: The loss and its settings, such as `GSPO()`.
        config: The optimiser's settings.
        total_steps: Optimiser steps of the whole run, for the schedule.
        temperature: The sampling temperature; logits are divided by it.

    Raises:
        ConfigError: `loss` is not a loss, or more than one process was launched.
        ModelError: No way to run the model gives its own log-probabilities.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss,
        config: LearnerConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
    ) -> None:
        if not isinstance(loss, Loss):
            raise ConfigError(
                f"loss is {loss!r}; expected a loss such as GSPO(), or a subclass of "
                "gspo_env.learner.Loss"
            )
        self.loss, self.config = loss, config
        check = check_model(model)
        self._packed = check.mode is not RunMode.UNPACKED
        self._share_prefixes = check.mode is RunMode.SHARED
        self._make_scorer = partial(
            Scorer, temperature=temperature, packed=self._packed, padded=check.padded
        )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"{os.environ['WORLD_SIZE']} processes were launched, and this one has not joined "
                "them; expected `gspo-env train`, or one process"
            )
        # nothing was tested on Apple's GPU
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._reference: Scorer | None = None
        """None if the reference is the policy without its adapter, or if nothing needs it."""
        if loss.needs_reference and not is_adapted(model):
            reference = self._frozen_copy(model).to(self.device).requires_grad_(False)
            self._reference = self._make_scorer(reference)
        if config.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = model.to(self.device)
        self._row_tokens = config.microbatch_tokens or tokens_of_pass(model, self.device)
        self.masters = MasterWeights(self.policy)
        self.optimizer = make_optimizer(config, self.masters.tensors, undecayed(self.policy))
        factor = partial(rate_factor, config=config, total_steps=total_steps)
        self.scheduler = LambdaLR(self.optimizer, factor)
        self.scorer = self._make_scorer(self.policy)
        self._parallel = self._make_parallel()
        self._losses: list[Tensor] = []
        self._skipped_in_a_row = self._oom_splits = 0
        self.tokens: dict[tuple[int, int], TokenValues] = {}
        """The values of the tokens of the last update, for the episodes to keep."""
        self._policy_is_reference = adapter_is_zero(self.policy)
        self.further: Callable[[], None] | None = None
        """Adds a further gradient to that of each minibatch; None if there is none."""
        self.entropy: EntropyControl | None = None
        """None if the objective has no entropy."""
        if config.entropy_coef or config.entropy_target:
            from gspo_env.learner.entropy import EntropyControl

            self.entropy = EntropyControl.of(config)

    def _frozen_copy(self, model: Any) -> Any:
        """Returns a copy of the model with its initial weights."""
        return copy.deepcopy(model)

    def _make_parallel(self) -> ParallelRows | None:
        """Returns what computes two rows at a time, if the model is small enough to gain by it."""
        suits = self._packed and ParallelRows.suits(self.policy)
        return ParallelRows(self.policy, self._make_scorer) if suits else None

    def update(
        self, samples: Sequence[Sample], seed: int = 0, keep: Collection[int] = ()
    ) -> dict[str, float]:
        """Takes one optimiser step for each minibatch; returns the metrics.

        Args:
            samples: At least one with a model token.
            seed: Seed of the split into minibatches.
            keep: Numbers of the episodes of which `tokens` has the values; see `Sample.episode`.

        The metrics describe the steps that were not skipped.

        Raises:
            BatchError: No sample has a model token, the loss needs log-probabilities of the engine
                that are missing, or the loss is not a scalar with a gradient.
            TrainingError: `max_skipped_steps` steps in a row were skipped, or a sequence alone does
                not fit into memory.
        """
        started = time.perf_counter()
        prepared = self.prepare(samples, seed)
        stats = self._take_steps(prepared, started)
        self.tokens = stats.token_values(keep)
        parts = [[s for row in part.microbatches for s in row.samples] for part in prepared]
        return stats.metrics() | advantage_metrics(parts)

    def _take_steps(self, prepared: Sequence[Minibatch], started: float) -> UpdateStats:
        """Takes one optimiser step for each minibatch of an update that started at a time."""
        self._oom_splits = 0
        passes: list[PassStats] = []
        grad_norms = []
        minibatches = self.score(prepared)
        for minibatch in minibatches:
            results = self.backward(minibatch)
            rate = float(self.scheduler.get_last_lr()[0])
            norm = self.step()
            if math.isfinite(norm):
                passes += results
                grad_norms.append(norm)
                self._see_entropy(minibatch, results)
        return UpdateStats(
            passes=to_cpu(passes),
            grad_norms=grad_norms,
            skipped_steps=len(minibatches) - len(grad_norms),
            oom_splits=self._oom_splits,
            loss_scale=self.masters.loss_scale if self.masters.scaled else None,
            learning_rate=rate,
            seconds=time.perf_counter() - started,
            clip_range=self.loss.clip_range,
            entropy_coef=self.entropy.weight if self.entropy else None,
        )

    def _see_entropy(self, minibatch: Minibatch, results: Sequence[PassStats]) -> None:
        """Lets the weight of the entropy adapt to that of a step."""
        if self.entropy is not None and self.entropy.target:
            sums = [each.values["entropy_sum"] for each in results]
            total = self._total(sums or [torch.zeros(())])
            self.entropy.see(total / (minibatch.chosen_tokens or minibatch.tokens))

    def prepare(self, samples: Sequence[Sample], seed: int = 0) -> list[Minibatch]:
        """Splits samples into minibatches of packed rows; those without a model token are left out.

        Raises:
            BatchError: No sample has a model token, or the engine's log-probabilities are missing.
        """
        needed = self.loss.needs_engine_logprobs
        parts = split(samples, self.config.minibatches, seed, needs_engine_logprobs=needed)
        return [self._minibatch(part, n == 0) for n, part in enumerate(parts)]

    def _minibatch(self, samples: Sequence[Sample], first: bool) -> Minibatch:
        least = AT_ONCE if self._parallel else 1
        rows = microbatches(samples, self._row_tokens, share=self._share_prefixes, least=least)
        return Minibatch(
            microbatches=tuple(Microbatch(row=self.pack(row), samples=tuple(row)) for row in rows),
            first=first,
            episodes=len(by_episode(samples)),
            tokens=sum(int(s.mask.sum()) for s in samples),
            sequences=len(samples),
        )

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """Packs samples into one row on the learner's device."""
        return pack(samples, self.device, share=self._share_prefixes)

    def score(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Adds the log-probabilities of pi_old and of the reference; call it before the first step.

        The first minibatch needs no pass for pi_old, and no pass for the reference before the first
        step of a run: its backward pass gives the same numbers.
        """
        scored = [self._in_memory(part, self._score_rows) for part in minibatches]
        share = self.config.entropy_share
        if share == 1:
            return scored
        from gspo_env.learner.entropy import choose_tokens

        return [choose_tokens(part, share) for part in scored]

    def _score_rows(self, minibatch: Minibatch) -> Minibatch:
        def score(n: int, scorer: Scorer) -> Microbatch:
            return self._scored(minibatch.microbatches[n], minibatch, scorer)

        return replace(minibatch, microbatches=tuple(self._each_row(minibatch, score)))

    def _each_row(self, minibatch: Minibatch, compute: Callable[[int, Scorer], T]) -> list[T]:
        """Computes each row, given its index and a scorer; returns the results."""

        def compute_row(n: int, scorer: Scorer) -> T:
            with detect_out_of_memory(n):
                return compute(n, scorer)

        count = len(minibatch.microbatches)
        if self._parallel is None or count == 1:
            return [compute_row(n, self.scorer) for n in range(count)]
        return self._parallel.run(count, compute_row, self.scorer)

    def _in_memory(self, minibatch: Minibatch, compute: Callable[[Minibatch], T]) -> T:
        """Computes; where a row does not fit into memory, splits it and starts over."""
        result, splits = split_until_it_fits(
            minibatch, compute, self.masters, self._losses, self.pack
        )
        self._oom_splits += splits
        return result

    def _scored(
        self, microbatch: Microbatch, minibatch: Minibatch, scorer: Scorer | None = None
    ) -> Microbatch:
        loss, trainer_N, reference_N, entropy_N = self.loss, None, None, None
        policy_is_reference = loss.needs_reference and self._policy_is_reference
        if not minibatch.first and (loss.old_logprobs == "trainer" or policy_is_reference):
            trainer_N = self.logprobs(microbatch.row, scorer)
        if self.config.entropy_share < 1:
            with torch.no_grad():
                entropy_N = (scorer or self.scorer)(microbatch.row)[0].entropy_N
        if policy_is_reference:
            reference_N = trainer_N
        elif loss.needs_reference:
            reference_N = self.reference_logprobs(microbatch.row, scorer)
        return replace(
            microbatch,
            trainer_logprobs_N=trainer_N,
            reference_logprobs_N=reference_N,
            entropy_N=entropy_N,
        )

    def logprobs(self, row: PackedBatch, scorer: Scorer | None = None) -> Tensor:
        """Computes the log-probabilities of the model tokens without gradient, (N,)."""
        with torch.no_grad():
            return (scorer or self.scorer)(row)[0].logprobs_N

    def reference_logprobs(self, row: PackedBatch, scorer: Scorer | None = None) -> Tensor:
        """Computes the log-probabilities of the model tokens by the initial model, (N,)."""
        if self._reference is None:
            scorer = scorer or self.scorer
            with scorer.model.disable_adapter():  # not that of another thread
                return self.logprobs(row, scorer)
        with torch.no_grad():
            return self._reference(row)[0].logprobs_N

    def backward(self, minibatch: Minibatch) -> list[PassStats]:
        """Adds the gradient of a scored minibatch; returns the numbers of each pass.

        Raises:
            BatchError: The loss is not a scalar with a gradient.
            TrainingError: A sequence alone does not fit into memory.
        """
        passes = self._in_memory(minibatch, self._backward_rows)
        if self.further is not None:
            self.further()
        return passes

    def _backward_rows(self, minibatch: Minibatch) -> list[PassStats]:
        split_rows = self._score_split_episodes(minibatch)

        def backward(n: int, scorer: Scorer) -> PassStats:
            others = [other for k, other in split_rows.items() if k != n]
            return self._backward(minibatch.microbatches[n], minibatch, scorer, others)

        return self._each_row(minibatch, backward)

    def _score_split_episodes(
        self, minibatch: Minibatch
    ) -> dict[int, tuple[PackedBatch, LossInput]]:
        """Scores the rows that share an episode, before the gradient of any of them."""
        scored, ratios_are_one = {}, self._ratios_are_one(minibatch)
        for n in rows_with_split_episodes([m.row for m in minibatch.microbatches]):
            microbatch = minibatch.microbatches[n]
            row = microbatch.row
            with detect_out_of_memory(n):
                policy_N = (
                    torch.zeros_like(row.advantages_N) if ratios_are_one else self.logprobs(row)
                )
            if minibatch.first:
                microbatch = replace(microbatch, trainer_logprobs_N=policy_N)
            scored[n] = row, self._loss_input(microbatch, minibatch, policy_N)
        return scored

    def _ratios_are_one(self, minibatch: Minibatch) -> bool:
        """Returns whether the policy is pi_old, so that the ratios need no pass."""
        # another may read the others' tokens
        clipped = type(self.loss).compute is ClippedLoss.compute
        return clipped and minibatch.first and not self.loss.needs_engine_logprobs

    def _backward(
        self,
        microbatch: Microbatch,
        minibatch: Minibatch,
        scorer: Scorer,
        others: Sequence[tuple[PackedBatch, LossInput]],
    ) -> PassStats:
        row, coefficient = microbatch.row, scorer.router_coefficient
        observation_loss, has_entropy = None, self.entropy is not None
        if self.config.observation_coef:
            from gspo_env.learner.observations import predict_with_observations

            predictions, balance, observation_loss = predict_with_observations(
                scorer, microbatch.samples, self.pack, coefficient > 0, has_entropy
            )
        else:
            predictions, balance = scorer(row, routers=coefficient > 0, entropy=has_entropy)
        policy_N = predictions.logprobs_N.detach()
        scored = replace(microbatch, trainer_logprobs_N=policy_N) if minibatch.first else microbatch
        inputs = self._loss_input(scored, minibatch, predictions.logprobs_N)
        if others:
            from gspo_env.learner.split_episodes import with_tokens_of_other_rows

            inputs = with_tokens_of_other_rows(inputs, row, others)
        output = check_output(self.loss.compute(inputs), self.loss, len(inputs.logprobs_N))
        values = {
            "loss": output.loss.detach(),
            "turn": row.turn_N,
            "episode": row.episode_N,
            "advantage": row.advantages_N,
            "entropy": predictions.entropy_N.detach(),
            "top1": predictions.top1_N,
            "control": predictions.marks_N if mark_ids(self.policy) else None,
            "trainer_logprobs": scored.trainer_logprobs_N,
            "engine_logprobs": row.engine_logprobs_N,
            "age": row.ages_N,
        }
        for part in TOKEN_PARTS:
            part_N = getattr(output, part)
            values[part] = None if part_N is None else part_N[: len(policy_N)]
        total = output.loss
        if self.entropy is not None:
            entropy = self._chosen(predictions.entropy_N, microbatch, minibatch).sum()
            count = minibatch.chosen_tokens or minibatch.tokens
            total = total - self.entropy.weight / count * entropy
            values["entropy_sum"] = entropy.detach()
        if observation_loss is not None:
            total = total + self.config.observation_coef * observation_loss / minibatch.sequences
            values["observation_loss"] = observation_loss.detach() / len(row.lengths_B)
        if balance is not None:
            share = len(row.lengths_B) / minibatch.sequences
            total = total + coefficient * balance.loss * share
            values["router_loss"] = balance.loss.detach()
            values |= {"load_max": balance.load.max(), "load_min": balance.load.min()}
        self._add_gradient(total)
        return PassStats(
            values={name: value for name, value in values.items() if value is not None},
            episodes=row.episodes,
            computed_tokens=len(row.input_ids_T),
            sequence_tokens=sum(row.lengths_B),
        )

    def _chosen(self, values_N: Tensor, microbatch: Microbatch, minibatch: Minibatch) -> Tensor:
        """Returns values that are 0 on the tokens whose entropy is too low to be trained."""
        if minibatch.entropy_floor is None or microbatch.entropy_N is None:
            return values_N
        return values_N.where(microbatch.entropy_N >= minibatch.entropy_floor, 0)

    def _loss_input(
        self, microbatch: Microbatch, minibatch: Minibatch, logprobs_N: Tensor
    ) -> LossInput:
        row, old_N = microbatch.row, microbatch.trainer_logprobs_N
        if self.loss.old_logprobs == "engine":
            old_N = row.engine_logprobs_N
        reference_N = microbatch.reference_logprobs_N
        if reference_N is None and self.loss.needs_reference and self._policy_is_reference:
            reference_N = logprobs_N.detach()
        if old_N is None or (reference_N is None and self.loss.needs_reference):
            raise BatchError(
                "the log-probabilities of pi_old or of the reference are missing; expected a "
                "minibatch that `score` returned"
            )
        return LossInput(
            logprobs_N=logprobs_N,
            old_logprobs_N=old_N,
            advantages_N=self._chosen(row.advantages_N, microbatch, minibatch),
            episode_N=row.episode_N,
            turn_N=row.turn_N,
            reference_logprobs_N=reference_N,
            engine_logprobs_N=row.engine_logprobs_N,
            ages_N=row.ages_N,
            num_episodes=len(row.episodes),
            num_turns=row.num_turns,
            episodes=minibatch.episodes,
            tokens=minibatch.tokens,
        )

    def _add_gradient(self, loss: Tensor) -> None:
        with self.masters.collecting():
            torch.autograd.backward(loss * self.masters.loss_scale)
        self._losses.append(loss.detach())

    def step(self) -> float:
        """Clips the gradient and takes one optimiser step; returns the norm before the clip.

        If the norm is not finite, the step is skipped: the gradient is dropped, and the weights,
        the optimiser and the learning rate stay as they are.

        Raises:
            TrainingError: `max_skipped_steps` steps in a row were skipped.
        """
        limit = self.config.max_grad_norm or math.inf
        norm = self._clip(limit)
        if math.isfinite(norm):
            self.optimizer.step()
            self.masters.write()
            self.scheduler.step()
            self._policy_is_reference = False
            self._skipped_in_a_row = 0
        self.optimizer.zero_grad()
        losses, self._losses = self._losses, []
        if not math.isfinite(norm):
            self._report_skip(norm, self._total(losses))
        return norm

    def _clip(self, limit: float) -> float:
        """Clips the gradient; returns its norm before."""
        return float(nn.utils.clip_grad_norm_(self.masters.tensors.values(), limit))

    def _total(self, losses: Sequence[Tensor]) -> float:
        """Returns the loss of a minibatch; the order of its rows does not change it."""
        return math.fsum(torch.stack(list(losses)).tolist())

    def _report_skip(self, norm: float, loss: float) -> None:
        """Logs a skipped step and counts it, unless a lower loss scale may prevent the next."""
        seen = f"the loss is {loss:g} and the norm of its gradient is {norm:g}"
        if math.isfinite(loss) and self.masters.lower_scale():
            scale = self.masters.loss_scale
            logger.warning("skipped an optimiser step: %s; new loss scale %g", seen, scale)
            return
        logger.warning("skipped an optimiser step: %s", seen)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.config.max_skipped_steps:
            raise TrainingError(
                f"the last {self._skipped_in_a_row} optimiser steps were skipped: in the last one, "
                f"{seen}; expected finite numbers, lower learning_rate or correct the loss"
            )

    def state(self) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
        """Returns everything that the next step depends on: JSON and tensors."""
        return state.numbers(self), state.tensors(self)

    def restore(self, named: Iterable[tuple[str, Tensor]], saved: Mapping[str, Any]) -> None:
        """Loads the `state` of another learner; see `gspo_env.learner.restore`."""
        from gspo_env.learner.restore import restore

        restore(self, named, saved)

    def imitate(self, samples: Sequence[Sample]) -> float:
        """Takes one step of maximum likelihood on the model tokens; returns the mean loss.

        Raises:
            BatchError: No sample has a model token.
            TrainingError: `max_skipped_steps` steps in a row were skipped.
        """
        loss = self.add_imitation(samples)
        self.step()
        return loss

    def add_imitation(self, samples: Sequence[Sample], weight: float = 1.0) -> float:
        """Adds the gradient of `weight` times the mean loss of `imitate`; returns that mean.

        Raises:
            BatchError: No sample has a model token.
        """
        minibatch = self._minibatch(with_model_tokens(samples), first=True)
        count = len(self._losses)
        self._in_memory(minibatch, partial(self._imitate_rows, weight=weight))
        return self._total(self._losses[count:]) / weight

    def _imitate_rows(self, minibatch: Minibatch, weight: float) -> None:
        def imitate(n: int, scorer: Scorer) -> None:
            logprobs_N = scorer(minibatch.microbatches[n].row)[0].logprobs_N
            self._add_gradient(-weight * logprobs_N.sum() / minibatch.tokens)

        self._each_row(minibatch, imitate)
