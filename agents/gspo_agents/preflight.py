"""Preflight: whether a run of a model that is not tiny fits into memory, and how long it takes.

A few seconds of sampling and two gradients are measured; nothing is trained. The rest is arithmetic
on the tokens of an episode: those of the demonstrations, or of a few episodes that are played.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import nn

from gspo_agents.player import EngineLoop
from gspo_agents.setup import open_collector, start_engine
from gspo_env.batch.sample import Sample, to_samples
from gspo_env.config import Config, learner_arguments, override
from gspo_env.engines import Engine, Sampling, Transformers
from gspo_env.errors import TrainingError
from gspo_env.health.findings import Finding
from gspo_env.learner.learner import Learner
from gspo_env.model.adapters import is_adapted
from gspo_env.model.head import usable_ids
from gspo_env.model.load import add_adapter
from gspo_env.recipes.build import imitation_samples
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.tracking.console import Progress
from gspo_env.training.resume import generator_states, set_generator_states
from gspo_env.types import Episode, StopReason, Task

if TYPE_CHECKING:
    from gspo_agents.gspo import GSPOAgent

_EPISODES = 8
"""Episodes that are played, or demonstrations that are read."""
_TURN_TOKENS = 64
"""Tokens after which an action of these episodes is cut."""
_SECONDS = 20.0
"""Seconds after which these episodes are cut."""
_UNKNOWN_PROMPT = 512
"""Tokens of a first prompt, if no episode had a turn."""
_ROWS = (8, 64)
"""Sequences that sample together while a decoding step is measured."""
_DECODED = 4
"""Decoding steps that are measured."""
_MOST_TOKENS, _LEAST_TOKENS = 1024, 64
"""Tokens of the larger of the two gradients that are measured."""
_PASS = 20
"""Activations of a token and a layer, as a multiple of the hidden size: about that of SmolLM2."""
_FIRST_CAPACITY = 256
"""Tokens for which the measurement needs a cache."""
_MARGIN = 1.1
"""Factor of the longest of a few episodes, for the longest of all."""
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of an episode."""

    first: float
    """Tokens of the first prompt that no other task has."""
    shared: float
    """Tokens that the prompts of all tasks begin with."""
    observed: float
    """Tokens of all later prompts, without what they repeat."""
    sampled: float
    longest: int
    """Tokens of the longest sequence."""
    steps: float
    """Tokens of the actions of the longest episode."""

    def computed(self, groups: float, episodes: float) -> float:
        """Returns the tokens that an engine or a learner computes for groups of episodes."""
        later = episodes * (self.observed + self.sampled)
        return self.shared + groups * self.first + later


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Seconds of what a run repeats."""

    prompt_token: float
    decoding_step: float
    """Of a step without any sequence."""
    decoded_token: float
    """What each sequence adds to a step."""
    trained_token: float = 0.0
    """A forward and a backward pass."""
    scored_token: float = 0.0
    """A forward pass of the learner."""

    def rollout(self, lengths: Lengths, groups: int, episodes: int, slots: int) -> float:
        """Estimates the seconds in which an engine plays groups of episodes."""
        prompts = lengths.computed(groups, episodes) - episodes * lengths.sampled
        steps = math.ceil(episodes / slots) * lengths.steps
        decoded = episodes * lengths.sampled * self.decoded_token
        return prompts * self.prompt_token + steps * self.decoding_step + decoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What takes memory, in bytes if nothing else is written."""

    parameters: int
    """The number of weights."""
    trained: int
    """The number of those that train."""
    adapter_width: int
    """Weights of an adapter of rank 1 on every linear layer."""
    weight: int
    """Of one weight."""
    layers: int
    """The number of layers."""
    hidden: int
    """Of the input of one layer, of one token."""
    cached_token: int
    """Of the keys and values of one token."""
    pass_fixed: float = 0.0
    """Of a pass of any size, such as the logits of a part of its tokens."""
    pass_token: float = 0.0
    """Of the activations of one token, without activation checkpointing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The largest pieces of what a run computes."""

    tokens: int
    """Of the minibatch of an update, or the batch of an imitation step."""
    longest: int
    """Tokens of one sequence."""
    slots: int
    """Sequences of the cache."""


