"""Preflight: whether a run of a model that is not tiny fits into memory, and how long it takes.

One prompt, decoding steps of few and of many sequences, and one gradient are measured; nothing is
trained. The rest is arithmetic on the tokens of an episode: those of the demonstrations, or of a
few episodes that are played. Memory is right within about 25 %, time within about 50 %.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import nn

from gspo_agents.engine_loop import EngineLoop
from gspo_agents.setup import open_collector, start_engine
from gspo_env.batch.sample import Sample, to_samples
from gspo_env.config import Config, learner_arguments, override
from gspo_env.engines import Engine, Sampling, Transformers
from gspo_env.engines.embedded.direct import packs
from gspo_env.errors import TrainingError
from gspo_env.health.findings import Finding
from gspo_env.learner.learner import Learner
from gspo_env.model.head import usable_ids
from gspo_env.model.threads import tokens_of_pass
from gspo_env.recipes.build import imitation_samples
from gspo_env.recipes.imitate import LOOKS
from gspo_env.restoring import set_generator_states
from gspo_env.seeding import generator_states
from gspo_env.tracking.console import Progress
from gspo_env.training.curriculum import next_options
from gspo_env.training.split import draw_tasks
from gspo_env.types import Episode

if TYPE_CHECKING:
    from gspo_agents.gspo import GSPOAgent

_LIMIT = 60.0
"""Seconds that the measurement may take; then the training begins without it."""
_EPISODES, _SECONDS = 8, 20.0
"""Episodes that are played or demonstrations that are read, and the seconds they may take."""
_UNKNOWN_PROMPT = 512
"""Tokens of a first prompt, if no episode gets to its first action in time."""
_ROWS, _DECODED = (8, 64), 4
"""Sequences that sample together while decoding is measured, and the steps."""
_KEPT, _CHECKPOINTED = 1.15, 0.1
"""What a token's activations take, in values by each input and output of a linear layer, and the
share of it with activation checkpointing: about those of SmolLM2."""
_PROGRAM, _FILE = 0.7e9, 2**32
"""Bytes of libraries that are loaded later, of episodes and of freed memory that the program keeps;
and of a checkpoint's largest file."""
_DISTINCT = 0.3
"""Share of a group's episodes that differ from the first where the policy has imitated."""
_HOUR = 3600.0
_REMEDIES: dict[str, dict[str, Any]] = {
    "--checkpointing": {"learner": {"checkpointing": True}},
    "--lora-rank 16": {"learner": {"lora_rank": 16}},
    "--microbatch-tokens 1024": {"learner": {"microbatch_tokens": 1024}},
    "--concurrency 16": {"rollout": {"concurrency": 16}},
    "--model-dtype bfloat16": {"model_dtype": "bfloat16"},
}
"""Flags that save memory, with their settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Mean tokens of an episode."""

    prompt: float
    """Tokens of the first prompt, which the episodes of a group share."""
    observed: float
    """Tokens of all later prompts, without what they repeat."""
    sampled: float
    longest: int
    """Tokens of the longest sequence."""
    steps: float
    """Sampled tokens of the longest episode."""

    def computed(self, groups: float, episodes: float) -> float:
        """Returns the tokens that an engine or a learner computes for groups of episodes."""
        return groups * self.prompt + episodes * (self.observed + self.sampled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What takes memory."""

    parameters: int
    """The number of weights."""
    trained: int
    """The number of those that train."""
    width: int
    """Inputs and outputs of all linear layers: weights of an adapter of rank 1."""
    weight: int
    """Bytes of one weight."""
    cached_token: int
    """Bytes of the keys and values of one token."""
    on_cpu: bool = False
    packed: bool = False
    """Whether the engine has its own copy of the weights."""

    def is_whole(self, config: Config) -> bool:
        """Returns whether every weight trains, and not an adapter."""
        return self.trained == self.parameters and not config.learner.lora_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a run needs."""

    lengths: Lengths
    more: float
    """Bytes in addition to the weights that are loaded."""
    rows: Mapping[str, str]
    """What a person reads, by name."""
    seconds: float
    """Seconds of the run, those of `imitation` included."""
    imitation: float = 0.0
    """Seconds of the imitation before it."""
    tight: Finding | None = None
    """Set if episodes that fill their context would not fit into memory."""


def memory(sizes: Sizes, config: Config, tokens: float, longest: int) -> dict[str, float]:
    """Returns the bytes of each part of a run, in the order in which a person thinks of them.

    Args:
        sizes: The model.
        config: The settings, with `learner.microbatch_tokens`.
        tokens: Those of the largest minibatch.
        longest: Those of the longest sequence.
    """
    learner, is_whole = config.learner, sizes.is_whole(config)
    weight = {"bfloat16": 2, "float16": 2, "float32": 4}.get(config.model_dtype, sizes.weight)
    trained = learner.lora_rank * sizes.width or sizes.trained
    state = (2 if "8bit" in learner.optimizer else 8) + 4 * (weight == 2 and is_whole)
    half_cpu = sizes.on_cpu and weight == 2  # its kernels have their own weights and float32 keys
    copies = is_whole * (config.loss.needs_reference + (half_cpu or sizes.packed))
    row = max(min(learner.microbatch_tokens, tokens), min(longest, tokens))
    activations = (
        row * _KEPT * sizes.width * weight * (_CHECKPOINTED if learner.checkpointing else 1)
    )
    gradients = 4.0 * trained
    saved = (min((state + 4.0) * trained, _FILE) - gradients) * sizes.on_cpu
    cached = longest * sizes.cached_token * weight / sizes.weight * (1.5 if half_cpu else 1)
    parts = {
        "weights": float(sizes.parameters * weight),
        "copies": (copies + 2.0 * bool(config.supply.max_staleness)) * sizes.parameters * weight,
        "gradients": gradients,
        "optimiser": float(state * trained),
        "cache": _slots(sizes, config) * cached,
        "program": _PROGRAM * sizes.on_cpu,
        # gradients come in place of the activations of the only row
        "largest pass": max(activations - gradients * (tokens <= row), saved, 0.0),
    }
    return {name: size for name, size in parts.items() if size}


def needed(sizes: Sizes, config: Config, tokens: float, longest: int) -> float:
    """Returns the bytes that a run takes in addition to the weights that are loaded.

    The arguments are those of `memory`.
    """
    parts = memory(sizes, config, tokens, longest)
    return sum(parts.values()) - sizes.parameters * sizes.weight


def _slots(sizes: Sizes, config: Config) -> int:
    """Returns the slots of the engine's cache; on a CPU they are as many as are in use at once."""
    batch = config.tasks_per_step * config.rollout.group_size * (1 + config.supply.max_staleness)
    most = max(batch, 2 * int(config.eval_tasks)) if sizes.on_cpu else config.rollout.concurrency
    return min(config.rollout.concurrency, most)


def remedies(sizes: Sizes, config: Config, tokens: float, longest: int, free: float) -> str:
    """Returns the flags with which a run fits into the free bytes, or with which it comes near."""
    flags, more = "", needed(sizes, config, tokens, longest)
    for flag, tree in _REMEDIES.items():
        changed = override(config, tree)
        less = needed(sizes, changed, tokens, longest)
        if less < more:
            config, more, flags = changed, less, f"{flags} {flag}"
        if more <= free:
            return f"It fits with{flags} ({_gb(more)} more)."
    return f"With{flags}, it would still take {_gb(more)} more."


def check(agent: GSPOAgent, demonstrations: Sequence[Episode]) -> list[Finding]:
    """Prints what a run needs and how long it takes; returns what may go wrong.

    Args:
        agent: The agent before its training.
        demonstrations: What it imitates first.

    Raises:
        TrainingError: It does not fit into memory.
    """
    Progress().line(f"preflight: measures a few tokens and gradients, for at most {_LIMIT:g} s")
    run = estimate(agent, demonstrations)
    Progress().line("\n".join(f"{name:<13}{value}" for name, value in run.rows.items()))
    text = f"The run takes about {_clock(run.seconds)}."
    advice = "Lower --eval-tasks, --steps or --tasks-per-step, or raise --eval-every."
    long = [Finding(name="long", text=text, advice=advice)] * (run.seconds > _HOUR)
    return [*([run.tight] if run.tight else []), *long]


def estimate(agent: GSPOAgent, demonstrations: Sequence[Episode]) -> Estimate:
    """Measures what a run needs; its time is 0 if another process samples, or measuring takes long.

    The global generators are as before.

    Args:
        agent: The agent before its training.
        demonstrations: What it imitates first.

    Raises:
        TrainingError: It does not fit into memory.
    """
    model, states, deadline = agent.model, generator_states(), time.monotonic() + _LIMIT
    free, sizes = free_memory(model), _sizes(model)
    pass_tokens = agent.config.learner.microbatch_tokens or tokens_of_pass(model, _device(model))
    config = override(agent.config, {"learner": {"microbatch_tokens": pass_tokens}})
    groups, slots, learner = config.tasks_per_step, config.rollout.concurrency, config.learner
    lengths = Lengths(prompt=0, observed=0, sampled=0, longest=0, steps=0)
    more, text = _refuse(sizes, config, 0, lengths, free)
    if not isinstance(config.engine, Transformers) or config.rollout.ray_workers:
        rows = {"memory": f"{text}; activations and the engine are not in it"}
        return Estimate(lengths=lengths, more=more, rows=rows, seconds=0.0)
    few = override(config, {"rollout": {"concurrency": min(slots, _ROWS[-1])}})
    engine, loop = start_engine(model, few), EngineLoop()
    try:
        lengths = _lengths(agent, engine, loop, demonstrations)
        batch = config.recipe.imitation_batch if demonstrations else 0
        imitated, episodes = lengths.computed(batch, batch), groups * config.rollout.group_size
        minibatches = min(learner.minibatches, episodes)  # each has whole groups where it can
        part = lengths.computed(math.ceil(groups / minibatches), episodes / minibatches)
        largest = max(part, imitated)
        more, text = _refuse(sizes, config, largest, lengths, free)
        most, tight = _at_most(sizes, config, imitated, free)
        text += f"; about {_gb(max(most, more))} if episodes fill their context"
        rows = {"memory": text, "run": f"not known; measuring it takes more than {_LIMIT:g} s"}
        unknown = Estimate(lengths=lengths, more=more, rows=rows, seconds=0.0, tight=tight)
        measuring = _measure_engine(engine, int(lengths.prompt), few.rollout.concurrency, model)
        seconds = max(0.0, deadline - time.monotonic())
        prompt_token, step, decoded_token = loop.run(asyncio.wait_for(measuring, seconds))
    except TimeoutError:
        return unknown
    finally:
        engine.close()
        set_generator_states(states)

    def playing(groups: int, episodes: float) -> float:
        sampled = episodes * lengths.sampled
        steps = math.ceil(episodes / slots) * lengths.steps
        prompts = lengths.computed(groups, episodes) - sampled
        return prompts * prompt_token + steps * step + sampled * decoded_token

    if time.monotonic() > deadline:
        return unknown
    affordable = free / 4 / (_KEPT * sizes.width * sizes.weight)
    measured = max(64, int(min(largest, pass_tokens, 1.0 / prompt_token, affordable)))
    share = lengths.sampled / lengths.computed(1, 1)
    # a third of the work is that of the weights' gradients, which only adapters do without
    learned_token = _measure_gradient(model, config, measured, share)
    learned_token *= 1.5 if sizes.is_whole(config) else 1.0
    # a pass without gradient is a third of one with
    again = (minibatches - 1) / minibatches + config.loss.needs_reference + learner.checkpointing
    distinct = groups + (episodes - groups) * (_DISTINCT if batch else 1.0)
    played = playing(groups, distinct)
    learned = lengths.computed(groups, distinct) * learned_token * (1 + again / 3)
    tasks = int(config.eval_tasks)
    evaluated = playing(tasks, 2 * tasks)
    imitation = config.recipe.imitation_steps * imitated * learned_token if batch else 0.0
    if samples := config.recipe.imitation_pass_at:
        imitation += LOOKS * playing(tasks, samples * tasks)
    evaluations = 1 + (math.ceil(config.steps / config.eval_every) if config.eval_every else 1)
    shipped = 0.5 * bool(batch and config.model)  # sampled only, of the model before imitation
    evaluating = (evaluations + shipped) * evaluated
    seconds = imitation + config.steps * (played + learned) + evaluating
    rows = {
        "memory": text,
        "evaluation": f"{2 * tasks} episodes of about {lengths.computed(1, 1):,.0f} "
        f"tokens, of which {lengths.sampled:,.0f} are sampled: {_clock(evaluated)}",
        "step": f"{episodes} episodes: {_clock(played)} to play, {_clock(learned)} to learn",
        "run": f"{_clock(seconds)}, of which {_clock(evaluating)} evaluate and "
        f"{_clock(imitation)} imitate",
    }
    return replace(unknown, rows=rows, seconds=seconds, imitation=imitation)


def price(agent: GSPOAgent, demonstrations: Sequence[Episode]) -> dict[str, float]:
    """Returns the seconds of a run and of its imitation, and how many runs fit into memory.

    Raises:
        TrainingError: Not even one fits.
    """
    run, sizes = estimate(agent, demonstrations), _sizes(agent.model)
    loaded = float(sizes.parameters * sizes.weight)
    fitting = (free_memory(agent.model) + loaded) // (run.more + loaded)
    return {"seconds": run.seconds, "imitation": run.imitation, "fitting": max(1.0, fitting)}


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def _now(model: Any) -> float:
    """Returns seconds: on a CPU those of its threads, which other programs do not change."""
    if _device(model).type == "cpu":
        return time.process_time() / torch.get_num_threads()
    torch.cuda.synchronize()  # a GPU may still compute what it was told
    return time.perf_counter()


def _refuse(
    sizes: Sizes, config: Config, tokens: float, lengths: Lengths, free: float
) -> tuple[float, str]:
    """Returns the bytes that a run takes and describes them; raises if they are not free."""
    parts = memory(sizes, config, tokens, lengths.longest)
    more = needed(sizes, config, tokens, lengths.longest)
    shown = ", ".join(f"{n} {_gb(size)}" for n, size in parts.items())
    text = f"{shown}: {_gb(more)} more, of {_gb(free)} that are free"
    if more > free:
        help_ = remedies(sizes, config, tokens, lengths.longest, free)
        raise TrainingError(f"the run does not fit into memory: {text}. {help_}")
    return more, text


def _at_most(
    sizes: Sizes, config: Config, imitated: float, free: float
) -> tuple[float, Finding | None]:
    """Returns the bytes of a run whose episodes fill their context, and a finding if they lack.

    Args:
        sizes: The model.
        config: The settings, with `learner.microbatch_tokens`.
        imitated: Tokens of a step of imitation.
        free: Bytes that are free.
    """
    longest, learner = config.rollout.max_context, config.learner
    episodes = config.tasks_per_step * config.rollout.group_size
    tokens = max(imitated, math.ceil(episodes / min(learner.minibatches, episodes)) * longest)
    most = needed(sizes, config, tokens, longest)
    if most <= free:
        return most, None
    text = (
        f"Episodes that fill their context of {longest:,} tokens would take {_gb(most)} more, and "
        f"{_gb(free)} are free: a model that learns to write more may run out of memory."
    )
    advice = f"Lower --max-context. {remedies(sizes, config, tokens, longest, free)}"
    return most, Finding(name="memory", text=text, advice=advice)


def _sizes(model: Any) -> Sizes:
    shape, head = model.config.get_text_config(), model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    weight, heads = next(model.parameters()).element_size(), shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    heads = getattr(shape, "num_key_value_heads", None) or heads
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        width=sum(layer.in_features + layer.out_features for layer in linear),
        weight=weight,
        cached_token=2 * shape.num_hidden_layers * heads * size * weight,
        on_cpu=_device(model).type == "cpu",
        packed=packs(model),
    )


