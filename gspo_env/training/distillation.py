"""On-policy distillation: a teacher's log-probabilities of the sampled tokens as credit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Interval

from gspo_env.batch.prefix import common_prefix
from gspo_env.credit.estimators import Estimator
from gspo_env.credit.statistics import discounted
from gspo_env.errors import ConfigError, ModelError, TrainingError, raised_as
from gspo_env.registry import find
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.batch.sample import Sample
    from gspo_env.chat.tokenizer import ChatTokenizer
    from gspo_env.learner.settings import Trainer
    from gspo_env.rollout.collector import Collector
    from gspo_env.types import Episode, FloatArray, Group

_MOST_TOKENS = 16384
"""Tokens of one pass of the teacher."""


@settings
class Distillation(Estimator):
    """The log-ratio of a teacher and the policy as the advantage of each token.

    A_t = weight * sum over l >= t of gamma^(l-t) (log p_teacher,l - log p_policy,l) + credit * C_t,
    where C_t is the advantage of another estimator. With `gamma = 0` the expected update is the
    gradient of the reverse KL of each token, in the contexts that the policy visits; with
    `gamma = 1` it is that of the KL of whole episodes (exactly with `loss.aggregation token_sum`).

    Source:
        On-policy distillation: arXiv 2306.13649; the depth that grows: arXiv 2604.24005.
    """

    teacher: str = "self"
    """A folder or name of a model with the policy's tokenizer, such as an earlier run; or `self`,
    the policy as it is now, which needs a hint."""
    hint: str = ""
    """Key of the `info` of `reset` with a text that only the teacher reads, in its system prompt,
    such as `solution`."""
    weight: Annotated[float, Ge(0)] = 1.0
    """Weight of the teacher."""
    gamma: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Discount of later tokens, per token."""
    turn_steps: Annotated[int, Ge(0)] = 0
    """The teacher is heard in the first turn only, and in one more every so many steps; 0 is in all
    turns from the start."""
    credit: Annotated[float, Ge(0)] = 0.0
    """Weight of the other estimator's advantages; 0 distils alone."""
    estimator: str = "returns_to_go"
    """Name of the other estimator, which has its default settings."""
    needs_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if issubclass(find("advantage", self.estimator), Distillation):
            raise ConfigError(
                f"advantage.estimator is {self.estimator!r}; expected another estimator, whose "
                "advantages are added to those of the teacher"
            )

    @property
    def uses_score(self) -> bool:  # type: ignore[override]
        """Whether the other estimator reads `Group.score`."""
        return bool(self.credit) and find("advantage", self.estimator)().uses_score

    def advantages(self, group: Group) -> Sequence[FloatArray]:
        """Raises an error: a run calls `bind` first."""
        raise ConfigError("the estimator 'distillation' has no teacher; expected a call of bind()")

    def check(self, chat: ChatTokenizer | None = None) -> None:
        """Checks that there is a teacher, and that it has the policy's tokenizer.

        Raises:
            ConfigError: There is none, or it has another tokenizer.
            ModelError: The teacher is not a model.
        """
        if self.teacher == "self" and not self.hint:
            raise ConfigError(
                "teacher is 'self' and hint is ''; expected a hint such as solution, or the folder "
                "of another model: a teacher that reads the same agrees with the policy"
            )

        if self.teacher == "self":
            return
        tokenizer = self._tokenizer()
        if chat is not None and tokenizer.get_vocab() != chat.tokenizer.get_vocab():
            raise ConfigError(
                f"teacher is {self.teacher!r}, whose tokenizer is not the policy's; expected a "
                "model with the same token ids"
            )

    def check_episode(self, env: Any, episode: Episode) -> None:
        """Checks that the environment gives the hint; see `Estimator.check_episode`.

        Raises:
            TrainingError: It gives none.
        """
        if self.hint:
            self.hint_of(episode)

    def hint_of(self, episode: Episode) -> str:
        """Returns the text that the teacher reads.

        Raises:
            TrainingError: The episode has none.
        """
        text = episode.reset.extra.get(self.hint)
        if not isinstance(text, str):
            raise TrainingError(
                f"info[{self.hint!r}] of reset is {text!r} in {episode.task.env_id}; expected the "
                "text of advantage.hint"
            )
        return text

    def _tokenizer(self) -> Any:
        from gspo_env.model.load import load_tokenizer

        with raised_as(ModelError, f"advantage.teacher is {self.teacher!r}", ModelError):
            return load_tokenizer(self.teacher)

    def bind(self, learner: Trainer, collector: Collector) -> BoundDistillation:
        """Loads the teacher.

        Args:
            learner: Trains the policy.
            collector: Has the policy's tokenizer and temperature.

        Raises:
            ConfigError: There is no teacher, or it has another tokenizer.
            ModelError: The teacher cannot be loaded.
        """
        self.check(collector.chat)
        score = _scorer(self.teacher, learner, collector)
        return BoundDistillation(settings=self, chat=collector.chat, score=score)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundDistillation(Estimator):
    """The estimator with its teacher."""

    settings: Distillation
    chat: ChatTokenizer
    score: Callable[[Sequence[Sample]], Any]
    """Returns the teacher's log-probabilities (N,) of the model tokens of samples."""
    needs_rewards: ClassVar[bool] = False

    @property
    def uses_score(self) -> bool:  # type: ignore[override]
        """See `Distillation.uses_score`."""
        return self.settings.uses_score

    def advantages(self, group: Group) -> Sequence[FloatArray]:
        """Computes the advantages of each sampled token of a group.

        Raises:
            TrainingError: An episode has no hint.
        """
        settings, rows = self.settings, []
        credit: Sequence[FloatArray] = [np.zeros(len(e.turns)) for e in group.episodes]
        if settings.credit:
            credit = find("advantage", settings.estimator)().advantages(group)
        teacher = self.teacher_logprobs(group.episodes)
        for episode, teacher_N, values in zip(group.episodes, teacher, credit, strict=True):
            lengths = [len(turn.action_ids) for turn in episode.turns]
            turn_N = np.repeat(np.arange(len(lengths)), lengths)
            ratio_N = teacher_N - episode.engine_logprobs
            if settings.turn_steps:
                depth = 1 + episode.weights_versions[1] // settings.turn_steps
                ratio_N[turn_N >= depth] = 0.0
            credit_N = values if len(values) == len(turn_N) else np.asarray(values)[turn_N]
            ratio_N = settings.weight * discounted(ratio_N, settings.gamma)
            rows.append(ratio_N + settings.credit * np.asarray(credit_N))
        return rows

    def teacher_logprobs(self, episodes: Sequence[Episode]) -> list[FloatArray]:
        """Returns the teacher's log-probabilities of the sampled tokens of each episode, (N,).

        Tokens that the environment masks have those of the policy.
        """
        from gspo_env.batch.packing import microbatches
        from gspo_env.batch.sample import to_samples

        rows = [episode.engine_logprobs for episode in episodes]
        if self.settings.hint:
            episodes = [
                self._with_hint(episode) if episode.turns else episode for episode in episodes
            ]
        samples = to_samples(episodes, [np.zeros(len(row)) for row in rows])
        samples = [s for s in samples if s.mask.any()]
        for part in microbatches(samples, _MOST_TOKENS):
            values = self.score(part).double().cpu().numpy()
            ends = np.cumsum([len(sample.advantages) for sample in part])
            for sample, values_N in zip(part, np.split(values, ends[:-1]), strict=True):
                rows[sample.episode or 0][sample.sampled] = values_N
        return rows

    def _with_hint(self, episode: Episode) -> Episode:
        """Returns an episode with the hint in its system prompt, in each of its sequences."""
        text, prompt = self.settings.hint_of(episode), episode.prompt
        system = f"{prompt.system}\n\n{text}" if prompt.system else text
        turns, observation = list(episode.turns), episode.turns[0].observation
        old = np.array(turns[0].prompt_ids)
        new = np.array(self.chat.start(observation, replace(prompt, system=system)))
        start = common_prefix(old, new)
        end = common_prefix(old[start:][::-1], new[start:][::-1])
        stop = len(old) - end
        for k, ids in enumerate(turn.prompt_ids for turn in episode.turns):
            if episode.parents[k] is not None:
                continue
            if [*ids[:stop]] != old[:stop].tolist():
                raise TrainingError(
                    "a sequence of an episode has another system prompt than the first; expected "
                    "the same, so that the teacher's hint can follow it"
                )
            hinted = (*ids[:start], *new[start : len(new) - end].tolist(), *ids[stop:])
            turns[k] = replace(turns[k], prompt_ids=hinted)
        return replace(episode, turns=tuple(turns))


def _scorer(
    teacher: str, learner: Trainer, collector: Collector
) -> Callable[[Sequence[Sample]], Any]:
    """Returns what scores samples with a teacher; see `BoundDistillation.score`."""
    import torch

    from gspo_env.batch.packing import pack
    from gspo_env.model.check import RunMode, check_model
    from gspo_env.model.head import match_tokenizer
    from gspo_env.model.load import load_model
    from gspo_env.model.scorer import Scorer

    if teacher == "self":
        return lambda part: learner.logprobs(learner.pack(part))
    model, tokenizer = load_model(teacher)
    match_tokenizer(model, tokenizer)
    check, device = check_model(model), next(learner.policy.parameters()).device
    model.to(device).requires_grad_(False)
    packed, share = check.mode is not RunMode.UNPACKED, check.mode is RunMode.SHARED
    scorer = Scorer(model, collector.config.temperature, packed=packed, padded=check.padded)
    return torch.no_grad()(lambda part: scorer(pack(part, device, share=share))[0].logprobs_N)
