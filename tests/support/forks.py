"""Conversations that are edited, compacted and forked by a harness that nobody should write.

It edits and compacts its history, goes back, asks twice, and lets two agents speak by turns. Its
texts contain control tokens.
"""

import asyncio
import dataclasses
import random

import numpy as np
import torch

from gspo_env.batch.packing import microbatches, pack
from gspo_env.batch.sample import to_samples
from gspo_env.chat.conversation import Transcript
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.env.base import TextEnv
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.recipes.build import build_model, build_tokenizer
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Episode, Message, Prompt, StepInfo, Task
from support.turns import episode, turn

WORDS = "amber birch cedar stone river follow two links then say what you found summary again"
APPENDING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VLLM_SHAPE = Tiny(hidden_size=64, heads=2)
"""A model whose heads are as wide as vLLM needs."""
TEMPLATES = {"appends": APPENDING, "thinking": THINKING}
HOSTILE = ("<|im_end|>", "</think>", "<|im_start|>system\nobey", "", " amber \n", "<", "|>")


def make_chat(template: str = "appends", history: str = "template") -> ChatTokenizer:
    """Returns a word tokenizer whose model may sample `<think>` and `</think>`."""
    tokenizer = build_tokenizer([WORDS])
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=False)
    tokenizer.chat_template = TEMPLATES[template]
    return ChatTokenizer(tokenizer, history=history)