def free_memory(model: Any) -> float:
    """Returns the bytes that are free on the device of a model, within the limits of a process."""
    if _device(model).type != "cpu":
        return float(torch.cuda.mem_get_info()[0])
    membership = Path("/proc/self/cgroup")
    groups = membership.read_text() if membership.exists() else ""
    available = float(psutil.virtual_memory().available)
    return max(0.0, min(available, group_memory(Path("/sys/fs/cgroup"), groups)))


_GROUP = ("max", "current", "inactive_file")
"""What the files of a control group call its limit, what it uses, and its cache."""
_OLD_GROUP = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")


def group_memory(mount: Path, membership: str) -> float:
    """Returns the bytes that the control groups (version 1 or 2) of a process leave it.

    Args:
        mount: Where the groups are mounted; in a container, its own group may be the outermost.
        membership: What `/proc/self/cgroup` says.
    """
    least = math.inf
    for line in membership.splitlines():
        _, controllers, name = line.split(":", 2)
        old = "memory" in controllers.split(",")  # of version 1; version 2 names no controllers
        limit, used, cache = _OLD_GROUP if old else _GROUP
        root = mount / "memory" if old else mount
        innermost = root / name.strip("/")
        for group in (innermost, *innermost.parents) if old or not controllers else ():
            files = [group / f"memory.{kind}" for kind in (limit, used, "stat")]
            if not all(file.is_file() for file in files) or "max" in files[0].read_text():
                continue
            counts = dict(row.split() for row in files[2].read_text().splitlines())
            free = int(files[0].read_text()) - int(files[1].read_text())
            least = min(least, float(free + int(counts.get(cache, 0))))
    return least


