"""Preflight: whether a run of a model that is not tiny fits into memory, and how long it takes.

A few seconds of sampling and two gradients are measured; nothing is trained. The rest is arithmetic
on the tokens of an episode: those of the demonstrations, or of a few episodes that are played.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import nn

from gspo_agents.player import EngineLoop
from gspo_agents.setup import decide_mode, open_collector, start_engine
from gspo_env.batch.sample import Sample, to_samples
from gspo_env.chat.conversation import Transcript
from gspo_env.config import Config, learner_arguments, override
from gspo_env.engines import Engine, Sampling, Transformers
from gspo_env.engines.embedded.direct import packs
from gspo_env.errors import TrainingError
from gspo_env.health.findings import Finding
from gspo_env.learner.learner import Learner
from gspo_env.model.adapters import is_adapted
from gspo_env.model.attention import value_places
from gspo_env.model.head import usable_ids
from gspo_env.model.load import add_adapter
from gspo_env.model.threads import tokens_of_pass
from gspo_env.recipes.build import imitation_samples
from gspo_env.tracking.console import Progress
from gspo_env.training.curriculum import next_options
from gspo_env.training.resume import generator_states, set_generator_states
from gspo_env.training.split import draw_tasks
from gspo_env.types import Episode, StopReason

if TYPE_CHECKING:
    from gspo_agents.gspo import GSPOAgent

_EPISODES = 8
"""Episodes that are played, or demonstrations that are read."""
_TURN_TOKENS = 64
"""Tokens after which an action of these episodes is cut."""
_SECONDS = 20.0
"""Seconds after which these episodes are cut."""
_UNKNOWN_PROMPT = 512
"""Tokens of a first prompt, if no environment gave one."""
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
_PROGRAM = 0.3e9
"""Bytes of libraries that are loaded later, and of episodes."""
_FILE = 2**32
"""Bytes of the largest file of a checkpoint."""
_MARGIN = 1.1
"""Factor of the longest of a few episodes, for the longest of all."""
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where a control group of version 2, and one of version 1, has its limit, what it uses, and what
of this can be dropped."""
_DISTINCT = 0.3
"""Share of a group's episodes that differ from the first where the policy has imitated: the time of
a run of SmolLM2 follows from it. The memory has to suffice if all differ."""
_HOUR = 3600.0
_BUSY = 1.3
"""Factor from which it is said that other programs use the processors."""


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
        return self.shared + groups * self.first + episodes * (self.observed + self.sampled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Seconds of what a run repeats."""

    prompt_token: float
    decoding_step: float
    """Of a step without any sequence."""
    decoded_token: float
    """What each sequence adds to a step."""

    def rollout(self, lengths: Lengths, groups: int, episodes: float, slots: int) -> float:
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
    on_cpu: bool = False
    packed: bool = False
    """Whether the engine has its own copy of the weights."""
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
    is_half = sizes.on_cpu and weight == 2  # keys are in float32
    adapted = settings.lora_rank or sizes.trained != sizes.parameters
    packed = (is_half or sizes.packed) and not adapted  # the weights in the order of kernels
    copies = reference + 2 * bool(config.supply.max_staleness) + packed
    scale = weight / sizes.weight
    places = float(work.longest)
    if is_half:  # the keys alone take as much as keys and values
        places += value_places(work.longest) / 2
    activations = sizes.pass_token * scale
    if settings.checkpointing:  # the input of each layer, and one layer at a time
        activations = sizes.hidden * scale * (sizes.layers + 2) + activations / sizes.layers
    row = max(min(settings.microbatch_tokens, work.tokens), min(work.longest, work.tokens))
    gradients = 4.0 * trained
    parts = {
        "weights": float(whole),
        "copies": float(copies * whole),
        "gradients": gradients,
        "optimiser": float((moments + 4 * half) * trained),
        "cache": work.slots * places * sizes.cached_token * scale,
        "program": _PROGRAM * sizes.on_cpu,
    }
    freed = gradients if work.tokens <= row else 0.0
    """Activations in whose place gradients come: in the only row of a minibatch."""
    largest = sizes.pass_fixed + max(0.0, row * activations - freed)
    checkpoint = min((moments + 4.0) * trained, _FILE) * sizes.on_cpu - gradients
    """Copies of what goes into one file, at a time without gradients."""
    parts |= {"largest pass": largest} if largest >= checkpoint else {"checkpoint": checkpoint}
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a run needs."""

    sizes: Sizes
    lengths: Lengths
    parts: Mapping[str, float]
    """The bytes of each part; see `memory`."""
    free: float
    """Bytes that are free."""
    imitation: float
    """Seconds of all imitation."""
    rollout: float
    """Seconds in which the episodes of a step are played."""
    update: float
    """Seconds in which a step learns from them."""
    evaluation: float
    """Seconds of one evaluation."""
    steps: int
    evaluations: int
    slowdown: float
    """How many times as long it takes while other programs use the processors as they do now."""

    @property
    def more(self) -> float:
        """Bytes in addition to the weights that are loaded."""
        return _more(self.sizes, self.parts)

    @property
    def seconds(self) -> float:
        """Seconds of the run."""
        steps = self.steps * (self.rollout + self.update)
        return self.imitation + steps + self.evaluations * self.evaluation


def check(agent: GSPOAgent, demonstrations: Sequence[Episode]) -> list[Finding]:
    """Prints what a run needs and how long it takes; returns a finding if that is long.

    Args:
        agent: The agent before its training.
        demonstrations: What it imitates first.

    Raises:
        TrainingError: It does not fit into memory.
    """
    began, config, progress = time.perf_counter(), agent.config, Progress()
    run = estimate(agent, demonstrations)
    if run is None:
        return []
    dtype = str(next(agent.model.parameters()).dtype).removeprefix("torch.")
    count, size = run.evaluations, run.lengths.computed(1, 1)
    threads = _plural(torch.get_num_threads(), "thread")
    slow = f"; other programs make all {run.slowdown:.1f} times as long now"
    rows = {
        "preflight": f"measured in {time.perf_counter() - began:.0f} s with {threads}"
        + slow * (run.slowdown > _BUSY),
        "weights": f"{run.sizes.parameters / 1e6:,.1f} million in {dtype}, "
        f"{_trained(run.sizes, config) / 1e6:,.1f} million train",
        "memory": _describe(run.sizes, run.parts, run.free),
        "evaluation": f"{2 * config.eval_tasks} episodes of about {size:,.0f} tokens, of which "
        f"{run.lengths.sampled:,.0f} are sampled: {_clock(run.evaluation)}",
        "step": f"{config.tasks_per_step * config.rollout.group_size} episodes: "
        f"{_clock(run.rollout)} to play, {_clock(run.update)} to learn",
        "run": f"{_clock(run.seconds)} for {_plural(count, 'evaluation')}, "
        f"{_plural(config.steps, 'step')}"
        + (f" and {_clock(run.imitation)} of imitation" if run.imitation else ""),
    }
    progress.line("\n".join(f"{name:<13}{value}" for name, value in rows.items()))
    if run.seconds <= _HOUR:
        return []
    evaluations = _clock(count * run.evaluation)
    text = f"The run takes about {_clock(run.seconds)}; its evaluations take {evaluations}."
    advice = "Lower --eval-tasks, --steps or --tasks-per-step, or raise --eval-every."
    return [Finding(name="long", text=text, advice=advice)]


def estimate(agent: GSPOAgent, demonstrations: Sequence[Episode]) -> Estimate | None:
    """Measures what a run needs; None if another process samples, and nothing can be measured.

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
            return _estimate(agent, model, demonstrations)
    finally:
        gc.collect()  # the gradients
        set_generator_states(states)


def _estimate(agent: GSPOAgent, model: Any, demonstrations: Sequence[Episode]) -> Estimate | None:
    free, sizes = free_memory(agent.model), _sizes(agent.model)
    device = next(model.parameters()).device
    tokens = agent.config.learner.microbatch_tokens or tokens_of_pass(model, device)
    config = override(agent.config, {"learner": {"microbatch_tokens": tokens}})
    groups, recipe, settings = config.tasks_per_step, config.recipe, config.learner
    episodes, slots = groups * config.rollout.group_size, config.rollout.concurrency
    if not isinstance(config.engine, Transformers) or config.rollout.ray_workers:
        parts = _refuse(sizes, config, Work(tokens=0, longest=0, slots=0), free)
        needs = f"{_describe(sizes, parts, free)}; activations and the engine are not in it"
        Progress().line(f"{'memory':<13}{needs}")
        return None
    few = override(config, {"rollout": {"concurrency": min(slots, _ROWS[-1])}})
    small = Work(tokens=0, longest=_FIRST_CAPACITY, slots=few.rollout.concurrency)
    _refuse(sizes, config, small, free)  # before as much is allocated
    engine, loop, clock = start_engine(model, few), EngineLoop(), _Clock(model)
    try:
        lengths = _lengths(agent, engine, loop, demonstrations)
        rates = loop.run(_measure_engine(engine, lengths, slots, usable_ids(model), clock))
    finally:
        engine.close()
    least = _PASS * sizes.layers * sizes.hidden
    most = max(_LEAST_TOKENS, int(min(_MOST_TOKENS, 1.0 / rates.prompt_token, free / 4 / least)))
    batch = recipe.imitation_batch if demonstrations else 0
    steps, imitated = recipe.imitation_steps if batch else 0, lengths.computed(batch, batch)
    minibatches = min(settings.minibatches, episodes)
    # a minibatch has whole groups where it can, and the beginning of all prompts in any case
    part = lengths.computed(math.ceil(groups / minibatches), episodes / minibatches)
    rollouts = config.steps or int(not steps)  # a run that learns nothing: as if it had a step
    played = steps * batch + rollouts * episodes
    learned = steps * imitated + rollouts * minibatches * part
    share = played * lengths.sampled / learned
    samples = partial(_random_samples, lengths, share, usable_ids(model))

    distinct = groups + (episodes - groups) * (_DISTINCT if batch else 1.0)
    computed = lengths.computed(math.ceil(groups / minibatches), distinct / minibatches)

    def training(tokens: float) -> float:
        passes = math.ceil(tokens / settings.microbatch_tokens)
        return passes * trained_pass + tokens * trained_token

    alone = {"minibatches": 1, "microbatch_tokens": 2**30}
    learner = Learner(model, **learner_arguments(override(config, {"learner": alone})))
    measured, scored_token = _measure_learner(learner, samples, most, clock)
    trained_pass, trained_token = _line(measured, 1)
    fixed, token = _line(measured, 2)
    if settings.checkpointing:
        model.gradient_checkpointing_disable()
        # what `memory` expects is the activations without it
        token = max(0.0, token - sizes.hidden * (sizes.layers + 2)) * sizes.layers
    sizes = replace(sizes, pass_fixed=fixed, pass_token=token)
    work = Work(tokens=int(max(part, imitated)), longest=lengths.longest, slots=slots)
    scored = (minibatches - 1) / minibatches + config.loss.needs_reference
    return Estimate(
        sizes=sizes,
        lengths=lengths,
        parts=_refuse(sizes, config, work, free),
        free=free,
        imitation=steps * training(imitated),
        rollout=rates.rollout(lengths, groups, distinct, slots),
        update=minibatches * (training(computed) + scored * computed * scored_token),
        evaluation=rates.rollout(lengths, config.eval_tasks, 2 * config.eval_tasks, slots),
        steps=config.steps,
        evaluations=1 + (math.ceil(config.steps / config.eval_every) if config.eval_every else 1),
        slowdown=clock.slowdown,
    )


class _Clock:
    """Seconds that the processors spend on this process: those of a machine without other work.

    On a GPU, they are the seconds of the clock.
    """

    def __init__(self, model: Any) -> None:
        self._threads = torch.get_num_threads()
        self.is_cpu = next(model.parameters()).device.type == "cpu"
        self._began = time.perf_counter(), time.process_time()

    def now(self) -> float:
        if self.is_cpu:
            return time.process_time() / self._threads
        torch.cuda.synchronize()  # a GPU may still compute what it was told
        return time.perf_counter()

    @property
    def slowdown(self) -> float:
        """How many times as long the clock took since the beginning."""
        wall, processor = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        return wall * self._threads / processor if self.is_cpu else 1.0


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
        on_cpu=not next(model.parameters()).is_cuda,
        packed=packs(model),
    )


def free_memory(model: Any) -> float:
    """Returns the bytes that are free on the device of a model, within the limits of a process."""
    if next(model.parameters()).is_cuda:
        return float(torch.cuda.mem_get_info()[0])
    limit, membership = resource.getrlimit(resource.RLIMIT_AS)[0], Path("/proc/self/cgroup")
    addresses = math.inf
    if limit != resource.RLIM_INFINITY:
        addresses = limit - psutil.Process().memory_info().vms
    groups = math.inf
    if membership.exists():
        groups = group_memory(Path("/sys/fs/cgroup"), membership.read_text())
    return float(max(0.0, min(psutil.virtual_memory().available, addresses, groups)))


def group_memory(mount: Path, membership: str) -> float:
    """Returns the bytes that the control groups of a process leave it, of version 1 and 2.

    Args:
        mount: Where the groups are mounted; in a container, its own group may be the outermost.
        membership: What `/proc/self/cgroup` says.
    """
    least = math.inf
    for line in membership.splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mount / "memory" if controllers else mount
        files = _GROUP_FILES[bool(controllers)]
        group = root / name.lstrip("/")
        for place in (group, *group.parents[: len(group.parts) - len(root.parts)]):
            try:
                limit, used = (int((place / file).read_text()) for file in files[:2])
                counts = (place / "memory.stat").read_text().splitlines()
                cached = dict(count.split() for count in counts)[files[2]]
            except (OSError, ValueError, KeyError):  # no such group, or one without a limit
                continue
            least = min(least, limit - used + int(cached))
    return least


@contextmanager
def _adapted(model: Any, config: Config) -> Iterator[Any]:
    """Yields the model as it trains, with the adapter that training adds; removes it afterwards."""
    settings = config.learner
    if not settings.lora_rank or is_adapted(model):
        yield model
        return
    trains = [(weight, weight.requires_grad) for weight in model.parameters()]
    decide_mode(model, config)  # noted for good, and logged once: the adapter will be removed
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
    turn, seconds = min(_TURN_TOKENS, limits.max_turn_tokens), min(_SECONDS, limits.episode_timeout)
    short = override(config, {"rollout": {"max_turn_tokens": turn, "episode_timeout": seconds}})
    options, held_out = next_options(config.curriculum, []), agent.split().held_out
    tasks = draw_tasks(
        agent.environments.weights, seed=config.seed, step=-1, count=_EPISODES, options=options
    )
    size = usable_ids(agent.model)
    with (
        agent.environments.pool() as pool,
        open_collector(short, lambda: engine, agent.chat, pool, size) as collector,
    ):
        playing = collector.collect(tasks, seed=config.seed, group_size=1, held_out=held_out)
        groups = loop.run(playing)
    ended = [e for group in groups for e in group.episodes]
    played, most = [e for e in ended if e.turns], limits.max_turn_tokens
    if not played:  # too slow: an action as long as it may be
        prompts = [
            Transcript(agent.chat, e.prompt).read(e.final_observation, request=e.reset).prompt_ids
            for e in ended
            if not e.failed
        ] or [(0,) * min(_UNKNOWN_PROMPT, limits.max_context - most)]
        return _read([_sample((*ids, *[0] * most), most, n) for n, ids in enumerate(prompts)])
    lengths = _read(to_samples(played, [np.zeros(len(e.turns)) for e in played]))
    # how long an action is that was cut, if each of its tokens may be the last
    cut = sum(e.stop_reason is StopReason.MAX_TURN_TOKENS for e in played)
    actions, tokens = sum(len(e.turns) for e in played), sum(e.model_tokens for e in played)
    ends = (actions - cut + 0.5) / max(1, tokens)
    rest = most - turn
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


async def _measure_engine(
    engine: Engine, lengths: Lengths, slots: int, vocabulary: int, clock: _Clock
) -> Rates:
    """Measures prompts of random ids, and steps of a few and of many sequences."""
    draw, size = np.random.default_rng(0), int(max(8, lengths.shared + lengths.first))

    async def seconds(prompts: Sequence[Sequence[int]], tokens: int) -> float:
        began = clock.now()
        await asyncio.gather(
            *(
                # so hot that sequences with the same prompt part at once
                engine.generate(ids, Sampling(max_tokens=tokens, temperature=1e3, seed=n))
                for n, ids in enumerate(prompts)
            )
        )
        return clock.now() - began

    def prompts(count: int) -> list[list[int]]:
        return [draw.integers(0, vocabulary, size).tolist() for _ in range(count)]

    few, many = (min(rows, slots) for rows in _ROWS)
    await seconds(prompts(1), 2)
    prompt = await seconds(prompts(2), 1) / (2 * size)
    steps = []
    for rows in (few, many):
        (ids,) = prompts(1)
        await seconds([ids], 1)  # all others copy this prompt
        if not clock.is_cpu:  # steps of a new shape take longer there
            await seconds([ids] * rows, 1 + _DECODED)
        before = await seconds([ids] * rows, 1)
        steps.append((await seconds([ids] * rows, 1 + _DECODED) - before) / _DECODED)
    token = max(0.0, (steps[1] - steps[0]) / max(1, many - few))
    return Rates(
        prompt_token=prompt, decoding_step=max(0.0, steps[0] - few * token), decoded_token=token
    )


def _measure_learner(
    learner: Learner, samples: Callable[[int], list[Sample]], most: int, clock: _Clock
) -> tuple[list[tuple[float, ...]], float]:
    """Measures gradients of a fourth of `most` tokens and of all, without an optimiser step.

    Returns:
        Tokens, seconds and bytes of each, and the seconds of a token without gradient.
    """
    measured = []
    minibatches = [learner.score(learner.prepare(samples(n)))[0] for n in (most // 4, most)]
    learner.backward(minibatches[0])  # allocates the gradients
    for minibatch in minibatches:
        with _peak(learner.device) as peak:
            learner.backward(minibatch)
        began = clock.now()
        learner.backward(minibatch)  # in memory that the process has now, as in a run
        computed = sum(len(part.row.input_ids_T) for part in minibatch.microbatches)
        measured.append((computed, clock.now() - began, *peak))
    row, began = minibatch.microbatches[0].row, clock.now()
    learner.logprobs(row)
    scored = (clock.now() - began) / len(row.input_ids_T)
    learner.optimizer.zero_grad()
    return measured, scored


def _line(points: Sequence[tuple[float, ...]], place: int) -> tuple[float, float]:
    """Returns where a line through two points begins, and its slope, if it rises."""
    few, many = points
    slope = max(0.0, (many[place] - few[place]) / max(1.0, many[0] - few[0]))
    return max(0.0, few[place] - slope * few[0]), slope


def _random_samples(lengths: Lengths, share: float, vocabulary: int, tokens: int) -> list[Sample]:
    """Returns samples with one prompt that compute about `tokens` tokens.

    Args:
        lengths: The samples have these, or shorter ones.
        share: Of the tokens, how many are sampled.
        vocabulary: The number of ids.
        tokens: The number of tokens.
    """
    draw = np.random.default_rng(0)
    turn = max(1.0, lengths.sampled)
    count = max(1, round(tokens * share / turn))
    sampled = max(1, round(tokens * share / count))
    observed = round(sampled * lengths.observed / turn)
    first = max(1, tokens - count * (sampled + observed))
    prompt = draw.integers(0, vocabulary, first)
    later = draw.integers(0, vocabulary, (count, observed + sampled))
    return [_sample((*prompt, *ids), sampled, number) for number, ids in enumerate(later)]


def _sample(ids: Sequence[int], sampled: int, episode: int) -> Sample:
    """Returns a sample whose last ids are sampled."""
    return Sample(
        token_ids=np.array(ids),
        turn_ids=np.repeat([-1, 0], [len(ids) - sampled, sampled]),
        advantages=np.ones(sampled),
        engine_logprobs=np.full(sampled, -1.0),
        episode=episode,
    )


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
    trim()
    reset.write_text("5")  # the highest use so far becomes the present one
    before = high_water(status)
    yield peak
    peak[0] = float(high_water(status) - before)


def trim() -> None:
    """Gives memory that is free back to the system."""
    if function := getattr(ctypes.CDLL(None), "malloc_trim", None):
        function(0)


def high_water(status: Path) -> int:
    """Returns the most bytes that a process has had in memory."""
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