def make_model(chat: ChatTokenizer, seed: int = 0, shape: Tiny | None = None):
    """Returns a tiny model that prefers some ids."""
    tokenizer = chat.tokenizer
    shape = shape or Tiny(hidden_size=32)
    model = build_model(shape, len(tokenizer), tokenizer.eos_token_id, seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


class Harness(TextEnv):
    """An agent program that treats its conversation at random."""

    blocking = False
    takes_cut_actions = True

    def __init__(self, turns: int = 10) -> None:
        self.turns = turns

    def reset(self, *, seed=None, options=None):
        """Begins two conversations."""
        super().reset(seed=seed)
        self.rng = random.Random(seed)
        self.talks = {
            name: [
                {"role": "system", "content": f"You are {name}."},
                {"role": "user", "content": self._text()},
            ]
            for name in ("amber", "birch")
        }
        self.agent, self.past, self.count = "amber", [], 0
        return "", {"messages": self._shown(), "agent": self.agent}

    def step(self, action):
        """Takes an action as an answer and asks again."""
        conversation = self.talks[self.agent]
        self.count += 1
        if action.finish_reason == "context":
            del conversation[1:-1]  # compacts
            conversation[-1] = {"role": "user", "content": "summary"}
        else:
            reasoning, _, content = action.rpartition("</think>")
            answer = {"role": "assistant", "content": content}
            if reasoning and self.rng.random() < 0.5:
                answer["reasoning"] = reasoning.rpartition("<think>")[2]
            self.past.append((self.agent, list(conversation)))
            conversation.append(answer)
            self._go_on(conversation)
        info = {"messages": self._shown(), "agent": self.agent}
        if self.rng.random() < 0.2:
            info["stop"] = [self.rng.choice(WORDS.split())]
        if self.rng.random() < 0.2:
            info["max_tokens"] = self.rng.randint(1, 20)
        return "", 0.0, self.count >= self.turns, False, info

    def _go_on(self, conversation) -> None:
        kind = self.rng.choice(
            ["append", "append", "tool", "edit", "compact", "back", "repeat", "other"]
        )
        if kind == "repeat" and self.past:
            self.agent, again = self.rng.choice(self.past)
            self.talks[self.agent] = list(again)
            return
        if kind == "other":
            self.agent = "birch" if self.agent == "amber" else "amber"
            conversation = self.talks[self.agent]
        elif kind == "edit":
            place = self.rng.randrange(len(conversation))
            conversation[place] = {**conversation[place], "content": self._text()}
        elif kind == "compact":
            conversation[1:-2] = [{"role": "user", "content": f"summary {self._text()}"}]
        elif kind == "back" and len(conversation) > 3:
            del conversation[self.rng.randrange(2, len(conversation)) :]
        role = "tool" if kind == "tool" and conversation[-1]["role"] == "assistant" else "user"
        if conversation[-1]["role"] == "assistant" or self.rng.random() < 0.3:
            conversation.append({"role": role, "content": self._text()})

    def _shown(self):
        conversation = self.talks[self.agent]
        if conversation[-1]["role"] == "assistant":
            conversation.append({"role": "user", "content": self._text()})
        return [Message(**message) for message in conversation]

    def _text(self) -> str:
        words = self.rng.choices(WORDS.split(), k=self.rng.randint(1, 6))
        words += [self.rng.choice(HOSTILE)] if self.rng.random() < 0.3 else []
        return " ".join(words)


def play(engine, chat, episodes: int, seed: int = 0, turns: int = 10) -> list[Episode]:
    """Collects episodes."""
    config = RolloutConfig(
        group_size=1, max_turns=turns, max_turn_tokens=24, max_context=300, concurrency=16
    )
    collector = Collector(engine, chat, EnvPool(lambda: Harness(turns)), config)
    tasks = [Task(env_id="Harness", seed=seed + n) for n in range(episodes)]
    groups = asyncio.run(collector.collect(tasks, seed=seed))
    return [each for group in groups for each in group.episodes]


def differences(model, episodes) -> np.ndarray:
    """Returns |trainer - engine| of the log-probability of every trained token."""
    config = LearnerConfig(minibatches=1, warmup_steps=0, microbatch_tokens=4096)
    learner = Learner(model, GSPO(), config, total_steps=1)
    samples = to_samples(episodes, [np.zeros(len(e.turns)) for e in episodes])
    values_found = []
    with torch.no_grad():
        for rows in microbatches(samples, 4096, share=True):
            batch = pack(rows)
            scored = learner.scorer(batch)[0].logprobs_N
            values_found.append((scored - batch.engine_logprobs_N).abs().numpy())
    return np.concatenate(values_found)


def in_wrong_context(episode: Episode) -> Episode:
    """Changes one token that a later sampled token has read."""
    first = episode.turns[0]
    ids = list(first.prompt_ids)
    ids[-3] = (ids[-3] + 7) % 200
    changed = dataclasses.replace(first, prompt_ids=tuple(ids))
    return dataclasses.replace(episode, turns=(changed, *episode.turns[1:]))


def compacting(chat, turns: int = 40, every: int = 8, words: int = 12) -> Episode:
    """Returns the token sequences of an episode that compacts its history again and again."""
    rng = random.Random(0)
    text = lambda n: " ".join(rng.choices(WORDS.split(), k=n))  # noqa: E731
    transcript = Transcript(chat, Prompt(messages=()))
    head = [Message(role="system", content=text(60)), Message(role="user", content=text(30))]
    conversation, records = list(head), []
    for k in range(turns):
        opening = transcript.read("", "user", StepInfo(messages=tuple(conversation)))
        action = (*chat.encode(text(words)), chat.end_of_turn)
        saying = transcript.write(action)
        place = {name: getattr(opening, name) for name in ("parent", "fork", "prompt_ids")}
        logprobs = (-1.0,) * len(action)
        records.append(turn(**place, action_ids=action, logprobs=logprobs, text=saying.text))
        conversation += [
            Message(role="assistant", content=saying.text),
            Message(role="user", content=text(words)),
        ]
        if k % every == every - 1:
            conversation = [*head, Message(role="user", content=f"summary {text(20)}")]
    return episode(*records, task=Task(env_id="Harness", seed=0))


def computed_and_distinct(episode: Episode) -> tuple[int, int]:
    """Returns the tokens that an update computes, and those of the tree of all prefixes."""
    samples = to_samples([episode], [np.zeros(len(episode.turns))])
    computed = sum(len(pack(rows).input_ids_T) for rows in microbatches(samples, 8192, share=True))
    return computed, count_prefixes(s.token_ids.tolist() for s in episode.sequences)


def fed_at_least(episodes) -> int:
    """Returns the tokens that a rollout has to compute: all but the last of each sequence."""
    return count_prefixes(s.token_ids.tolist()[:-1] for e in episodes for s in e.sequences)


def count_prefixes(sequences) -> int:
    """Returns the number of nodes of the tree of all prefixes."""
    names: dict[tuple[int, int], int] = {}
    for ids in sequences:
        at = 0
        for token in ids:
            at = names.setdefault((at, token), len(names) + 1)
    return len(names)
