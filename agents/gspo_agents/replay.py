"""Takes the update of a kept batch again, without engine and environment."""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gspo_agents.setup import make_learner
from gspo_env.batch.sample import Sample
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.config import Config, to_toml
from gspo_env.credit.estimate import Credit, estimate
from gspo_env.credit.estimators import Estimator
from gspo_env.errors import OutputError
from gspo_env.files import BATCHES, METRICS, step_folders
from gspo_env.learner.learner import Learner
from gspo_env.model.head import match_tokenizer
from gspo_env.model.load import load_model
from gspo_env.model.save import make_output
from gspo_env.redaction import write_text
from gspo_env.registry import BUILTIN, name_of
from gspo_env.restoring import set_generator_states
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runs.run import CONFIG
from gspo_env.tracking.base import flatten
from gspo_env.tracking.jsonl import JsonlFile
from gspo_env.training.batches import KeptBatch, digest_of, read_batch
from gspo_env.training.checkpoints import START, Checkpoints
from gspo_env.training.loop import to_train
from gspo_env.training.resume import changed_config, checkpoint_config, read_checkpoint
from gspo_env.trust import record
from gspo_env.types import Episode, Score

if TYPE_CHECKING:
    from gspo_env.runs.effects import Effect
    from gspo_env.training.resume import Checkpoint

_SECTIONS = (
    "advantage.",
    "credit.",
    "loss.",
    "learner.",
    "checkpoints.",
    "episodes.",
    "tracker.",
    "output.",
)
_FIXED = (
    *("learner.lora_", "learner.optimizer", "learner.weight_decay"),
    "learner.imitation_episodes",
)
"""Settings of the learner on which the saved state depends."""
_HINT = (
    "in the run; a replay has its episodes, model and optimiser: only advantage, credit, loss and "
    "the learner's learning rate, schedule, minibatches and limits may change"
)