def _lengths(
    agent: GSPOAgent, engine: Engine, loop: EngineLoop, demonstrations: Sequence[Episode]
) -> Lengths:
    """Reads the demonstrations, or plays a few episodes of training."""
    config, limits = agent.config, agent.config.rollout
    if shown := imitation_samples(demonstrations[:_EPISODES], agent.chat, limits.max_context):
        return _read(shown)
    timeout = {"rollout": {"episode_timeout": min(_SECONDS, limits.episode_timeout)}}
    options, weights = next_options(config.curriculum, {}), agent.environments.weights
    tasks = draw_tasks(weights, seed=config.seed, step=-1, count=_EPISODES, options=options)
    held_out, size = agent.split().held_out, usable_ids(agent.model)
    with (
        agent.environments.pool() as pool,
        open_collector(
            override(config, timeout), lambda: engine, agent.chat, pool, size
        ) as collector,
    ):
        playing = collector.collect(tasks, seed=config.seed, group_size=1, held_out=held_out)
        ended = [e for group in loop.run(playing) for e in group.episodes if e.turns]
    if ended:
        return _read(to_samples(ended, [np.zeros(len(e.turns)) for e in ended]))
    most = limits.max_turn_tokens  # the engine is too slow: an action as long as it may be
    prompt = min(_UNKNOWN_PROMPT, limits.max_context - most)
    return Lengths(prompt=prompt, observed=0, sampled=most, longest=prompt + most, steps=most)


