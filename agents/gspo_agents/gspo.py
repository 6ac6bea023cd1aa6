"""The GSPO agent: grouped episodes, per-turn credit, sequence-level ratios (arXiv 2507.18071)."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock, local
from typing import TYPE_CHECKING, Any, Literal

import torch

from gspo_agents.engine_loop import EngineLoop
from gspo_agents.environments import Environments
from gspo_agents.reporter import Reporter, run_info
from gspo_agents.setup import (
    Start,
    check_learning,
    decide_mode,
    imitate,
    make_learner,
    make_start,
    open_collector,
    start_engine,
)
from gspo_agents.terminal import own_classes
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.config import Config, from_dict, override, to_toml, with_score
from gspo_env.engines import Completion, Engine, Sampling, Transformers, check_completion
from gspo_env.env.registration import env_setting, hide_progress_bars
from gspo_env.errors import ConfigError
from gspo_env.files import MODEL, SETTINGS
from gspo_env.health.findings import Finding
from gspo_env.health.startup import (
    check_player,
    check_settings,
    check_start,
    check_training,
)
from gspo_env.model.head import is_adapted, match_tokenizer, usable_ids
from gspo_env.model.save import make_output, save_model
from gspo_env.model.threads import is_small, use_threads
from gspo_env.redaction import write_text
from gspo_env.registry import refuse_training_script
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.metrics import Evaluation
from gspo_env.rollout.pool import make_member
from gspo_env.runs.names import AS_SHIPPED
from gspo_env.runs.run import History
from gspo_env.seeding import (
    derive_seed,
    generator_states,
    seed_generators,
)
from gspo_env.tracking.console import Progress
from gspo_env.tracking.multi import MultiTracker, start
from gspo_env.training.checkpoints import Checkpoints, CheckpointWriter, run_facts
from gspo_env.training.interrupt import stop_on_signals
from gspo_env.training.loop import Loop, evaluate
from gspo_env.training.split import Split
from gspo_env.trust import needs_flags, record
from gspo_env.types import Group, Prompt, Role, Task

if TYPE_CHECKING:
    from gspo_agents.player import Player
    from gspo_agents.replay import Replay
    from gspo_agents.rewind import Rewind
    from gspo_env.distributed.ranks import Ranks
    from gspo_env.episodes.schema import EpisodeRecord
    from gspo_env.training.resume import Checkpoint, Resumed

logger = logging.getLogger(__name__)


class GSPOAgent:
    """Collects grouped episodes of a text environment and trains on them with GSPO-token.

    Args:
        model: A `transformers` causal LM, a folder or hub id; empty builds the tiny model.
            A model is cast to `config.model_dtype`, unless that is `auto`.
        env: Environment id, `file.py:Class` or a class, or several; the config's by default. A
            class has an id in this process only, so the command line needs its file.
        config: All other settings.
        tokenizer: The tokenizer of `model`, if that is not a name.
        ranks: The ranks that train together, of which this process is the first.
    """

    _make_env = staticmethod(make_member)

    def __init__(
        self,
        model: Any = "",
        env: str | type | Sequence[str | type] = "",
        config: Config | None = None,
        tokenizer: Any = None,
        ranks: Ranks | None = None,
    ) -> None:
        hide_progress_bars()  # also in a script, which imports this class itself
        name = model if isinstance(model, str) else model.config.name_or_path or "given"
        self.config = config or (Config(model=name) if name else Config.from_recipe())
        if not isinstance(self.config, Config):
            raise ConfigError(f"config is {config!r:.100}; expected a gspo_env.Config")
        if env:
            self.config = replace(self.config, env=env_setting(env))
        self._ranks = ranks
        check_player(self.config, ranks=ranks is not None)
        self.environments = Environments(self.config, self, self._make_env)
        with self.environments.closing():  # after it, only what they declare is read
            self.env_id = self.environments.env_id
            declared = self.environments.scores
            if len(declared) == 1:  # of several, each has its own
                self.config = with_score(self.config, declared[self.env_id])
            self._findings: list[Finding] | None = None
            self._start: Start | None = None
            self._undemonstrated: list[str] = []
            dtype = self.config.model_dtype
            if not isinstance(model, str):
                self.model, self.tokenizer = model, tokenizer
            elif model or self.config.model:
                from gspo_env.model.load import load_model

                self.model, self.tokenizer = load_model(model or self.config.model, dtype)
                dtype = "auto"  # loaded so, but for parts that the architecture keeps in float32
            else:
                refuse_training_script()
                self._check()  # before the demonstrations
                envs = self.environments.envs
                self._start = self.environments.guard(make_start, self.config, envs)
                self.model, self.tokenizer = self._start.model, self._start.tokenizer
                self._undemonstrated = self._start.undemonstrated
            rank = self.config.learner.lora_rank
            if rank and is_adapted(self.model):
                raise ConfigError(f"lora_rank is {rank} and the model has an adapter; expected 0")
            if dtype != "auto":
                self.model.to(getattr(torch, dtype))
            if torch.cuda.is_available():
                self.model.to("cuda")
            use_threads(self.model)
            if self.config.eval_tasks == "all":
                self.config = replace(self.config, eval_tasks=self.environments.num_eval_tasks)
            if not self.config.eval_tasks:
                is_slow = not is_small(self.model) and not torch.cuda.is_available()
                self.config = replace(self.config, eval_tasks=32 if is_slow else 256)
            self.chat = ChatTokenizer(
                self.tokenizer,
                history=self.config.rewritten_history,
                end_ids=match_tokenizer(self.model, self.tokenizer),
            )
            self.folder: Path | None = None
            self._trained, self._left_out, self._step = False, 0, 0
            self._source = (model or self.config.model) if isinstance(model, str) else ""
            self._imitates = bool(self._source) and getattr(
                self.config.recipe, "demonstrates", False
            )
            self._resumed: Resumed | None = None
            self._engine: Engine | None = None
            self._conversation, self._loop, self._starting = local(), EngineLoop(), Lock()

    def train(self) -> History:
        """Warms up the tiny model, trains, evaluates, tracks and saves; returns the metrics.

        SIGINT, SIGTERM and SIGHUP end the training after the step that runs, with a checkpoint; a
        second one raises KeyboardInterrupt, as the first does after a step of the imitation. An
        agent of `resume` continues where its run stopped.

        Raises:
            ModelError: No way to run the model gives its own log-probabilities.
            OutputError: The output folder cannot be written.
            TrainingError: Nothing can be learned; see `gspo_env.health.startup`.
        """
        refuse_training_script()
        config, resumed, source = self.config, self._resumed, self._source
        check_learning(self.model, config, self.chat)
        # a checkpoint replaces their states
        seed_generators(derive_seed(config.seed, "generators"))
        findings: list[Finding] = []
        if resumed is None:
            with self.environments.closing() as envs:
                findings += self._check()
                self._gather()
                check = partial(check_start, undemonstrated=self._undemonstrated)
                findings += self.environments.guard(check, config, envs, self.chat)
            if self._ranks is None and not is_small(self.model):
                from gspo_agents.preflight import check as preflight

                findings += preflight(self, self._start.episodes if self._start else ())
        mode = decide_mode(self.model, config)
        if resumed is not None:
            checkpoints, recorded = resumed.checkpoints, resumed.recorded
            from gspo_env.health.changed import check_changed_files

            findings += check_changed_files(checkpoints.run, needs_flags(config))
        else:
            folder = make_output(config.output, f"{self.env_id.split('/')[-1]}-seed{config.seed}")
            checkpoints, recorded = Checkpoints(folder, config.checkpoints), None
        self.folder, checkpoints.flags = checkpoints.run, own_classes(config)
        record(self.folder, config, source)
        self._trained, self._resumed = True, None
        info = run_info(config, self.env_id, mode, self.folder, recorded)
        with (
            checkpoints,
            stop_on_signals() as interrupt,
            Progress() as progress,
            checkpoints.report_failure(),
            start(config.tracker, info) as tracker,
        ):
            reporter = Reporter(config, progress, tracker, checkpoints, self.tokenizer)
            reporter.begin(self.model, self.env_id, findings)
            # of the model before its imitation
            facts = run_facts(config, self.model, source) if self._source or self._start else {}
            if resumed is not None:
                before = resumed.before
            else:
                before = self._success_as_shipped(reporter) if source else {}
            facts["before"] = before
            writer = CheckpointWriter(
                checkpoints, interrupt, facts, lambda: tracker.recorded, self._write
            )
            if resumed is not None and resumed.checkpoint.in_imitation:
                before |= self.warm_up(progress, writer, resumed.checkpoint)
                resumed = None
            else:
                before |= self.warm_up(progress, writer)
            if not self._source:
                if resumed is None:
                    must = config.episodes.keep_batches != "none"
                    checkpoints.save_start(self._write, must=must)
                writer.facts = run_facts(config, self.model, "")
            writer.facts |= {"left_out": self._left_out, "before": before}
            history = self._learn(writer, reporter, resumed, tracker, before)
            reporter.end(history, self.split(), self._left_out)
        return history

    def _success_as_shipped(self, reporter: Reporter) -> dict[str, float]:
        """Returns the success on the evaluation's tasks before imitation, sampled, as a metric.

        It is not measured without imitation, or where an engine or workers would have to start. The
        global generators are as before.
        """
        limits, engine = self.config.rollout, self.config.engine
        if not self._start or limits.ray_workers or not isinstance(engine, Transformers):
            return {}
        from gspo_env.restoring import set_generator_states

        states = generator_states()
        with self._collector() as collector, reporter.watch(collector):
            playing = collector.collect(self.split().tasks, seed=0, group_size=1)
            played = Evaluation(self._loop.run(playing), (), 0.0).sampled
        set_generator_states(states)
        return {AS_SHIPPED: played.success}

    def _check(self) -> list[Finding]:
        """Checks the settings of a training and its environments, once."""
        if self._findings is None:
            envs = self.environments.envs
            check_training(self.config)
            self._findings = self.environments.guard(check_settings, self.config, envs)
        return self._findings

    def _learn(
        self,
        writer: CheckpointWriter,
        reporter: Reporter,
        resumed: Resumed | None,
        tracker: MultiTracker,
        before: Mapping[str, float],
    ) -> History:
        """Runs the steps that are left; saves and tracks the model if these are all."""
        config = self.config
        self._add_adapter()
        learner = make_learner(self.model, config, self._ranks)
        if config.supply.max_staleness:
            self.close()  # one that `play` started may share the learner's weights
            self._engine = start_engine(self.model, config, ahead=True)
        if config.episodes.keep_batches != "none":
            from gspo_env.training.batches import announcement

            reporter.line(announcement(config, learner, writer.checkpoints.run))
        with self._collector() as collector, reporter.watch(collector):
            loop = Loop(
                config=config,
                weights=self.environments.weights,
                declared=self.environments.scores,
                collector=collector,
                learner=learner,
                reporter=reporter,
                split=self.split(),
                writer=writer,
                before=before,
            )
            if resumed is not None:
                from gspo_env.training.resume import restore

                restore(loop, resumed.checkpoint)
                reporter.resume(loop.history, loop.scores.only)
            writer.interrupt.graceful = True
            history = self._loop.run(loop.train())
            self._step = loop.step
            self.config = reporter.config
            # before the environments close, which may raise
            reporter.save(history, self.env_id, self._write_run)
            tracker.finish("FINISHED" if loop.complete else "KILLED")
        return history

    def _add_adapter(self) -> None:
        settings = self.config.learner
        if not settings.lora_rank or is_adapted(self.model):
            return
        self.close()  # an engine that `play` started holds the model without the adapter
        alpha, targets = settings.lora_alpha, settings.lora_targets
        from gspo_env.model.adapters import add_adapter

        self.model = add_adapter(
            self.model, settings.lora_rank, self.config.seed, alpha=alpha, targets=targets
        )

    @classmethod
    def resume(
        cls, path: str | Path, config: Config | None = None, ranks: Ranks | None = None
    ) -> GSPOAgent:
        """Returns the agent of a run that stopped; `train` continues after its newest checkpoint.

        Until it has trained, no other process can train the run.

        Args:
            path: Folder of the run.
            config: The run's config with another number of steps, or other settings of checkpoints.
            ranks: See `GSPOAgent`.

        Raises:
            ConfigError: The config changes another setting.
            ModelError: The model that the run began with is not found, or differs.
            OutputError: The run has no undamaged checkpoint, or another process trains it.
        """
        from gspo_env.training.resume import open_run

        resumed = open_run(Path(path), config)
        config = replace(resumed.config, output="")  # which a new run would refuse
        agent = cls(resumed.model, config=config, tokenizer=resumed.tokenizer, ranks=ranks)
        agent.config = replace(agent.config, output=resumed.config.output)
        resumed.check(agent.model)
        agent._imitates &= resumed.checkpoint.in_imitation
        agent._resumed = resumed
        agent._left_out = resumed.checkpoint.numbers["left_out"]
        return agent

    @staticmethod
    def replay(run: str | Path, step: int | None = None, config: Config | None = None) -> Replay:
        """Reads a batch that a run has kept; see `gspo_agents.replay.Replay`."""
        from gspo_agents.replay import Replay

        return Replay(run, step, config)

    @staticmethod
    def rewind(
        run: str | Path, step: int | None = None, config: Config | None = None, **place: Any
    ) -> Rewind:
        """Reads an episode of a kept batch to play on from; see `gspo_agents.rewind.Rewind`."""
        from gspo_agents.rewind import Rewind

        return Rewind(run, step, config, **place)

    @property
    def finished(self) -> bool:
        """Whether this is the agent of a resumed run that has nothing left to do."""
        return self._resumed is not None and self._resumed.finished

    def evaluate(
        self,
        tasks: Any = 0,
        samples: int = 1,
        seed: int | None = None,
        *,
        temperature: float | None = None,
        on_group: Callable[[], None] | None = None,
    ) -> list[Group]:
        """Plays the tasks of `split`, `samples` episodes each.

        Args:
            tasks: As for `split`; or the tasks themselves.
            samples: Episodes of each task.
            seed: Seed of the sampling; the config's by default.
            temperature: That of the training by default; 0 is greedy.
            on_group: Called after the episodes of each task.
        """
        seed = self.config.seed if seed is None else seed
        tasks = tasks if isinstance(tasks, list | tuple) else self.split(tasks).tasks
        with self._collector() as collector:
            collector.on_group = on_group
            how: Any = {"seed": seed, "group_size": samples, "temperature": temperature}
            return self._loop.run(collector.collect(tasks, **how))

    def training_tasks(self, count: int, seed: int) -> list[Task]:
        """Draws tasks that training does not hold out for its evaluation."""
        from gspo_env.recipes.teacher import training_tasks

        envs, held_out = self.environments.envs, self.split().held_out
        guard = self.environments.guard
        drawn: list[Task] = guard(training_tasks, seed, envs, held_out, count)
        return drawn

    def split(self, tasks: int | Literal["all"] = 0) -> Split:
        """Returns the tasks of an evaluation and the task keys that training does not play.

        Training held out the config's number of tasks, and may have played all others. So a trained
        agent has at most this number, if its environment gives task keys.

        Args:
            tasks: 0 takes the config's number; `all` those of an environment that has a list.
        """
        tasks = self.environments.num_eval_tasks if tasks == "all" else tasks
        count = tasks or int(self.config.eval_tasks)
        draw = partial(self.environments.split, run=self._loop.run)
        if not self._trained or not (trained := draw(int(self.config.eval_tasks))).held_out:
            return draw(count)
        if count > len(trained.tasks):
            logger.warning("tasks is %d, and training held out only %s", count, trained)
        return trained.first(count)

    def metrics(self) -> dict[str, float]:
        """Returns the `eval/...` metrics on the tasks of `split`, sampled and greedy."""
        tasks = self.split().tasks
        with self._collector() as collector:
            return self._loop.run(evaluate(collector, tasks)).metrics()

    def price(self) -> dict[str, float]:
        """Measures how long a training takes; see `gspo_agents.preflight.price`."""
        from gspo_agents.preflight import price

        self._gather()
        return price(self, self._start.episodes if self._start else ())

    def close(self) -> None:
        """Stops the engine; the next call that needs it starts it again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def play(self, task: Task | int = 0, temperature: float = 0.0) -> EpisodeRecord:
        """Plays one episode of the agent's environment; `evaluate([task])` has its internals.

        Args:
            task: The task, or only its seed, in the first environment if there are several.
            temperature: 0 is greedy.
        """
        if isinstance(task, int):
            task = Task(env_id=next(iter(self.environments.envs)), seed=task)
        limits = self.config.rollout
        with self.environments.pool() as pool:  # for one episode, workers are not worth their start
            plain = Collector(self._running_engine(), self.chat, pool, limits, self._vocab_size)
            collector: Collector = self.config.compaction.wrap(plain)
            (group,) = self._loop.run(
                collector.collect(
                    [task], seed=self.config.seed, group_size=1, temperature=temperature
                )
            )
        from gspo_env.episodes.records import to_record

        return to_record(group.episodes[0], "eval" if temperature else "greedy", self._step)

    def act(self, observation: str, *, prompt: Prompt | None = None, role: Role = "user") -> str:
        """Returns one greedy action in a conversation; each thread has its own.

        An environment may call this inside `step` while the agent trains, if it runs in a thread.

        Args:
            observation: The environment's observation.
            prompt: Begins a new conversation; `gspo_env.env.read_prompt` reads an environment's.
            role: `tool` if the observation is the answer of a tool.

        Raises:
            ConfigError: No conversation has begun in this thread, or the caller is the event loop.
            EngineError: The conversation is longer than `rollout.max_context`.
        """
        if prompt is not None:
            from gspo_agents.player import Player

            self._conversation.player = Player(
                self.chat, prompt, self._generate, self.config.rollout
            )
        player: Player | None = getattr(self._conversation, "player", None)
        if player is None:
            raise ConfigError("act has no conversation; expected a prompt with the first call")
        return player.act(observation, role)

    def _generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Samples from any thread; see `EngineLoop.wait`."""
        with self._starting:
            request = self._running_engine().generate(ids, sampling)
        completion = self._loop.wait(request, self.config.rollout.episode_timeout)
        check_completion(completion, sampling, self._vocab_size)
        return completion

    def save(self, path: str | Path) -> None:
        """Writes the model, the tokenizer and the config; `load` reads them back."""
        self._write(Path(path))
        record(Path(path), self.config)

    def _write(self, folder: Path, step: int | None = None) -> None:
        save_model(self.model, self.tokenizer, folder)
        settings = {"config": to_toml(self.config), "step": step}
        write_text(folder / SETTINGS, json.dumps(settings))

    def _write_run(self, folder: Path, step: int) -> None:
        self._write(folder / MODEL, step)
        if is_adapted(self.model):
            from gspo_env.model.adapters import save_adapter

            save_adapter(self.model, folder / "adapter")

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: str | Sequence[str] = "",
        *,
        step: int | None = None,
        best: bool = False,
        **changes: Any,
    ) -> GSPOAgent:
        """Loads an agent that `save` or a training run wrote.

        The folder is data (`gspo_env.saved`). Playing needs no estimator, loss or tracker; those
        that are classes of a file are left out, so that the folder loads without that file.

        Args:
            path: The folder.
            env: Another environment, or several, to which neither saved arguments nor the score are
                taken over.
            step: The step of the run whose weights to load; the newest by default.
            best: Loads those of the best evaluation instead.
            changes: Fields of the config by name; a dictionary changes fields of a section.

        Raises:
            ConfigError: The saved settings are damaged, or name something that has to be given.
            ModelError: There are no such weights; see `gspo_env.model.weights`.
        """
        from gspo_env.model.weights import find_weights
        from gspo_env.saved import read_saved

        saved = read_saved(path)
        env = env if isinstance(env, str) else tuple(env)
        weights = find_weights(path, step, best=best)
        folder = weights.folder
        if saved is None:
            return cls(folder, env, override(Config(model=folder), changes))
        tree = saved.settings(changes, env=env, playing=True)
        changes.pop("env_kwargs", None)  # they are in the tree
        agent = cls(folder, "", override(from_dict(tree), changes))
        agent._trained, agent._step = not env or env == saved.env, weights.step or 0
        return agent

    def save_start(self, path: Path, progress: Progress) -> None:
        """Imitates, and writes what the training starts from, for `from_start`."""
        self.warm_up(progress)
        if is_adapted(self.model):
            from gspo_env.model.adapters import save_adapter

            save_adapter(self.model, path)
        else:
            self.save(path)

    @classmethod
    def from_start(cls, path: Path, config: Config) -> GSPOAgent:
        """Returns an agent that trains the model, or the adapter, that `save_start` wrote."""
        from gspo_env.model.load import has_adapter, load_model

        is_adapter = has_adapter(path)
        name, dtype = (config.model, config.model_dtype) if is_adapter else (str(path), "auto")
        model, tokenizer = load_model(name, dtype)
        agent = cls(model, config=config, tokenizer=tokenizer)
        if is_adapter:
            from gspo_env.model.adapters import load_adapter

            agent._add_adapter()
            load_adapter(agent.model, path)
        return agent

    def _gather(self) -> None:
        """Plays or reads what a model that the config names imitates; does so once."""
        if self._imitates:
            from gspo_agents.demonstrations import gather

            with self.environments.closing():
                shown = gather(self)
            self._start = Start(model=self.model, tokenizer=self.tokenizer, episodes=shown)
            if not self.config.learner.lora_rank:
                self._source = ""  # the run begins with the model that has imitated
            self._imitates = False

    def warm_up(
        self,
        progress: Progress | None = None,
        writer: CheckpointWriter | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> dict[str, float]:
        """Imitates the demonstrations, if there are any; does nothing when called again.

        Returns the metrics of the choice of weights, if the recipe chooses.

        Args:
            progress: Shows the steps.
            writer: Saves an imitation that takes long or is stopped.
            checkpoint: Where such an imitation resumes.
        """
        self._gather()
        start, self._start = self._start, None
        if start is None or not start.episodes or not self.config.recipe.imitation_steps:
            return {}
        split = self.split()
        demonstrations = [episode for episode in start.episodes if not split.holds_out(episode)]
        self._left_out = len(start.episodes) - len(demonstrations)
        progress = progress or Progress(io.StringIO())
        if self._source:  # a model that is built has random weights, which all have to learn
            self._add_adapter()
        choice = None
        if samples := self.config.recipe.imitation_pass_at:
            from gspo_env.training.start_choice import StartChoice

            seed = derive_seed("start choice", self.config.seed)
            tasks = self.training_tasks(int(self.config.eval_tasks), seed)
            how: Any = {"tasks": tasks, "samples": samples, "play": self.evaluate}
            choice = StartChoice(model=self.model, **how)
        where = (progress, writer, checkpoint, choice)
        imitate(self.model, self.chat, demonstrations, self.config, *where)
        return choice.finish() if choice is not None and choice.looks else {}

    @property
    def _vocab_size(self) -> int:
        return usable_ids(self.model)

    def _running_engine(self) -> Engine:
        if self._engine is None:
            self._engine = start_engine(self.model, self.config)
        return self._engine

    @contextmanager
    def _collector(self) -> Iterator[Collector]:
        """Yields a collector; closes its environments, its workers and the engine afterwards."""
        engine, size = self._running_engine, self._vocab_size
        with self.environments.pool() as pool:
            try:
                with open_collector(self.config, engine, self.chat, pool, size) as collector:
                    yield collector
            finally:
                self.close()
