"""The teacher of on-policy distillation, which scores the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.packing import microbatches, pack
from gspo_env.batch.sample import Sample, to_samples
from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.errors import TrainingError
from gspo_env.learner.settings import Trainer
from gspo_env.model.check import RunMode, check_model
from gspo_env.model.load import load_model, match_tokenizer
from gspo_env.model.scorer import Scorer
from gspo_env.registry import find
from gspo_env.rollout.collector import Collector
from gspo_env.training.distillation import Distillation
from gspo_env.types import Episode, FloatArray, Group

_MOST_TOKENS = 16384
"""Tokens of one pass of the teacher."""
Score = Callable[[Sequence[Sample]], Tensor]
"""Returns a model's log-probabilities (N,) of the model tokens of samples."""


def bind(settings: Distillation, learner: Trainer, collector: Collector) -> BoundDistillation:
    """Loads the teacher; see `Distillation.bind`."""
    return BoundDistillation(
        settings=settings,
        chat=collector.chat,
        score=_score_with(settings.teacher, learner, collector),
        other=find("advantage", settings.estimator)() if settings.credit else None,
    )


def _score_with(teacher: str, learner: Trainer, collector: Collector) -> Score:
    """Returns what scores samples with a teacher."""
    if teacher == "self":
        return lambda part: learner.logprobs(learner.pack(part))
    model, tokenizer = load_model(teacher)
    match_tokenizer(model, tokenizer)
    check, device = check_model(model), next(learner.policy.parameters()).device
    scorer = Scorer(
        model.to(device).requires_grad_(False),
        collector.config.temperature,
        packed=check.mode is not RunMode.UNPACKED,
        padded=check.padded,
    )
    shares = check.mode is RunMode.SHARED

    @torch.no_grad()
    def score(part: Sequence[Sample]) -> Tensor:
        return scorer(pack(part, device, share=shares))[0].logprobs_N

    return score


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundDistillation:
    """The estimator with its teacher."""

    settings: Distillation
    chat: ChatTokenizer
    score: Score
    other: Any
    """The other estimator; None if its weight is 0."""

    @property
    def uses_score(self) -> bool:
        """See `Distillation.uses_score`."""
        return self.settings.uses_score

    def advantages(self, group: Group) -> Sequence[FloatArray]:
        """Computes the advantages of each sampled token of a group.

        Raises:
            TrainingError: An episode has no hint.
        """
        settings, rows = self.settings, []
        for episode, teacher_N in zip(
            group.episodes, self.teacher_logprobs(group.episodes), strict=True
        ):
            ratio_N = teacher_N - episode.engine_logprobs
            if settings.turn_steps:
                depth = 1 + episode.weights_versions[1] // settings.turn_steps
                ratio_N[_turns(episode) >= depth] = 0.0
            rows.append(settings.weight * _to_go(ratio_N, settings.gamma))
        if self.other is None:
            return rows
        credit = [np.asarray(values) for values in self.other.advantages(group)]
        by_token = [
            values if len(values) == episode.model_tokens else values[_turns(episode)]
            for episode, values in zip(group.episodes, credit, strict=True)
        ]
        return [row + settings.credit * values for row, values in zip(rows, by_token, strict=True)]

    def teacher_logprobs(self, episodes: Sequence[Episode]) -> list[FloatArray]:
        """Returns the teacher's log-probabilities of the sampled tokens of each episode, (N,).

        Tokens that the environment masks have those of the policy.
        """
        rows = [episode.engine_logprobs for episode in episodes]
        samples = to_samples(episodes, [np.arange(float(len(row))) for row in rows])
        samples = [s for s in samples if s.mask.any()]
        if self.settings.hint:
            hinted = {n: self._with_hint(e) for n, e in enumerate(episodes) if e.turns}
            samples = [_replace_prompt(s, *hinted[s.episode or 0]) for s in samples]
        for part in microbatches(samples, _MOST_TOKENS):
            values = self.score(part).double().cpu().numpy()
            ends = np.cumsum([len(sample.advantages) for sample in part])
            for sample, values_N in zip(part, np.split(values, ends[:-1]), strict=True):
                rows[sample.episode or 0][sample.advantages.astype(int)] = values_N
        return rows

    def _with_hint(self, episode: Episode) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the ids of the first prompt, and those with the hint in the system prompt."""
        text, prompt = episode.reset.extra.get(self.settings.hint), episode.prompt
        if not isinstance(text, str):
            raise TrainingError(
                f"info[{self.settings.hint!r}] of reset is {text!r} in {episode.task.env_id}; "
                "expected the text of advantage.hint"
            )
        system = f"{prompt.system}\n\n{text}" if prompt.system else text
        first = episode.turns[0]
        ids = self.chat.start(first.observation, replace(prompt, system=system))
        return first.prompt_ids, ids


def _turns(episode: Episode) -> Any:
    """Returns the turn of each sampled token."""
    return np.repeat(np.arange(len(episode.turns)), [len(t.action_ids) for t in episode.turns])


def _to_go(values_N: FloatArray, gamma: float) -> FloatArray:
    """Returns the discounted sum from each token on."""
    sums_N = np.array(values_N)
    for n in range(len(sums_N) - 2, -1, -1):
        sums_N[n] += gamma * sums_N[n + 1]
    return sums_N


def _replace_prompt(sample: Sample, old: Sequence[int], new: Sequence[int]) -> Sample:
    """Replaces the ids in which two prompts differ in a sample that begins like the first.

    A later sequence of an episode shares only the system prompt, so what follows it must be equal.

    Raises:
        TrainingError: The sample begins otherwise.
    """
    least = min(len(old), len(new))
    start = next((n for n in range(least) if old[n] != new[n]), least)
    most = least - start
    end = next((n for n in range(most) if old[-1 - n] != new[-1 - n]), most)
    stop = len(old) - end
    ids = sample.token_ids
    if ids[:stop].tolist() != list(old[:stop]):
        raise TrainingError(
            "a sequence of an episode has another system prompt than the first; expected the same, "
            "so that the teacher's hint can follow it"
        )
    inserted = np.asarray(new[start : len(new) - end], dtype=ids.dtype)
    return replace(
        sample,
        token_ids=np.concatenate([ids[:start], inserted, ids[stop:]]),
        turn_ids=np.concatenate(
            [sample.turn_ids[:start], np.full(len(inserted), -1), sample.turn_ids[stop:]]
        ),
    )