def memory(sizes: Sizes, config: Config, work: Work) -> dict[str, float]:
    """Returns the bytes of each part of a run, in the order in which a person thinks of them."""
    settings = config.learner
    weight = {"bfloat16": 2, "float16": 2, "float32": 4}.get(config.model_dtype, sizes.weight)
    trained = _trained(sizes, config)
    half = weight == 2 and trained == sizes.parameters  # adapters are in float32
    moments = 2 if "8bit" in settings.optimizer else 8
    whole = sizes.parameters * weight
    reference = config.loss.needs_reference and not settings.lora_rank
    copies = reference + 2 * bool(config.supply.max_staleness)
    scale = weight / sizes.weight
    activations = sizes.pass_token * scale
    if settings.checkpointing:  # the input of each layer, and one layer at a time
        activations = sizes.hidden * scale * (sizes.layers + 2) + activations / sizes.layers
    row = max(min(settings.microbatch_tokens, work.tokens), min(work.longest, work.tokens))
    parts = {
        "weights": float(whole),
        "copies": float(copies * whole),
        "gradients": 4.0 * trained,
        "optimiser": float((moments + 4 * half) * trained),
        "cache": float(work.slots * work.longest * sizes.cached_token * scale),
        "largest pass": sizes.pass_fixed + row * activations,
    }
    return {name: size for name, size in parts.items() if size}


def remedies(sizes: Sizes, config: Config, work: Work, free: float) -> str:
    """Returns the flags with which a run fits into the free bytes, or with which it comes near."""
    learner, least, slots = config.learner, max(work.longest, 1024), min(16, work.slots)
    changes: dict[str, tuple[dict[str, Any], int]] = {}
    """The settings and the slots of each flag."""
    if sizes.trained == sizes.parameters and not learner.lora_rank:
        changes["--lora-rank 16"] = {"learner": {"lora_rank": 16}}, work.slots
    if not learner.checkpointing:
        changes["--checkpointing"] = {"learner": {"checkpointing": True}}, work.slots
    if min(learner.microbatch_tokens, work.tokens) > least:
        flag = f"--microbatch-tokens {least}"
        changes[flag] = {"learner": {"microbatch_tokens": least}}, work.slots
    if slots < work.slots:
        changes[f"--concurrency {slots}"] = {}, slots
    if sizes.weight == 4:
        changes["--model-dtype bfloat16"] = {"model_dtype": "bfloat16"}, work.slots

    def more(flags: Sequence[str]) -> float:
        changed, least_slots = config, work.slots
        for flag in flags:
            tree, flag_slots = changes[flag]
            changed, least_slots = override(changed, tree), min(least_slots, flag_slots)
        return _more(sizes, memory(sizes, changed, replace(work, slots=least_slots)))

    flags = list(changes)
    if alone := [flag for flag in flags if more([flag]) <= free]:
        shown = [f"{flag} ({_gb(more([flag]))} more)" for flag in alone]
        return f"It fits with {', or '.join(shown)}."
    for count in range(2, len(flags) + 1):
        if more(flags[:count]) <= free:
            return f"It fits with {' '.join(flags[:count])} ({_gb(more(flags[:count]))} more)."
    return f"With {' '.join(flags)}, it would still take {_gb(more(flags))} more."


def check(agent: GSPOAgent, demonstrations: Sequence[Episode]) -> list[Finding]:
    """Prints what a run needs and how long it takes; returns a finding if that is long.

    The global generators are as before.

    Args:
        agent: The agent before its training.
        demonstrations: What it imitates first.

    Raises:
        TrainingError: It does not fit into memory.
    """
    states = generator_states()
    try:
        with _adapted(agent.model, agent.config) as model:
            return _check(agent, model, demonstrations)
    finally:
        gc.collect()  # the gradients
        set_generator_states(states)


