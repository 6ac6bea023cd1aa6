"""The embedded default: a tiny model made on the spot, warmed up on imperfect demonstrations.

It is small enough to learn in minutes on a laptop and real enough to exercise everything: a Qwen3
architecture, a ChatML template, and a tokenizer with one token a word (bytes for all other text).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gspo_env.batch.sample import Sample, to_sample
from gspo_env.env.base import check_reset, check_step
from gspo_env.env.tools import tool_call_frames
from gspo_env.errors import ConfigError
from gspo_env.learner.learner import Learner
from gspo_env.learner.loss import GSPO
from gspo_env.learner.settings import LearnerConfig
from gspo_env.rollout.collector import instructions
from gspo_env.rollout.transcript import ChatTokenizer
from gspo_env.seeding import derive_seed
from gspo_env.types import Episode, StopReason, Task, Turn

logger = logging.getLogger(__name__)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}"
    "{% if m.role == 'system' and tools %}"
    "{% for t in tools %}\n{{ t.function.name }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
# a message's header, a tag, a word, punctuation, white space: one token each
_WORDS = r"(?:system|user|tool|assistant)\n| ?</?\w+>| ?\w+| ?[^\s\w]+|\s+"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedConfig:
    """The embedded model and its warm-up; without effect where a model is given."""

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    demonstrations: int = 4000
    """Scripted episodes to imitate."""
    slips: float = 0.1
    """Probability that a demonstrated action is wrong."""
    imitation_steps: int = 450
    """Steps of maximum likelihood; 0 skips the warm-up."""
    imitation_batch: int = 64
    imitation_learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        for name in ("hidden_size", "layers", "heads", "demonstrations", "imitation_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected at least 1")
        if self.hidden_size % self.heads or self.hidden_size // self.heads % 2:
            raise ConfigError(
                f"hidden_size is {self.hidden_size} with {self.heads} heads; "
                "expected an even size for each head"
            )
        if not 0 <= self.slips < 1:
            raise ConfigError(f"slips is {self.slips!r}; expected a probability below 1")
        if self.imitation_steps < 0 or not self.imitation_learning_rate > 0:
            raise ConfigError("imitation_steps and imitation_learning_rate have to be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One turn of a scripted episode, as text."""

    observation: str
    action: str
    role: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A scripted episode, as text."""

    task: Task
    exchanges: tuple[Exchange, ...]


def demonstrate(env: gymnasium.Env[str, str], task: Task, slips: float) -> Demonstration:
    """Plays a task with the environment's own `expert_action`."""
    reset = env.reset(seed=task.seed, options=dict(task.options))
    observation, info = check_reset(task.env_id, reset)
    expert = env.get_wrapper_attr("expert_action")
    exchanges = []
    while True:
        action = expert(slips)
        role = str(info.get("observation_role", "user"))
        exchanges.append(Exchange(observation=observation, action=action, role=role))
        step = check_step(task.env_id, env.step(action))
        observation, _, terminated, truncated, info = step
        if terminated or truncated:
            return Demonstration(task=task, exchanges=tuple(exchanges))


