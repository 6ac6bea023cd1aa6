"""The GSPO agent: grouped episodes, per-turn credit, sequence-level ratios (arXiv 2507.18071)."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gspo_env.config import Config, from_dict, to_toml
from gspo_env.credit.estimate import check_estimator
from gspo_env.engines import Engine, Sampling, make_engine
from gspo_env.env.base import try_out
from gspo_env.env.registration import make_env, resolve_env
from gspo_env.learner.learner import Learner
from gspo_env.model.load import add_adapter, load_model, make_output, save_model
from gspo_env.recipes.embedded import Demonstration, build, to_samples, warm_up
from gspo_env.report.curves import learning_curve
from gspo_env.report.text import render_episode
from gspo_env.rollout.collector import Collector, instructions
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.transcript import ChatTokenizer
from gspo_env.tracking.base import MODEL, RunInfo, flatten
from gspo_env.tracking.progress import Progress
from gspo_env.tracking.several import Several, start
from gspo_env.training.loop import History, Loop, evaluate, held_out_tasks
from gspo_env.types import Group


class GSPOAgent:
    """Collects grouped episodes of a text environment and trains on them with GSPO-token.

    Args:
        model: A `transformers` causal LM, a folder or hub id; empty builds the embedded tiny model.
        env: Environment id or `file.py:Class`; the config's by default.
        config: Everything else.
        tokenizer: Belongs to `model` where that is not a name.
    """

    def __init__(
        self,
        model: Any = "",
        env: str = "",
        config: Config | None = None,
        tokenizer: Any = None,
    ) -> None:
        name = model if isinstance(model, str) else model.config.name_or_path or "given"
        self.config = config or Config.for_model(name)
        check_estimator(self.config.advantage)
        self.env_id = resolve_env(env or self.config.env)
        self._env = make_env(self.env_id, **self.config.env_kwargs)
        try_out(self.env_id, self._env)
        self._demonstrations: list[Demonstration] = []
        if not isinstance(model, str):
            self.model, self.tokenizer = model, tokenizer
        elif model or self.config.model:
            self.model, self.tokenizer = load_model(model or self.config.model)
        else:
            self.model, self.tokenizer, self._demonstrations = build(
                self._env, self.env_id, self.config.embedded, self.config.seed
            )
        if torch.cuda.is_available():
            self.model.to("cuda")
        self.chat = ChatTokenizer(self.tokenizer, history=self.config.history)
        self._adapt()
        self.folder: Path | None = None
        self._engine: Engine | None = None
        self._talk: list[int] = []

    def train(self) -> History:
        """Warms up the embedded model, trains, evaluates, tracks and saves; returns the metrics.

        Raises:
            OutputError: The output folder cannot be written.
        """
        config = self.config
        folder = make_output(config.output, f"{self.env_id.split('/')[-1]}-seed{config.seed}")
        self.folder = folder
        (folder / "config.toml").write_text(to_toml(config))
        tags = {"env": self.env_id}
        info = RunInfo(name=folder.name, folder=folder, params=flatten(config), tags=tags)
        with Progress() as progress, start(config.tracker, info) as tracker:
            self.warm_up(progress)
            learner = Learner(
                self.model,
                config.objective,
                config.learner,
                total_steps=config.steps * config.learner.minibatches,
                temperature=config.rollout.temperature,
            )
            collector = self._collector()
            report = _Reporter(config.steps, progress, tracker, folder)
            loop = Loop(config, self.env_id, collector, learner, report)
            try:
                history = asyncio.run(loop.train())
            finally:
                collector.pool.close()
                self.close()
            self._finish(folder, history, tracker)
            tracker.finish()
            progress.line(self._summary(folder, history, tracker))
        return history

    def evaluate(self, tasks: int | None = None, samples: int = 1) -> list[Group]:
        """Plays held-out tasks, `samples` episodes each, at the training temperature."""
        collector = self._collector()
        held_out = held_out_tasks(self.env_id, tasks or self.config.eval_tasks)
        try:
            return asyncio.run(
                collector.collect(held_out, seed=self.config.seed, group_size=samples)
            )
        finally:
            collector.pool.close()
            self.close()

    def metrics(self) -> dict[str, float]:
        """The `eval/...` metrics on the held-out tasks, sampled and greedy."""
        collector = self._collector()
        try:
            return asyncio.run(evaluate(collector, self.env_id, self.config.eval_tasks))[0]
        finally:
            collector.pool.close()
            self.close()

    def close(self) -> None:
        """Stops the engine; whatever needs one starts it again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def act(self, observation: str, *, first: bool = False, role: str = "user") -> str:
        """One greedy action in a running conversation.

        Args:
            observation: What the environment said.
            first: Starts a new conversation.
            role: `tool` where the observation is a tool's result.
        """
        if first or not self._talk:
            self._talk = list(self.chat.start(observation, *instructions(self._env)))
        else:
            self._talk += self.chat.follow(observation, self._talk[-1], role)
        limits = self.config.rollout
        sampling = Sampling(
            max_tokens=limits.max_turn_tokens, temperature=0.0, stop_ids=self.chat.stop_ids
        )
        completion = asyncio.run(self._new_engine().generate(self._talk, sampling))
        self._talk += completion.token_ids
        return self.chat.decode(completion.token_ids)

    def save(self, path: str | Path) -> None:
        """Writes the model, the tokenizer and the config; `load` reads them back."""
        folder = Path(path)
        save_model(self.model, self.tokenizer, folder)
        (folder / "gspo_env.json").write_text(json.dumps({"config": to_toml(self.config)}))

    @classmethod
    def load(cls, path: str | Path, env: str = "") -> GSPOAgent:
        """An agent as `save` or a training run left it."""
        folder = Path(path)
        if (folder / "model").is_dir():
            folder = folder / "model"
        note = folder / "gspo_env.json"
        tree = tomllib.loads(json.loads(note.read_text())["config"]) if note.exists() else {}
        return cls(str(folder), env, from_dict(tree))

    def _adapt(self) -> None:
        if self.config.learner.lora_rank:
            self.model = add_adapter(self.model, self.config.learner.lora_rank)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Lets the embedded model imitate its demonstrations; a given model, or twice: nothing."""
        settings = self.config.embedded
        if not self._demonstrations or not settings.imitation_steps:
            return
        samples = to_samples(self._demonstrations, self.chat, self._env)

        total = settings.imitation_steps

        def show(step: int, loss: float) -> None:
            if progress is not None and (step % 20 == 0 or step == total):
                progress.update(phase="warm-up", step=step, total=total, loss=loss)

        warm_up(self.model, samples, settings, self.config.seed, show)
        self._demonstrations = []

    def _new_engine(self) -> Engine:
        if self._engine is None:
            self._engine = make_engine(self.config, self.model)
        return self._engine

    def _collector(self) -> Collector:
        pool = EnvPool(
            lambda: make_env(self.env_id, **self.config.env_kwargs),
            threads=self.config.rollout.concurrency,
        )
        return Collector(self._new_engine(), self.chat, pool, self.config.rollout)

    def _finish(self, folder: Path, history: History, tracker: Several) -> None:
        self.save(folder / "model")
        figure = learning_curve(history, f"{self.env_id}, seed {self.config.seed}")
        figure.savefig(folder / "learning_curve.png")
        for name in ("config.toml", "learning_curve.png"):
            tracker.artifact(folder / name)
        tracker.artifact(folder / "model", MODEL)

    def _summary(self, folder: Path, history: History, tracker: Several) -> str:
        scores = [m for _, m in history if "eval/success" in m]
        first, last = scores[0], scores[-1]
        lines = [
            f"Success on {self.config.eval_tasks} held-out tasks: "
            f"{first['eval/success']:.1%} before training, {last['eval/success']:.1%} after "
            f"(greedy {first['eval/success_greedy']:.1%} and {last['eval/success_greedy']:.1%}).",
            f"Model, config and learning curve: {folder}",
            *tracker.problems,
        ]
        if tracker.how_to_look:
            lines.append(f"Tracked: {tracker.how_to_look}")
        return "\n".join(lines)


class _Reporter:
    """Shows each step in the terminal and logs it."""

    def __init__(self, total: int, progress: Progress, tracker: Several, folder: Path) -> None:
        self._total, self._progress, self._tracker = total, progress, tracker
        self._folder = folder

    def __call__(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """See `gspo_env.training.loop.Report`."""
        self._tracker.log(metrics, step)
        evaluation = "eval/success" in metrics
        prefix = "eval" if evaluation else "train"
        self._progress.update(
            phase="evaluate" if evaluation else "train",
            step=step,
            total=self._total,
            success=metrics[f"{prefix}/success"],
            return_=metrics[f"{prefix}/return"],
            tokens_per_second=metrics.get("rollout/tokens_per_second"),
        )
        if evaluation:
            shown = "\n\n".join(render_episode(g.episodes[0]) for g in groups[:8])
            (self._folder / f"episodes-{step:04d}.txt").write_text(shown)
            self._tracker.text(f"episodes/step-{step:04d}.txt", shown)
