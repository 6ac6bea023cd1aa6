"""Builds the tiny model of the default run and warms it up on imperfect demonstrations.

The model learns in minutes on a laptop and exercises the whole pipeline: it has a Qwen3
architecture, a ChatML template, and a tokenizer with one token per word (bytes for all other text).
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gspo_env.batch.sample import Sample, to_samples
from gspo_env.chat.conversation import tokenize
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.env.base import TextEnvironment
from gspo_env.learner.learner import Learner
from gspo_env.learner.losses import GSPO
from gspo_env.learner.settings import LearnerConfig
from gspo_env.recipes.base import Show
from gspo_env.rollout.failures import FaultLog, refuse_failures
from gspo_env.rollout.play import Policy, PolicyOutput, demonstrator, look
from gspo_env.rollout.pool import play_alone
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runtime.threads import wrong_actions
from gspo_env.seeding import derive_seed
from gspo_env.tools.tool import tool_call_frames
from gspo_env.types import Episode, StopReason, Task, Turn

if TYPE_CHECKING:
    from gspo_env.recipes.imitate import Imitate
    from gspo_env.recipes.tiny import Tiny

logger = logging.getLogger(__name__)

LITERAL = "literal"
"""Key of a turn's `info.extra` with an imitated action that has control tokens."""

