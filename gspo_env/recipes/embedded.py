"""The embedded default: builds a tiny model and warms it up on imperfect demonstrations.

The model learns in minutes on a laptop and exercises the whole pipeline: it has a Qwen3
architecture, a ChatML template, and a tokenizer with one token per word (bytes for all other text).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gspo_env.batch.sample import Sample, to_samples
from gspo_env.env.base import TextEnvironment
from gspo_env.env.tools import tool_call_frames
from gspo_env.learner.learner import Learner
from gspo_env.learner.loss import GSPO
from gspo_env.learner.settings import LearnerConfig
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout.faults import FaultLog, refuse_failures
from gspo_env.rollout.play import Policy, demonstrator, look, play_now
from gspo_env.rollout.retry import play_alone
from gspo_env.rollout.transcript import ChatTokenizer, tokenize
from gspo_env.seeding import derive_seed
from gspo_env.types import Episode, Task

logger = logging.getLogger(__name__)

_LONGEST = 128
"""Turns after which a demonstration is cut."""

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


def build_tokenizer(texts: Iterable[str], frames: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Builds a word tokenizer for the texts; all other text is encoded as bytes.

    Args:
        texts: Prompts, observations and actions whose words form the vocabulary.
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


def build_model(config: Tiny, vocabulary: int, eos_id: int, seed: int) -> Qwen3ForCausalLM:
    """Builds a tiny Qwen3 with random weights from the seed."""
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
    env: TextEnvironment, env_id: str, config: Tiny, seed: int
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, list[Episode]]:
    """Builds the tiny model and tokenizer for an environment, and plays the demonstrations.

    An environment without `expert_action` gives none: the vocabulary has only the words of its
    prompts and first observations, and the model starts from random weights.
    """
    tasks = [
        Task(env_id=env_id, seed=derive_seed("demonstration", seed, n) % 10**9)
        for n in range(config.demonstrations)
    ]
    try:
        demonstrations = demonstrate(env, tasks, config.slips)
        read = demonstrations
    except NotImplementedError:
        logger.warning("%s has no expert_action: the model starts untrained", env_id)
        demonstrations, read = [], play_all(env, tasks[:256], look)
        refuse_failures(read)
    prompts = [episode.prompt for episode in read]
    texts = {text for e in read for turn in e.turns for text in (turn.observation, turn.text)}
    texts |= {episode.final_observation for episode in read if not episode.turns}
    texts |= {prompt.system or "" for prompt in prompts}
    texts |= {message.content for prompt in prompts for message in prompt.messages}
    tools = {tool.name: tool for prompt in prompts for tool in prompt.tools}
    texts |= {text for tool in tools.values() for text in (tool.name, tool.description)}
    calls = [tool_call_frames(tool) for tool in tools.values()]
    texts |= _complaints(env, tasks[0], calls)
    tokenizer = build_tokenizer(texts, [frame for frames in calls for frame in frames])
    model = build_model(config, len(tokenizer), tokenizer.eos_token_id, seed)
    return model, tokenizer, demonstrations


def demonstrate(env: TextEnvironment, tasks: Sequence[Task], slips: float) -> list[Episode]:
    """Plays each task with the environment's own `expert_action`; the episodes have no ids.

    Raises:
        NotImplementedError: The environment has no demonstrator.
        RolloutError: More than half of the episodes failed; the others are left out.
    """
    episodes = play_all(env, tasks, demonstrator(slips))
    refuse_failures(episodes)
    played = [e for e in episodes if not e.failed]
    if len(played) < len(episodes):
        logger.warning("%d of %d demonstrations failed", len(episodes) - len(played), len(episodes))
    return played


def play_all(env: TextEnvironment, tasks: Sequence[Task], policy: Policy) -> list[Episode]:
    """Plays the tasks one after another, again where the environment fails."""
    log = FaultLog()
    episodes = [play_alone(env, task, policy, log, max_turns=_LONGEST) for task in tasks]
    log.summarise()
    return episodes


def _complaints(env: TextEnvironment, task: Task, calls: Sequence[Sequence[str]]) -> set[str]:
    """Returns the replies to invalid actions, which are frequent early on and long as bytes."""
    actions = [""]
    for frames in calls:  # a single one, the whole call, if the tool has no parameters
        opening, closing = frames[0], frames[-1]
        actions += [opening, opening + opening + closing, opening + closing, closing]
    task = replace(task, seed=0)
    return {play_now(env, task, _always(a), max_turns=1).final_observation for a in actions}


def _always(action: str) -> Policy:
    return lambda now: action


def imitation_samples(demonstrations: Sequence[Episode], chat: ChatTokenizer) -> list[Sample]:
    """Returns the token sequences that rollouts with the demonstrated actions would have."""
    episodes = [tokenize(episode, chat) for episode in demonstrations]
    return to_samples(episodes, [np.zeros(len(episode.turns)) for episode in episodes])


def warm_up(
    model: Any,
    samples: Sequence[Sample],
    config: Tiny,
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