def may_change(name: str) -> bool:
    """Returns whether a replay may change a setting."""
    return f"{name}.".startswith(_SECTIONS) and not name.startswith(_FIXED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The update of a batch under one config."""

    config: Config
    learner: Learner
    """The learner after the update."""
    samples: Sequence[Sample]
    places: Sequence[tuple[int, int]]
    """The group and the index in it of each episode that is trained on; see `Sample.episode`."""
    credit: Credit
    metrics: Mapping[str, float]


class Replay:
    """A kept batch, whose update can be taken again under any config that it allows.

    Args:
        run: Folder of a run that trained with `--episodes.keep-batches`.
        step: The step of the update; the newest that is kept by default.
        config: The run's config with other settings of credit, loss or learner; by default the
            run's own.

    Raises:
        ConfigError: Another setting differs.
        ModelError: The model that the run began with is not found, or differs.
        OutputError: The run has kept no such batch, or it is damaged.
    """

    def __init__(
        self, run: str | Path, step: int | None = None, config: Config | None = None
    ) -> None:
        self.batch: KeptBatch = read_batch(run, step)
        checkpoint = self.batch.checkpoint
        self.run, self.step = self.batch.run, checkpoint.step
        self.own = checkpoint_config(self.run, checkpoint, config)
        """The config of the run."""
        self.config = self.allowed(config)
        source, tokenizer = checkpoint.start(self.run)
        if isinstance(source, str):
            source, tokenizer = load_model(source, self.own.model_dtype)
        elif self.own.model_dtype != "auto":
            source.to(getattr(torch, self.own.model_dtype))
        self._model: Any = source.to("cuda" if torch.cuda.is_available() else "cpu")
        checkpoint.check_start(self.run, self._model)
        self.chat = ChatTokenizer(
            tokenizer,
            history=self.own.rewritten_history,
            end_ids=match_tokenizer(self._model, tokenizer),
        )
        settings = self.own.learner
        if settings.lora_rank:
            from gspo_env.model.adapters import add_adapter

            targets, alpha = settings.lora_targets, settings.lora_alpha
            self._model = add_adapter(
                self._model, settings.lora_rank, self.own.seed, alpha=alpha, targets=targets
            )

    def allowed(self, config: Config | None) -> Config:
        """Returns a config that the batch can be trained on with.

        Raises:
            ConfigError: A setting differs that a replay cannot change.
        """
        if config is None:
            return self.own
        config = changed_config(self.run, self.batch.checkpoint, config, may_change, _HINT)
        if config.advantage.uses_score:
            return config
        return replace(config, credit=replace(config.credit, score="auto"))

    def changes(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Returns the settings that differ from the run's, with the run's value and the new one.

        Of another choice, such as another loss, only its name is there.
        """
        old, new = flatten(self.own), flatten(config)
        changes: dict[str, tuple[Any, Any]] = {}
        for kind in BUILTIN:
            before, after = (name_of(kind, getattr(c, kind)) for c in (self.own, config))
            if before != after:
                changes[kind] = before, after
        for name in sorted({*old, *new} - {"output"}):
            if name.partition(".")[0] not in changes and old.get(name) != new.get(name):
                changes[name] = old.get(name), new.get(name)
        return changes

    def learner(self, config: Config, checkpoint: Checkpoint | None = None) -> Learner:
        """Returns a learner with the settings of a config, in the state before the update.

        Args:
            config: The config.
            checkpoint: The state; that of the batch by default.
        """
        checkpoint = checkpoint or self.batch.checkpoint
        learner = make_learner(copy.deepcopy(self._model), config)
        assert isinstance(learner, Learner)  # without ranks
        with checkpoint.reading() as numbers:
            state, rate = copy.deepcopy(dict(numbers["learner"])), config.learner.learning_rate
            groups = state["optimizer"]["groups"]
            for group in groups:
                group["initial_lr"] = rate
            state["scheduler"] |= {"base_lrs": [rate] * len(groups)}
            learner.restore(checkpoint.tensors(), state)
            if config.learner.imitation != "none":
                from gspo_env.training.interleaved import Interleaved

                Interleaved(config.learner, learner).restore(numbers.get("interleaved"))
            set_generator_states(numbers["generators"])
        return learner

    def samples(
        self, config: Config, learner: Learner
    ) -> tuple[list[Sample], list[tuple[int, int]], Credit]:
        """Returns the samples of the batch with the credit of a config; see `to_train`.

        Raises:
            OutputError: With the settings of the run, the credit is not the run's.
        """
        played: Any = _Played(chat=self.chat, config=config.rollout)
        estimator: Estimator = config.advantage.bind(learner, played)
        credit = estimate(self.batch.groups, estimator, config.credit, self._scores(config))
        keep_cut = config.credit.train_on_truncated
        samples, places = to_train(self.batch.groups, credit.advantages, keep_cut, self.step - 1)
        same = not any(name.startswith(("advantage", "credit")) for name in self.changes(config))
        if same and self.batch.digest not in ("", digest_of(samples)):
            raise OutputError(
                f"the advantages of step {self.step} of {str(self.run)!r} are not those of the "
                "run: its estimator reads what a kept batch does not have, or has changed"
            )
        return samples, places, credit

    def update(self, config: Config | None = None) -> Update:
        """Takes the update with a config, by default that of this replay."""
        config = config or self.config
        learner = self.learner(config)
        samples, places, credit = self.samples(config, learner)
        metrics = learner.update(samples, self.batch.seed, range(len(places)))
        return Update(
            config=config,
            learner=learner,
            samples=samples,
            places=places,
            credit=credit,
            metrics={**self.batch.metrics, **metrics, **credit.metrics()},
        )

    def edited(self, place: tuple[int, int], episode: Episode) -> Replay:
        """Returns the batch with another episode at a place: a group and the index in it."""
        groups = list(self.batch.groups)
        episodes = list(groups[place[0]].episodes)
        episodes[place[1]] = episode
        groups[place[0]] = replace(groups[place[0]], episodes=tuple(episodes))
        edited = copy.copy(self)
        edited.batch = replace(self.batch, groups=groups, digest="")
        return edited

    def effects(self, arms: Mapping[str, Config]) -> dict[str, Effect]:
        """Returns what other settings do with the batch; see `gspo_agents.whatif.effects`."""
        from gspo_agents.whatif import effects

        return effects(self, arms)

    def record(self, effects: Mapping[str, Effect]) -> None:
        """Keeps effects in the folder of the batch, for the page of the run and `Run.effects`.

        Raises:
            OutputError: They cannot be written.
        """
        from gspo_env.runs.effects import write_effects

        write_effects(self.batch.checkpoint.folder, effects)

    def difference(self, update: Update) -> float | None:
        """Returns the largest difference of the weights after an update from those of the run.

        It is 0 if they have the same bits, and None if no folder of the run has its weights.
        """
        folder = self.weights().get(self.step)
        if folder is None:
            return None
        weights = dict(read_checkpoint(folder).tensors())
        pairs = [
            (tensor.cpu(), weights[name])
            for name, tensor in update.learner.state()[1]
            if name.startswith("weights.")
        ]
        return max(0.0 if new.equal(old) else _distance(new, old) for new, old in pairs)

    def weights(self) -> dict[int, Path]:
        """Returns the folders with weights of the run, by the number of updates that are done."""
        batches = {int(f.name[5:]) - 1: f for f in step_folders(self.run / BATCHES)}
        return batches | {int(f.name[5:]): f for f in step_folders(self.run / "checkpoints")}

    def save(self, update: Update) -> Path:
        """Writes the state after an update as a run that `gspo-env train --resume` continues.

        Its folder is the `output` of the update's config, if that is not the run's; by default a
        new one under `runs`.

        Raises:
            OutputError: It cannot be written.
        """
        numbers = dict(self.batch.checkpoint.numbers)
        output = "" if update.config.output == self.own.output else update.config.output
        folder = make_output(output, f"{self.run.resolve().name}-step{self.step}")
        config = replace(update.config, output=str(folder))
        history = [*numbers["history"], (self.step, dict(update.metrics))]
        metrics: JsonlFile[Any] = JsonlFile(folder, METRICS, dict)
        for step, values in history:
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            metrics.append(step=step, time=int(time.time() * 1000), metrics=finite)
        metrics.close()
        write_text(folder / CONFIG, to_toml(config))
        state, tensors = update.learner.state()
        numbers |= {"config": to_toml(config), "learner": state, "history": history, "best": {}}
        numbers |= {"recorded": {"metrics": metrics.size, "calls": 0}, "failed": 0}
        del numbers["batch"]
        settings = replace(config.checkpoints, keep=max(1, config.checkpoints.keep))
        with Checkpoints(folder, settings) as checkpoints:
            if not numbers["model"]:
                start = self.run / "checkpoints" / START
                shutil.copytree(start, checkpoints.folder / START)
            if not checkpoints.save(numbers, tensors):
                raise OutputError(f"the checkpoint cannot be written to {str(folder)!r}")
        record(folder, config, numbers["model"])
        return folder

    def _scores(self, config: Config) -> dict[str, Score]:
        """Returns the decided score of each environment, unless the config has one."""
        if config.credit.score != "auto":
            return {}
        saved = self.batch.checkpoint.numbers["score"]
        played = {group.task.env_id for group in self.batch.groups}
        states: Mapping[str, Any] = saved.get("environments") or dict.fromkeys(played, saved)
        return {env_id: state["score"] for env_id, state in states.items() if state.get("score")}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    """What an estimator reads of a collector when it is bound."""

    chat: ChatTokenizer
    config: RolloutConfig


def _distance(new: Tensor, old: Tensor) -> float:
    return float((new.detach() - old).abs().max())