def build_tokenizer(texts: Sequence[str], frames: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A word tokenizer for the texts; any other text is spelt in bytes.

    Args:
        texts: What the tokenizer has to know: prompts, observations and actions.
        frames: Strings that become one token each, such as the constant text of a tool call.
    """
    ordered = sorted(set(frames), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, ordered), _WORDS])
    words = {piece for text in texts for piece in re.findall(pattern, text)}
    words |= {piece.strip() for piece in words if piece.strip()}
    template = {"system\n", "user\n", "tool\n", "assistant\n"}
    pieces = {p for text in template for p in re.findall(_WORDS, text)} | words | set(ordered)
    vocabulary = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -10.0) for byte in range(256))]
    vocabulary += [(piece, -1.0) for piece in sorted(pieces)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(
    config: EmbeddedConfig, vocabulary: int, eos_id: int, seed: int
) -> Qwen3ForCausalLM:
    """A tiny Qwen3 with random weights that the seed decides."""
    shape = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=max(1, config.heads // 2),
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=eos_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(shape).float()  # type: ignore[no-untyped-call]
        return model


def build(
    env: gymnasium.Env[str, str], env_id: str, config: EmbeddedConfig, seed: int
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, list[Demonstration]]:
    """The tiny model and tokenizer for an environment, and the demonstrations to imitate.

    An environment without `expert_action` gives none: its tokenizer knows only the words of its
    first observations, and the model starts from random weights.
    """
    tasks = [
        Task(env_id=env_id, seed=derive_seed("demonstration", seed, n) % 10**9)
        for n in range(config.demonstrations)
    ]
    try:
        demonstrations = [demonstrate(env, task, config.slips) for task in tasks]
        texts = [t for d in demonstrations for x in d.exchanges for t in (x.observation, x.action)]
    except (NotImplementedError, AttributeError):
        logger.warning("%s has no expert_action: the model starts untrained", env_id)
        demonstrations = []
        texts = [env.reset(seed=task.seed)[0] for task in tasks[:256]]
    system, tools = instructions(env)
    texts += [system or "", *(text for tool in tools for text in (tool.name, tool.description))]
    frames = [frame for tool in tools for frame in tool_call_frames(tool)]
    texts += _complaints(env, [tool_call_frames(tool) for tool in tools])
    tokenizer = build_tokenizer(texts, frames)
    model = build_model(config, len(tokenizer), tokenizer.eos_token_id, seed)
    return model, tokenizer, demonstrations


def _complaints(env: gymnasium.Env[str, str], calls: Sequence[Sequence[str]]) -> list[str]:
    """What the environment says of nonsense: met often early on, and long if spelt in bytes."""
    actions = [""]
    for frames in calls:  # one alone, a whole call, where the tool has no parameters
        opening, closing = frames[0], frames[-1]
        actions += [opening, opening + opening + closing, opening + closing, closing]
    observations = []
    for action in actions:
        env.reset(seed=0)
        observations.append(str(env.step(action)[0]))
    return observations


def to_samples(
    demonstrations: Sequence[Demonstration], chat: ChatTokenizer, env: gymnasium.Env[str, str]
) -> list[Sample]:
    """Token sequences of demonstrations, with every action as the model's."""
    system, tools = instructions(env)
    end = chat.stop_ids[0] if chat.end_of_turn is None else chat.end_of_turn
    samples = []
    for demonstration in demonstrations:
        turns: list[Turn] = []
        for n, exchange in enumerate(demonstration.exchanges):
            if n == 0:
                new = chat.start(exchange.observation, system, tools)
            else:
                new = chat.follow(exchange.observation, end, exchange.role)
            action = (*chat.encode(exchange.action), end)
            turns.append(_turn(new, action, exchange))
        samples.append(to_sample(_episode(demonstration.task, turns), _zeros(turns)))
    return samples


def _turn(new: tuple[int, ...], action: tuple[int, ...], exchange: Exchange) -> Turn:
    return Turn(
        prompt_ids=new,
        action_ids=action,
        logprobs=(0.0,) * len(action),
        text=exchange.action,
        observation=exchange.observation,
        reward=0.0,
    )


def _episode(task: Task, turns: list[Turn]) -> Episode:
    return Episode(
        task=task,
        turns=tuple(turns),
        outcome=0.0,
        stop_reason=StopReason.TERMINATED,
        terminated=True,
        truncated=False,
    )


def _zeros(turns: list[Turn]) -> Any:
    return torch.zeros(len(turns), dtype=torch.float64).numpy()


def warm_up(
    model: Any,
    samples: Sequence[Sample],
    config: EmbeddedConfig,
    seed: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Imitates demonstrations by maximum likelihood, with a cosine learning rate."""
    settings = LearnerConfig(
        learning_rate=config.imitation_learning_rate,
        warmup_steps=max(1, config.imitation_steps // 20),
        schedule="cosine",
    )
    learner = Learner(model, GSPO(), settings, total_steps=config.imitation_steps)
    generator = torch.Generator().manual_seed(seed)
    size = min(config.imitation_batch, len(samples))
    epoch = math.ceil(len(samples) / size)
    for step in range(config.imitation_steps):
        if step % epoch == 0:
            order = torch.randperm(len(samples), generator=generator).tolist()
        start = (step % epoch) * size
        loss = learner.imitate([samples[i] for i in order[start : start + size]])
        on_step(step + 1, loss)
