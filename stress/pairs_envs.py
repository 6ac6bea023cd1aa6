"""Environments for `pairs.py`, which differ in how they reward, end, mask and rewrite.

What they do follows from the seed and from the texts and token ids of the actions alone, so that
`pairs_oracle.py` can work out again what a run has played.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from gspo_env import TextEnv
from gspo_env.registry import load_function
from gspo_env.rewards.base import score_group

WORDS = ("amber", "basil", "cedar", "delta")
HINT = "Say amber."
"""What a teacher reads in `info["solution"]`."""


class Words(TextEnv):
    """Asks for words and pays each one by its text; some end the episode, two are a state."""

    blocking = False
    system_prompt: str | None = "Say a word."
    turns = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begins with a word of the seed; `level` is for a curriculum."""
        super().reset(seed=seed, options=options)
        self.seed, self.turn, self.said = seed or 0, 0, ""
        word = WORDS[self.seed % 4]
        info = {"state_key": word, "task_key": str(self.seed), "solution": HINT}
        return f"Begin with {word}.", info

    def step(self, action: str) -> Any:
        """Pays a quarter for each of some classes of texts."""
        self.turn += 1
        self.said = str(action)
        done = "delta" in action
        cut = not done and self.turn >= self.turns
        info = {"state_key": WORDS[zlib.crc32(action.encode()) % 2], **self.info(action, done)}
        word = WORDS[(self.seed + self.turn) % 4]
        return f"Go on with {word}.", self.reward(action), done, cut, info

    def reward(self, action: str) -> float:
        """Returns the reward of a turn."""
        return pay(action)

    def info(self, action: str, done: bool) -> dict[str, Any]:
        """Returns further entries of the `info`."""
        return {}

    def expert_action(self, noise: float = 0.0) -> str:
        """Says one or two words."""
        count = 1 + int(self.np_random.random() < 0.3)
        return " ".join(str(self.np_random.choice(WORDS)) for _ in range(count))


def pay(action: str) -> float:
    """Returns 0, 1/4, ... 1 for a text."""
    return zlib.crc32(action.encode()) % 5 / 4


def worth(text: str) -> int:
    """Returns what the judge gives a text, 0 to 10, by its letters."""
    return len(re.findall("[a-z]", text)) % 11


class Final(Words):
    """Gives an outcome at a terminal state only."""

    gives_outcome = True
    outcome_if_cut = -0.5
    system_prompt = None

    def reward(self, action: str) -> float:
        """Returns nothing."""
        return 0.0

    def info(self, action: str, done: bool) -> dict[str, Any]:
        """Returns the outcome at a terminal state."""
        return {"episodic_reward": pay(action)} if done else {}


class Both(Words):
    """Rewards turns, gives an outcome at a terminal state, and has an agent for each turn."""

    gives_outcome = True
    credit_score = "sum"
    turns = 2

    def info(self, action: str, done: bool) -> dict[str, Any]:
        """Returns the outcome at a terminal state, and a part of the reward for most texts."""
        parts = {"even": pay(action[::-1])} if pay(action) else {}
        parts |= {"left": pay(action), "right": -pay(action)} if done or self.turn > 1 else {}
        outcome = {"episodic_reward": 2 * pay(action)} if done else {}
        return {"reward_parts": parts, "agent": "right", **outcome}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begins with the first of two agents."""
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"agent": "left"}


class Masked(Words):
    """Leaves out every third token of the first turn, the whole second one, and credits others."""

    turns = 4

    def info(self, action: str, done: bool) -> dict[str, Any]:
        """Returns the mask or the advantages of the turn's tokens."""
        ids = tuple(getattr(action, "token_ids", ()))
        mask, advantages = token_credit(self.turn - 1, ids)
        return {"token_mask": mask, "token_advantages": advantages} if ids else {}


def token_credit(turn: int, ids: tuple[int, ...]) -> tuple[list[bool] | None, list[float] | None]:
    """Returns the mask and the advantages of the tokens of a turn of `Masked`, if it has any."""
    if turn == 0:
        return [n % 3 != 1 for n in range(len(ids))], None
    if turn == 1:
        return [False] * len(ids), None
    return None, [(i % 7 - 3) / 3 for i in ids] if turn == 2 else None


class Ranked(Words):
    """Rewards of the group: the longest last text of a group gets 1, in its last turn."""

    gives_reward = True

    def group_reward(self, group: Any) -> Any:
        """Adds the reward."""
        best = max((len(e.turns[-1].text) for e in group.episodes if e.turns), default=0)
        return replace(group, episodes=tuple(_paid(e, best) for e in group.episodes))


def _paid(episode: Any, best: int) -> Any:
    if not episode.turns or len(episode.turns[-1].text) < best:
        return episode
    last = episode.turns[-1]
    return replace(episode, turns=(*episode.turns[:-1], replace(last, reward=last.reward + 1)))


class Judged(Words):
    """Each turn has a reward of a model as a judge, beside that of its text."""

    gives_reward = True
    turns = 4

    def step(self, action: str) -> Any:
        """Adds words to the observation."""
        observation, *rest = super().step(action)
        return " ".join([observation, *WORDS * 2]), *rest

    async def group_reward(self, group: Any) -> Any:
        """Adds the rewards of the judge."""
        judge = load_function(str(Path(__file__).with_name("pairs_judges.py:TURNS")), "reward")
        return await score_group([(judge, 0.5)], None, group)


class Edited(Words):
    """Replaces the conversation before its third turn."""

    turns = 4

    def info(self, action: str, done: bool) -> dict[str, Any]:
        """Returns a shorter conversation after the second turn."""
        if self.turn != 2 or done:
            return {}
        texts = (("user", "Begin."), ("assistant", str(action)), ("user", "Go on with amber."))
        return {"messages": [{"role": r, "content": t} for r, t in texts]}


class Long(Words):
    """Blocks, and has long observations, which outgrow a small context."""

    blocking = None
    turns = 6

    def step(self, action: str) -> Any:
        """Adds words to the observation."""
        observation, *rest = super().step(action.replace("delta", "cedar"))
        return " ".join([observation, *WORDS * 4]), *rest


def rows(path: Path) -> None:
    """Writes the rows of the dataset."""
    texts = [
        {"prompt": f"Say {word} or {other}.", "best": word} for word in WORDS for other in WORDS
    ]
    path.write_text("\n".join(map(json.dumps, texts)))


def matches(attempt: Any) -> float:
    """A reward function of the dataset: pays for the best word, and by the text."""
    return float(attempt.row["best"] in attempt.text) + pay(attempt.text)


def ask(task: Any, base_url: str, api_key: str) -> float:
    """A program that asks twice, in a conversation that it begins anew."""
    texts = []
    for _ in range(2):
        prompt = {"role": "user", "content": " ".join([task["prompt"], *texts])}
        body = json.dumps({"model": "policy", "messages": [prompt]}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = Request(f"{base_url}/chat/completions", body, headers)
        with urlopen(request, timeout=60) as answer:
            message = json.load(answer)["choices"][0]["message"]
        texts.append(str(message["content"]))
    return pay(texts[-1])