def _check(agent: GSPOAgent, model: Any, demonstrations: Sequence[Episode]) -> list[Finding]:
    began, config, free = time.perf_counter(), agent.config, free_memory(agent.model)
    sizes, progress = _sizes(agent.model), Progress()
    groups, recipe, minibatches = config.tasks_per_step, config.recipe, config.learner.minibatches
    episodes, evaluated = groups * config.rollout.group_size, 2 * config.eval_tasks
    slots = config.rollout.concurrency
    if not isinstance(config.engine, Transformers) or config.rollout.ray_workers:
        _refuse(sizes, config, Work(tokens=0, longest=0, slots=0), free)
        return []
    few = override(config, {"rollout": {"concurrency": min(slots, _ROWS[-1])}})
    measured = Work(tokens=0, longest=_FIRST_CAPACITY, slots=few.rollout.concurrency)
    _refuse(sizes, config, measured, free)  # before as much is allocated
    engine, loop = start_engine(model, few), EngineLoop()
    try:
        lengths = _lengths(agent, engine, loop, demonstrations)
        rates = loop.run(_measure_engine(engine, lengths, slots, usable_ids(model)))
    finally:
        engine.close()
    least = _PASS * sizes.layers * sizes.hidden
    most = min(_MOST_TOKENS, 1.0 / rates.prompt_token, free / 4 / least)
    rates, sizes = _measure_learner(
        model, config, lengths, rates, sizes, max(_LEAST_TOKENS, int(most))
    )
    batch = recipe.imitation_batch if demonstrations else 0
    imitated = lengths.computed(batch, batch) if batch else 0.0
    imitation = recipe.imitation_steps * imitated * rates.trained_token if batch else 0.0
    computed = lengths.computed(groups, episodes)
    work = Work(
        tokens=int(max(computed / minibatches, imitated)), longest=lengths.longest, slots=slots
    )
    parts = _refuse(sizes, config, work, free)
    scored = (minibatches - 1) / minibatches + config.loss.needs_reference
    update = computed * (rates.trained_token + scored * rates.scored_token)
    rollout = rates.rollout(lengths, groups, episodes, slots)
    evaluation = rates.rollout(lengths, config.eval_tasks, evaluated, slots)
    count = 1 + (math.ceil(config.steps / config.eval_every) if config.eval_every else 1)
    total = imitation + config.steps * (rollout + update) + count * evaluation
    dtype = str(next(agent.model.parameters()).dtype).removeprefix("torch.")
    size = lengths.computed(1, 1)
    rows = {
        "preflight": f"measured in {time.perf_counter() - began:.0f} s with "
        f"{_plural(torch.get_num_threads(), 'thread')}",
        "weights": f"{sizes.parameters / 1e6:,.1f} million in {dtype}, "
        f"{_trained(sizes, config) / 1e6:,.1f} million train",
        "memory": _describe(sizes, parts, free),
        "evaluation": f"{evaluated} episodes of about {size:,.0f} tokens, of which "
        f"{lengths.sampled:,.0f} are sampled: {_clock(evaluation)}",
        "step": f"{episodes} episodes: {_clock(rollout)} to play, {_clock(update)} to learn",
        "run": f"{_clock(total)} for {_plural(count, 'evaluation')}, "
        f"{_plural(config.steps, 'step')}"
        + (f" and {_clock(imitation)} of imitation" if imitation else ""),
    }
    progress.line("\n".join(f"{name:<13}{value}" for name, value in rows.items()))
    if total <= _HOUR:
        return []
    text = (
        f"The run takes about {_clock(total)}; its evaluations take {_clock(count * evaluation)}."
    )
    advice = "Lower --eval-tasks, --steps or --tasks-per-step, or raise --eval-every."
    return [Finding(name="long", text=text, advice=advice)]


def _refuse(sizes: Sizes, config: Config, work: Work, free: float) -> dict[str, float]:
    """Returns the memory of a run; raises if it is more than what is free."""
    parts = memory(sizes, config, work)
    if _more(sizes, parts) > free:
        raise TrainingError(
            f"the run does not fit into memory: {_describe(sizes, parts, free)}. "
            f"{remedies(sizes, config, work, free)}"
        )
    return parts


def _more(sizes: Sizes, parts: Mapping[str, float]) -> float:
    """Returns the bytes that a run takes in addition to the weights that are loaded."""
    return sum(parts.values()) - sizes.parameters * sizes.weight


def _describe(sizes: Sizes, parts: Mapping[str, float], free: float) -> str:
    shown = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
    return f"{shown}: {_gb(_more(sizes, parts))} more, of {_gb(free)} that are free"


def _trained(sizes: Sizes, config: Config) -> int:
    whole = sizes.trained == sizes.parameters  # else the adapter is there already
    return whole * config.learner.lora_rank * sizes.adapter_width or sizes.trained


def _sizes(model: Any) -> Sizes:
    shape, head = model.config.get_text_config(), model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    weight, heads = next(model.parameters()).element_size(), shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    heads = getattr(shape, "num_key_value_heads", None) or heads
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        adapter_width=sum(layer.in_features + layer.out_features for layer in linear),
        weight=weight,
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size * weight,
        cached_token=2 * shape.num_hidden_layers * heads * size * weight,
    )