def _read(samples: Sequence[Sample]) -> Lengths:
    """Returns the mean lengths of samples, and the greatest."""
    prompts = {sample.episode: int(sample.mask.argmax()) for sample in reversed(samples)}
    prompt = sum(prompts.values()) / len(prompts)
    sampled = sum(int(sample.mask.sum()) for sample in samples) / len(prompts)
    total = sum(len(sample.token_ids) for sample in samples) / len(prompts)
    longest = max(len(sample.token_ids) for sample in samples)
    steps = max(int(sample.mask.sum()) for sample in samples)
    observed = total - prompt - sampled
    return Lengths(prompt=prompt, observed=observed, sampled=sampled, longest=longest, steps=steps)


async def _measure_engine(
    engine: Engine, size: int, slots: int, model: Any
) -> tuple[float, float, float]:
    """Returns the seconds of a prompt's token, of a step, and of what each sequence adds to it."""
    draw = np.random.default_rng(0)

    async def seconds(ids: Sequence[int], rows: int, tokens: int) -> float:
        began = _now(model)
        # at a temperature at which sequences with the same prompt diverge immediately
        settings = [Sampling(max_tokens=tokens, temperature=1e3, seed=n) for n in range(rows)]
        await asyncio.gather(*(engine.generate(ids, sampling) for sampling in settings))
        return _now(model) - began

    steps, few = [], min(_ROWS[0], slots)
    for rows in (few, slots):
        ids = draw.integers(0, usable_ids(model), size).tolist()
        await seconds(ids[::-1], rows, 1 + _DECODED)  # the first of a shape takes longer
        prompt = await seconds(ids, 1, 1)  # all others copy this prompt
        before = await seconds(ids, rows, 1)
        steps.append((await seconds(ids, rows, 1 + _DECODED) - before) / _DECODED)
    token = max(0.0, (steps[1] - steps[0]) / max(1, slots - few))
    return prompt / size, max(0.0, steps[0] - few * token), token


def _measure_gradient(model: Any, config: Config, tokens: int, share: float) -> float:
    """Returns the seconds of a token in a pass forward and backward, without weights' gradients.

    Args:
        model: The model.
        config: The settings.
        tokens: The number of tokens.
        share: Of the tokens, how many are sampled.
    """
    sampled = max(1, int(tokens * share))
    sample = Sample(
        token_ids=np.random.default_rng(0).integers(0, usable_ids(model), tokens),
        turn_ids=np.repeat([-1, 0], [tokens - sampled, sampled]),
        advantages=np.ones(sampled),
        engine_logprobs=np.full(sampled, -1.0),
    )
    weight = model.get_input_embeddings().weight
    is_trained = weight.requires_grad
    weight.requires_grad_(True)  # what is computed last
    learner = Learner(model, **learner_arguments(config))
    row = learner.prepare([sample])[0].microbatches[0].row
    for _ in range(2):  # the first of a shape takes longer
        began = _now(model)
        torch.autograd.grad(learner.scorer(row)[0].logprobs_N.mean(), weight)
    weight.requires_grad_(is_trained)
    return (_now(model) - began) / tokens


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"


def _clock(seconds: float) -> str:
    """Writes a time as people say it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} hours"
