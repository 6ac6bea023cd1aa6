"""Interleaved imitation: the likelihood of demonstrations, added to each step of the policy loss.

Each update has its demonstrations D: of `learner.imitation_episodes` tasks of the update, played by
the environment's expert (`expert`), or the newest successful episodes of earlier updates, one of a
group (`kept`). Every optimiser step of the update maximises, with the |D| tokens of their actions,

    J' = J + imitation_coef * 1/|D| sum over t in D of log pi(d_t),

at the temperature of the rollout. Both gradients are clipped together. Held-out tasks are never
demonstrated, because updates do not have them; without a demonstration, J' = J.

Source:
    The demonstrations' gradient beside that of the policy: DAPG, arXiv 1709.10087. The policy's own
    successes: self-imitation learning, arXiv 1806.05635.

Example:
    A demonstration of two tokens with the probabilities 1/2 and 1/4 has the loss
    (log 2 + log 4) / 2 = 1.04.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_env.batch.sample import Sample, to_samples
from gspo_env.errors import OutputError
from gspo_env.learner.learner import Learner
from gspo_env.learner.settings import LearnerConfig, Trainer
from gspo_env.recipes.build import imitation_samples
from gspo_env.recipes.teacher import in_format
from gspo_env.redaction import redact_text
from gspo_env.restoring import check_types
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.play import PolicyInput, demonstrator
from gspo_env.rollout.pool import play_pooled
from gspo_env.types import Episode, Group, Task


class Interleaved:
    """The demonstrations of a run, and their part in the gradient of its learner.

    Args:
        config: The settings.
        learner: Gets the gradient of the demonstrations with each `backward`.
    """

    def __init__(self, config: LearnerConfig, learner: Trainer) -> None:
        assert isinstance(learner, Learner)  # several ranks are refused before
        self._config, self._learner = config, learner
        learner.further = self._add
        self._episodes: list[list[Sample]] = []
        """Those of this update."""
        self._kept: list[list[Sample]] = []
        """Successes of earlier updates, the newest last."""
        self._losses: list[float] = []

    async def prepare(self, groups: Sequence[Group], collector: Collector) -> None:
        """Takes the demonstrations of an update.

        Args:
            groups: Its groups.
            collector: Has the environments in which the expert plays, and the tokenizer.
        """
        count, self._losses = self._config.imitation_episodes, []
        if self._config.imitation == "expert":
            tasks = [group.task for group in groups[:count]]
            played = await asyncio.gather(*(_play_expert(task, collector) for task in tasks))
            shown = [in_format(e, collector.chat) for e in played if e and not e.failed and e.turns]
            most = collector.config.max_context
            samples = [imitation_samples([e], collector.chat, most) for e in shown]
            self._episodes = [each for each in map(_bare, samples) if each]
            return
        self._episodes = self._kept
        new = [episode for group in groups if (episode := _success(group)) is not None]
        samples = [to_samples([e], [np.zeros(len(e.turns))]) for e in new]
        self._kept = [*self._kept, *map(_bare, samples)][-count:]

    def _add(self) -> None:
        """Adds the gradient of the demonstrations."""
        samples = [sample for episode in self._episodes for sample in episode]
        if samples:
            weight = self._config.imitation_coef
            self._losses.append(self._learner.add_imitation(samples, weight))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of an update."""
        metrics = {"train/imitation_episodes": float(len(self._episodes))}
        if self._losses:
            metrics["train/imitation_loss"] = float(np.mean(self._losses))
        return metrics

    def state(self) -> dict[str, Any]:
        """Returns the demonstrations of this update and those that are kept, as JSON."""
        return {"episodes": _to_json(self._episodes), "kept": _to_json(self._kept)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restores the state.

        Raises:
            OutputError: There is none: the run had no demonstrations.
            ValueError: It is damaged.
        """
        if state is None:
            raise OutputError(
                f"learner.imitation is {self._config.imitation!r}, and the run has kept no "
                "demonstrations; expected 'none'"
            )
        check_types(state, self.state())
        self._episodes, self._kept = _from_json(state["episodes"]), _from_json(state["kept"])


async def _play_expert(task: Task, collector: Collector) -> Episode | None:
    """Returns the expert's episode; None if it has no answer to the task."""
    pools, limits, expert = collector.pool, collector.config, demonstrator()

    async def act(now: PolicyInput) -> str:
        action: str = await pools.of(task.env_id).call(lambda env: expert(now), now.env)
        return action

    seconds, turns = limits.episode_timeout, limits.max_turns
    try:
        return await play_pooled(pools, task, act, max_turns=turns, timeout=seconds)
    except NotImplementedError:
        return None


def _success(group: Group) -> Episode | None:
    """Returns the first successful episode of a group, unless a text in it looks like a secret."""
    for episode in group.episodes:
        if episode.success and episode.turns and not episode.failed:
            texts = [episode.prompt.system or "", episode.final_observation]
            texts += [text for turn in episode.turns for text in (turn.observation, turn.text)]
            return episode if all(redact_text(text) == text for text in texts) else None
    return None


def _bare(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the tokens and the turns of samples with a model token, which a checkpoint keeps."""
    return [_sample(sample.token_ids, sample.turn_ids) for sample in samples if sample.mask.any()]


def _sample(token_ids: Any, turn_ids: Any) -> Sample:
    token_ids, turn_ids = np.array(token_ids, np.int64), np.array(turn_ids, np.int64)
    advantages = np.zeros(int((turn_ids >= 0).sum()))
    return Sample(token_ids=token_ids, turn_ids=turn_ids, advantages=advantages)


def _to_json(episodes: Sequence[Sequence[Sample]]) -> list[list[list[list[int]]]]:
    return [[[s.token_ids.tolist(), s.turn_ids.tolist()] for s in e] for e in episodes]


def _from_json(episodes: Any) -> list[list[Sample]]:
    return [[_sample(*ids) for ids in episode] for episode in episodes]