def free_memory(model: Any) -> float:
    """Returns the bytes that are free on the device of a model, within the limit of a container."""
    if next(model.parameters()).is_cuda:
        return float(torch.cuda.mem_get_info()[0])
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(counts["inactive_file"])
    except (OSError, ValueError, KeyError):  # no group, or one without a limit
        return float(free)
    return float(min(free, max(0, limit - used)))


@contextmanager
def _adapted(model: Any, config: Config) -> Iterator[Any]:
    """Yields the model as it trains, with the adapter that training adds; removes it afterwards."""
    settings = config.learner
    if not settings.lora_rank or is_adapted(model):
        yield model
        return
    trains = [(weight, weight.requires_grad) for weight in model.parameters()]
    alpha, targets = settings.lora_alpha, settings.lora_targets
    adapted = add_adapter(model, settings.lora_rank, config.seed, alpha=alpha, targets=targets)
    try:
        yield adapted
    finally:
        adapted.unload()
        vars(model).pop("peft_config", None)  # else PEFT warns of a second adapter
        for weight, flag in trains:
            weight.requires_grad_(flag)


def _lengths(
    agent: GSPOAgent, engine: Engine, loop: EngineLoop, demonstrations: Sequence[Episode]
) -> Lengths:
    """Reads the demonstrations, or plays a few episodes with short actions."""
    config, limits = agent.config, agent.config.rollout
    if shown := imitation_samples(demonstrations[:_EPISODES], agent.chat, limits.max_context):
        return _read(shown)
    short = replace(
        limits,
        max_turn_tokens=min(_TURN_TOKENS, limits.max_turn_tokens),
        episode_timeout=min(_SECONDS, limits.episode_timeout),
    )
    envs = list(agent.environments.envs)
    tasks = [
        Task(env_id=envs[n % len(envs)], seed=derive_seed("preflight", n) % HELD_OUT)
        for n in range(_EPISODES)
    ]
    size = usable_ids(agent.model)
    with (
        agent.environments.pool() as pool,
        open_collector(
            replace(config, rollout=short), lambda: engine, agent.chat, pool, size
        ) as collector,
    ):
        groups = loop.run(collector.collect(tasks, seed=config.seed, group_size=1))
    played = [e for group in groups for e in group.episodes if e.turns]
    if not played:  # too slow: an action as long as it may be
        most = limits.max_turn_tokens
        prompt = min(_UNKNOWN_PROMPT, limits.max_context - most)
        return Lengths(
            first=prompt, shared=0, observed=0, sampled=most, longest=prompt + most, steps=most
        )
    lengths = _read(to_samples(played, [np.zeros(len(e.turns)) for e in played]))
    # how long an action is that was cut, if each of its tokens may be the last
    cut = sum(e.stop_reason is StopReason.MAX_TURN_TOKENS for e in played)
    actions, tokens = sum(len(e.turns) for e in played), sum(e.model_tokens for e in played)
    ends = (actions - cut + 0.5) / max(1, tokens)
    rest = limits.max_turn_tokens - short.max_turn_tokens
    missing = (1 - (1 - min(1.0, ends)) ** rest) / ends if cut else 0.0
    return replace(
        lengths,
        sampled=lengths.sampled + missing * cut / max(1, len(played)),
        longest=lengths.longest + rest * bool(cut),
        steps=lengths.steps + rest * bool(cut),
    )


def _read(samples: Sequence[Sample]) -> Lengths:
    """Returns the mean lengths of samples, and the greatest."""
    first = {sample.episode: sample for sample in reversed(samples)}
    prompts = [s.token_ids[: int(s.mask.argmax())].tolist() for s in first.values()]
    count = len(prompts)
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
    shared = len(list(same)) if count > 1 else 0
    prompt = sum(map(len, prompts)) / count
    sampled = sum(int(sample.mask.sum()) for sample in samples) / count
    total = sum(len(sample.token_ids) for sample in samples) / count
    return Lengths(
        first=prompt - shared,
        shared=shared,
        observed=total - prompt - sampled,
        sampled=sampled,
        longest=int(_MARGIN * max(len(sample.token_ids) for sample in samples)),
        steps=max(int(sample.mask.sum()) for sample in samples),
    )