MAX_LOOKS = 256
"""Tasks whose first prompts are read if an environment has no demonstrator."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}"
    "{% if m.role == 'system' and tools %}"
    "{% for t in tools %}\n{{ t.function.name }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_LONGEST_WORD = 1000
"""Characters of a token; the trie of the `tokenizers` library overflows the stack at 100,000."""
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
    vocabulary += [(piece, -1.0) for piece in sorted(pieces) if len(piece) <= _LONGEST_WORD]
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
        initializer_range=config.initializer_range or config.hidden_size**-0.5,
        eos_token_id=eos_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(shape).float()  # type: ignore[no-untyped-call]
        return model


def build(
    envs: Mapping[str, TextEnvironment],
    config: Tiny,
    seed: int,
    limits: RolloutConfig | None = None,
    show: Show = lambda phase, step, total: None,
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, list[Episode]]:
    """Builds the tiny model and tokenizer for environments, and plays the demonstrations.

    An environment without `expert_action` gives none: the vocabulary has only the words of its
    prompts and first observations. If none has one, the model starts from random weights.

    Args:
        envs: The environments, by the `env_id` of their tasks.
        config: The shape of the model and the number of demonstrations, which they share equally.
        seed: Seed of the weights and of the tasks.
        limits: Limits of a demonstration, those of the rollout.
        show: Shows how many demonstrations were played.

    Raises:
        ConfigError: The conversations of the config cannot be read.
    """
    if config.conversations:
        from gspo_env.recipes.conversations import read_for_building

        read = read_for_building
        words, tokens, episodes = read(config, "+".join(envs))
        tokenizer = build_tokenizer(words, tokens)
        model = build_model(config, len(tokenizer), tokenizer.eos_token_id, seed)
        return model, tokenizer, episodes
    limits = limits or RolloutConfig()
    demonstrations: list[Episode] = []
    texts: set[str] = set()
    calls: list[Sequence[str]] = []
    for place, (env_id, env) in enumerate(envs.items()):
        numbers = range(place, config.demonstrations, len(envs))
        seeds = [derive_seed("demonstration", seed, n) % 10**9 for n in numbers] or [0]
        tasks = [Task(env_id=env_id, seed=drawn) for drawn in seeds]
        try:
            played = demonstrate(env, tasks, config.slips, limits, show)
            demonstrations += played
        except NotImplementedError:
            played = first_observations(env, tasks, show)
        tools = {tool.name: tool for episode in played for tool in episode.prompt.tools}
        frames = [tool_call_frames(tool) for tool in tools.values()]
        texts |= _texts(played) | _complaints(env, tasks[0], frames, limits)
        calls += frames
    tokenizer = build_tokenizer(texts, [frame for frames in calls for frame in frames])
    model = build_model(config, len(tokenizer), tokenizer.eos_token_id, seed)
    return model, tokenizer, demonstrations


def _texts(read: Sequence[Episode]) -> set[str]:
    """Returns the texts that the policy reads and writes in episodes."""
    prompts = [episode.prompt for episode in read]
    texts = {text for e in read for turn in e.turns for text in (turn.observation, turn.text)}
    texts |= {episode.final_observation for episode in read if not episode.turns}
    texts |= {prompt.system or "" for prompt in prompts}
    texts |= {message.content for prompt in prompts for message in prompt.messages}
    tools = {tool.name: tool for prompt in prompts for tool in prompt.tools}
    return texts | {text for t in tools.values() for text in (t.name, t.description)}


def demonstrate(
    env: TextEnvironment,
    tasks: Sequence[Task],
    slips: float,
    limits: RolloutConfig | None = None,
    show: Show = lambda phase, step, total: None,
) -> list[Episode]:
    """Plays each task with the environment's own `expert_action`; the ids are those of no model.

    Args:
        env: The environment.
        tasks: The tasks.
        slips: Probability of a wrong action.
        limits: Turns and seconds after which an episode is cut, and retries: those of the rollout.
        show: Shows how many tasks were played.

    Raises:
        NotImplementedError: The environment has no demonstrator.
        RolloutError: More episodes failed than the limits allow; the others are left out.
    """
    limits = limits or RolloutConfig()
    with wrong_actions() if slips else contextlib.nullcontext():
        episodes = play_all(env, tasks, demonstrator(slips), limits, show)
    refuse_failures(episodes, limits.max_env_error_rate)
    played = [e for e in episodes if not e.failed]
    if len(played) < len(episodes):
        logger.warning("%d of %d demonstrations failed", len(episodes) - len(played), len(episodes))
    if played and not any(episode.success for episode in played):
        text = "none of the %d demonstrations of %s succeeded: only the form of actions is learned"
        logger.warning(text, len(played), tasks[0].env_id)
    return played


def _for_seconds(policy: Policy, seconds: float) -> Policy:
    """Returns a policy that ends its episode after some seconds."""
    end = time.monotonic() + seconds
    return lambda now: (
        PolicyOutput(stop=StopReason.TIMEOUT) if time.monotonic() > end else policy(now)
    )


def first_observations(env: TextEnvironment, tasks: Sequence[Task], show: Show) -> list[Episode]:
    """Resets the environment to some tasks; the episodes have no turns.

    Raises:
        RolloutError: More than half of the resets failed.
    """
    read = play_all(
        env, tasks[:MAX_LOOKS], look, show=lambda _, n, of: show("first prompts", n, of)
    )
    refuse_failures(read)
    return [episode for episode in read if not episode.failed]


def play_all(
    env: TextEnvironment,
    tasks: Sequence[Task],
    policy: Policy,
    limits: RolloutConfig | None = None,
    show: Show = lambda phase, step, total: None,
) -> list[Episode]:
    """Plays the tasks one after another, again where the environment fails."""
    log, limits = FaultLog(), limits or RolloutConfig()
    episodes = []
    for n, task in enumerate(tasks):
        timed = _for_seconds(policy, limits.episode_timeout)
        most, retries = limits.max_turns, limits.max_retries
        episodes.append(play_alone(env, task, timed, log, max_turns=most, retries=retries))
        show("demonstrations", n + 1, len(tasks))
    log.summarise()
    return episodes


def _complaints(
    env: TextEnvironment, task: Task, calls: Sequence[Sequence[str]], limits: RolloutConfig
) -> set[str]:
    """Returns the replies to invalid actions, which are frequent early on and long as bytes."""
    actions = [""]
    for frames in calls:  # a single one, the whole call, if the tool has no parameters
        opening, closing = frames[0], frames[-1]
        actions += [opening, opening + opening + closing, opening + closing, closing]
    task, log = replace(task, seed=0), FaultLog()
    played = [
        play_alone(env, task, _always(a), log, max_turns=1, retries=limits.max_retries)
        for a in actions
    ]
    return {episode.final_observation for episode in played}


def _always(action: str) -> Policy:
    return lambda now: action


def encode_action(turn: Turn, chat: ChatTokenizer) -> Sequence[int]:
    """Returns the ids of an imitated action, without its end.

    Control tokens that the template writes within an action, such as Mistral's `[TOOL_CALLS]`, are
    ids of their own; the same text in a message is not.
    """
    literal = turn.info.extra.get(LITERAL)
    return chat.encode(turn.text) if literal is None else chat.text.encode_rendering(literal)


def imitation_samples(
    demonstrations: Sequence[Episode],
    chat: ChatTokenizer,
    max_context: int | None = None,
    show: Show = lambda phase, step, total: None,
) -> list[Sample]:
    """Returns the token sequences that rollouts with the demonstrated actions would have.

    Args:
        demonstrations: Episodes without ids.
        chat: The tokenizer.
        max_context: Tokens after which a demonstration is cut; by default it is not.
        show: Shows how many demonstrations were tokenised.
    """
    encode = partial(encode_action, chat=chat)
    episodes = []
    for n, demonstration in enumerate(demonstrations):
        episode = tokenize(demonstration, chat, max_context, encode)
        episodes += [episode] if episode.turns else []
        show("tokenising", n + 1, len(demonstrations))
    return to_samples(episodes, [np.zeros(len(episode.turns)) for episode in episodes])


class Imitation:
    """Imitates demonstrations by maximum likelihood, with a cosine learning rate.

    A small transformer learns to copy words suddenly, after some steps in which the loss hardly
    falls. How many depends on the seed. Where that lasts half of the steps, the schedule starts
    again, at most twice (warm restarts, arXiv 1608.03983).

    Args:
        model: The model, which is trained in place.
        samples: The demonstrations.
        config: The number of steps, the learning rate and the batch.
        seed: Seed of the order of the demonstrations.
        memory: The optimiser and the limits of memory.
    """

    def __init__(
        self,
        model: Any,
        samples: Sequence[Sample],
        config: Tiny | Imitate,
        seed: int,
        memory: LearnerConfig | None = None,
    ) -> None:
        self.total, memory = config.imitation_steps, memory or LearnerConfig()
        settings = LearnerConfig(
            microbatch_tokens=memory.microbatch_tokens,
            checkpointing=memory.checkpointing,
            optimizer=memory.optimizer,
            learning_rate=config.imitation_learning_rate,
            warmup_steps=max(1, self.total // 20),
            schedule="cosine",
        )
        self._make_learner = partial(Learner, model, GSPO(), settings, total_steps=self.total)
        self.learner = self._make_learner()
        self.samples, self._generator = samples, torch.Generator().manual_seed(seed)
        self._size = min(config.imitation_batch, len(samples))
        self._epoch = math.ceil(len(samples) / self._size)
        self._order: list[int] = []
        self.losses: list[float] = []
        """The loss of each step, also of those before the schedule started again."""
        self.began = 0
        """Steps before the schedule started for the last time."""

    @property
    def steps(self) -> int:
        """The steps of the schedule that are done."""
        return len(self.losses) - self.began

    def step(self) -> float:
        """Takes one step; returns its loss."""
        middle = self.total // 2
        if self.steps == middle and self.began < 2 * middle and _is_stuck(self.losses, self.total):
            self.learner, self.began = self._make_learner(), len(self.losses)
        place = len(self.losses) % self._epoch
        if not place:
            self._shuffle()
        batch = self._order[place * self._size : (place + 1) * self._size]
        self.losses.append(self.learner.imitate([self.samples[i] for i in batch]))
        return self.losses[-1]

    def skip(self, losses: Sequence[float], began: int) -> None:
        """Takes the place of another imitation, before the state of its learner is restored."""
        self.losses, self.began = [*losses], began
        for _ in range(math.ceil(len(losses) / self._epoch)):
            self._shuffle()

    def _shuffle(self) -> None:
        self._order = torch.randperm(len(self.samples), generator=self._generator).tolist()


def warm_up(
    model: Any,
    samples: Sequence[Sample],
    config: Tiny | Imitate,
    seed: int,
    on_step: Callable[[int, float], None],
    memory: LearnerConfig | None = None,
) -> None:
    """Takes all steps of an `Imitation`; calls `on_step` with the number and the loss of each."""
    imitation = Imitation(model, samples, config, seed, memory)
    while imitation.steps < imitation.total:
        loss = imitation.step()
        on_step(imitation.steps, loss)


def _is_stuck(losses: Sequence[float], total: int) -> bool:
    """Returns whether the last losses are hardly below earlier ones, and not low by themselves."""
    few = total // 20
    if not few:  # too few steps to compare
        return False
    last = np.mean(losses[-few:])
    return bool(last > 0.5 and last > 0.85 * np.mean(losses[5 * few : 7 * few]))
