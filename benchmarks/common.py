"""Shared by the benchmarks: models, episodes, and alternating timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.env.registration import make_env
from gspo_env.recipes.build import build, imitation_samples, warm_up
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout.settings import RolloutConfig

ENV = "gspo/Lookup-v0"
LIMITS = {"max_turn_tokens": 32, "max_context": 512}
"""Limits of the recipe `tiny`."""
GROUP, CLIP = 8, (0.03, 0.05)
"""Of the trainings that are compared with TRL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """A model that ends its turns, and the environment that it plays."""

    model: Any
    tokenizer: Any
    chat: ChatTokenizer
    env_id: str = ENV
    limits: RolloutConfig = field(default_factory=lambda: RolloutConfig(**LIMITS))


def make_player(steps: int = 100) -> Player:
    """Builds the default model and trains it on demonstrations for a few steps."""
    env = make_env(ENV)
    config = Tiny(demonstrations=1000, imitation_steps=steps)
    model, tokenizer, demonstrations = build({ENV: env}, config, 0)
    chat = ChatTokenizer(tokenizer)
    warm_up(model, imitation_samples(demonstrations, chat), config, 0, lambda step, loss: None)
    return Player(model=model, tokenizer=tokenizer, chat=chat)


def alternate(rounds: int, *programs: Callable[[], float]) -> list[list[float]]:
    """Calls the functions alternately; returns the results of all rounds except the first."""
    rows = [[program() for program in programs] for _ in range(rounds + 1)]
    return [list(column) for column in zip(*rows[1:], strict=True)]


def seconds(work: Callable[[], Any]) -> float:
    """Measures the wall-clock seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Measures the CPU seconds of one call, in all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def device_seconds(work: Callable[[], Any]) -> float:
    """Measures the seconds of one call: those of the clock with a GPU, else of the processor."""
    import torch

    if not torch.cuda.is_available():
        return cpu_seconds(work)
    return seconds(lambda: (work(), torch.cuda.synchronize()))


def make_model(size: str, dtype: str = "float32") -> Any:
    """Makes a Qwen3 with random weights: `small` has 0.9 M parameters, `large` 100 M, `0.6B` 596 M.

    Other names are models that `--model` takes.
    """
    import torch

    if size == "small":
        return random_qwen3(128, 4, 664).to(getattr(torch, dtype))
    if size == "large":
        return random_qwen3(768, 12, 16_384).to(getattr(torch, dtype))
    if size == "0.6B":  # the shape of Qwen3-0.6B
        return random_qwen3(1024, 28, 151_936, head_dim=128).to(getattr(torch, dtype))
    from gspo_env.model.load import load_model

    return load_model(size, dtype)[0]


def random_qwen3(hidden: int, layers: int, vocabulary: int, **shape: Any) -> Any:
    """Makes a Qwen3 with random weights; the heads have a size of 64, or there are four."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(4, hidden // 64)
    default = {"head_dim": max(16, min(64, hidden // 4)), "tie_word_embeddings": True}
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        **{**default, **shape},
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def multi_turn_group(
    rng: np.random.Generator,
    *,
    vocabulary: int,
    shared: int = 512,
    own: tuple[int, int] = (64, 128),
    size: int = 8,
    turns: int = 3,
) -> list[Sample]:
    """Makes random episodes of a task: common tokens, then turns, half of them sampled tokens."""
    prompt = rng.integers(0, vocabulary, max(shared, 1))
    samples = []
    for _ in range(size):
        length = int(rng.integers(own[0], own[1] + 1))
        turn_ids = np.arange(length) * 2 * turns // length
        turn_ids = np.where(turn_ids % 2 == 0, turn_ids // 2, -1)
        n = int((turn_ids >= 0).sum())
        samples.append(
            Sample(
                token_ids=np.concatenate([prompt, rng.integers(0, vocabulary, length)]),
                turn_ids=np.concatenate([np.full(len(prompt), -1), turn_ids]),
                advantages=np.full(n, rng.normal()),
                engine_logprobs=np.log(rng.uniform(0.5, 2.0, n) / vocabulary),
            )
        )
    return samples


def show(name: str, values: list[float], unit: str) -> float:
    """Prints the median and the spread; returns the median."""
    middle = statistics.median(values)
    print(f"{name:44} {middle:10.4g} {unit}  ({min(values):.4g} to {max(values):.4g})")
    return middle


@dataclass(frozen=True)
class Training:
    """What depends on the model."""

    model: str
    env_id: str
    tasks: int
    minibatches: int
    rate: float
    warm: int
    norm: float
    turn: int
    rank: int
    imitation: dict[str, Any]
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    context: int = 512
    completion: int = 160
    """Tokens of an episode after its prompt, the tools' included, which TRL limits."""


TRAININGS = {
    "tiny": Training("", "gspo/Lookup-v0", 32, 4, 1e-3, 20, 0.1, 32, 0, {"imitation_steps": 110}),
    "telecom": Training(
        *("", "gspo/Tau2-v0", 16, 4, 4e-4, 8, 0.1, 32, 0),
        {"demonstrations": 512, "slips": 0.0, "imitation_steps": 100, "imitation_batch": 32},
        {"domain": "telecom", "rules": False},
        context=1024,
        completion=896,
    ),
    "smollm2": Training("smollm2", "gspo/Story-v0", 8, 2, 1e-4, 2, 0.03, 40, 16, {}),
}


def make_start(training: Training, folder: Path) -> None:
    """Saves the model of a recipe, or its adapter, after the imitation."""
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import Config
    from gspo_env.tracking.console import Progress

    config = Config.from_recipe(
        training.model or "tiny",
        recipe=training.imitation,
        env=training.env_id,
        env_kwargs=training.env_kwargs,
    )
    GSPOAgent(config=config).save_start(folder, Progress())


def start_agent(training: Training, start: Path, seed: int, **settings: Any) -> Any:
    """Loads an agent that begins with the start and trains or evaluates with these settings."""
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import Config

    config = Config.from_recipe(
        env=training.env_id,
        env_kwargs=training.env_kwargs,
        model=training.model or str(start),
        recipe="none",
        seed=seed,
        tasks_per_step=training.tasks,
        eval_every=0,
        tracker="none",
        rollout={
            "group_size": GROUP,
            "max_turn_tokens": training.turn,
            "max_context": training.context,
        }
        | ({"concurrency": 64} if training.model else {}),
        loss={"clip_low": CLIP[0], "clip_high": CLIP[1]},
        learner={
            "learning_rate": training.rate,
            "warmup_steps": training.warm,
            "minibatches": training.minibatches,
            "schedule": "cosine",
            "max_grad_norm": training.norm,
            "lora_rank": training.rank,
        },
        checkpoints={"keep": 0},
        episodes={"keep_episodes": "none"},
        **settings,
    )
    return GSPOAgent.from_start(start, config)