async def _measure_engine(engine: Engine, lengths: Lengths, slots: int, vocabulary: int) -> Rates:
    """Measures prompts of random ids, and steps of a few and of many sequences."""
    draw, size = np.random.default_rng(0), int(max(8, lengths.shared + lengths.first))

    async def seconds(prompts: Sequence[Sequence[int]], tokens: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(
            *(
                # so hot that sequences with the same prompt part at once
                engine.generate(ids, Sampling(max_tokens=tokens, temperature=1e3, seed=n))
                for n, ids in enumerate(prompts)
            )
        )
        return time.perf_counter() - began

    def prompts(count: int) -> list[list[int]]:
        return [draw.integers(0, vocabulary, size).tolist() for _ in range(count)]

    few, many = (min(rows, slots) for rows in _ROWS)
    await seconds(prompts(1), 2)
    prompt = await seconds(prompts(2), 1) / (2 * size)
    steps = []
    for rows in (few, many):
        (ids,) = prompts(1)
        await seconds([ids], 1)  # all others copy this prompt
        before = await seconds([ids] * rows, 1)
        steps.append((await seconds([ids] * rows, 1 + _DECODED) - before) / _DECODED)
    token = max(0.0, (steps[1] - steps[0]) / max(1, many - few))
    return Rates(
        prompt_token=prompt,
        decoding_step=max(0.0, steps[0] - few * token),
        decoded_token=token,
    )


def _measure_learner(
    model: Any, config: Config, lengths: Lengths, rates: Rates, sizes: Sizes, most: int
) -> tuple[Rates, Sizes]:
    """Measures passes of `most` and of fewer tokens, without an optimiser step."""
    alone = replace(config.learner, minibatches=1, microbatch_tokens=2**30)
    learner = Learner(model, **learner_arguments(replace(config, learner=alone)))
    peaks, seconds = [], 0.0
    for tokens in (most // 4, most // 4, most):  # the first allocates the gradients
        samples = _random_samples(tokens, lengths, usable_ids(model))
        minibatch = learner.score(learner.prepare(samples))[0]
        with _peak(learner.device) as peak:
            began = time.perf_counter()
            learner.backward(minibatch)
            seconds = time.perf_counter() - began
        peaks.append(peak[0])
    began = time.perf_counter()
    learner.logprobs(minibatch.microbatches[0].row)
    scored = time.perf_counter() - began
    learner.optimizer.zero_grad()
    if config.learner.checkpointing:
        model.gradient_checkpointing_disable()
    token = max(0.0, (peaks[2] - peaks[1]) / (most - most // 4))
    if config.learner.checkpointing:  # what `memory` expects is the activations without it
        token = max(0.0, token - sizes.hidden * (sizes.layers + 2)) * sizes.layers
    return (
        replace(rates, trained_token=seconds / most, scored_token=scored / most),
        replace(sizes, pass_token=token, pass_fixed=max(0.0, peaks[1] - token * (most // 4))),
    )


def _random_samples(tokens: int, lengths: Lengths, vocabulary: int) -> list[Sample]:
    """Returns samples of the mean length, or a shorter one, that share no prefix."""
    draw, whole = np.random.default_rng(0), lengths.computed(1, 1)
    size = max(2, min(tokens, int(whole)))
    sampled = min(size - 1, max(1, round(size * lengths.sampled / whole)))
    return [
        Sample(
            token_ids=draw.integers(0, vocabulary, size),
            turn_ids=np.repeat([-1, 0], [size - sampled, sampled]),
            advantages=np.ones(sampled),
            engine_logprobs=np.full(sampled, -1.0),
            episode=number,
        )
        for number in range(max(1, tokens // size))
    ]


@contextmanager
def _peak(device: torch.device) -> Iterator[list[float]]:
    """Yields a list that gets the most bytes that were in use inside, beyond those before."""
    peak = [0.0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak[0] = float(torch.cuda.max_memory_allocated(device) - before)
        return
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not (status.exists() and reset.exists()):
        yield peak
        return
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    reset.write_text("5")  # the highest use so far becomes the present one
    before = _high_water(status)
    yield peak
    peak[0] = float(_high_water(status) - before)


def _high_water(status: Path) -> int:
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return 1024 * int(lines["VmHWM"].split()[0])


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"


def _clock(seconds: float) -> str:
    """Writes a time as people say it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} hours"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
