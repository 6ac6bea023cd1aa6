"""Problems that show what an estimator does: recurring states, noise, bait, and few decisions."""

from __future__ import annotations

import hashlib

from gspo_env.env.base import StepResult
from gspo_env.errors import ConfigError
from gspo_envs.diagnostic.diagnostics import CUES, CuedEnv, OneWordEnv

SALTS = 2**31


class RecurringEnv(OneWordEnv):
    """Recurring states: walk a ring of rooms to a goal; episodes revisit the same rooms.

    Arriving earns 1. Actions in the same room can be compared across turns (`gigpo`, `group_gae`).

    Args:
        turns: Maximum turns.
        rooms: Rooms of the ring.
    """

    words = ("left", "right")

    def __init__(self, turns: int = 8, rooms: int = 6) -> None:
        """Sets the maximum turns and the size of the ring."""
        if not 3 <= rooms <= 16:
            raise ConfigError(f"Recurring: rooms is {rooms}, expected 3 to 16.")
        super().__init__(turns, num_tasks=rooms * (rooms - 1))
        self.rooms = rooms

    def _draw(self) -> None:
        self._room, self._goal = self.np_random.choice(self.rooms, 2, replace=False).tolist()

    @property
    def _task_key(self) -> str:
        return self._show()

    def _show(self) -> str:
        return f"room{self._room} goal{self._goal}"

    def _right(self) -> str:
        return "right" if 2 * ((self._goal - self._room) % self.rooms) <= self.rooms else "left"

    def _play(self, word: str) -> tuple[float, bool, float]:
        self._room = (self._room + (word == "right") - (word == "left")) % self.rooms
        there = self._room == self._goal
        return float(there), there, float(there)

    @property
    def _state_key(self) -> str:
        return str(self._room)


class DistractorEnv(CuedEnv):
    """Distractor turns: every other turn's reward is zero-mean noise that depends on the word.

    Right words in the remaining turns earn 1 in total.

    Args:
        turns: Turns of every episode, at least 2.
        noise: Size of the noise.
    """

    def __init__(self, turns: int = 8, noise: float = 0.5) -> None:
        """Sets the number of turns and the noise."""
        super().__init__(turns, fewest=2, num_tasks=len(CUES) ** turns * SALTS)
        self.noise = noise

    def _draw(self) -> None:
        super()._draw()
        self._salt = int(self.np_random.integers(SALTS))

    @property
    def _task_key(self) -> str:
        return f"{super()._task_key} {self._salt}"

    def _show(self) -> str:
        return super()._show() if self.turns_played % 2 == 0 else "noise"

    def _play(self, word: str) -> tuple[float, bool, float]:
        signals = (self.turns + 1) // 2
        reward = 0.0
        if self.turns_played % 2 == 0:
            right = word == self._right()
            self._hits += right
            reward = right / signals
        elif word in self.words:
            text = f"{self._salt}:{self.turns_played}:{word}".encode()
            heads = hashlib.blake2b(text, digest_size=1).digest()[0] % 2
            reward = self.noise * (1 if heads else -1)
        return reward, self._last, self._hits / signals


class MisleadingEnv(OneWordEnv):
    """A misleading dense reward: a bait earns 0.1 per turn, right words only if all are right.

    Right words in every turn earn 1 on the last.

    Args:
        turns: Turns of every episode.
    """

    words = ("work", "bait", "rest")

    def __init__(self, turns: int = 3) -> None:
        """Sets the number of turns."""
        super().__init__(turns)

    def _draw(self) -> None:
        self._right_so_far = True

    def _show(self) -> str:
        return f"turn{self.turns_played + 1}"

    def _right(self) -> str:
        return "work"

    def _play(self, word: str) -> tuple[float, bool, float]:
        self._right_so_far &= word == "work"
        won = float(self._last and self._right_so_far)
        return (0.1 if word == "bait" else won), self._last, won

    @property
    def _state_key(self) -> str:
        return f"{self.turns_played}:{self._right_so_far}"


class DensityEnv(OneWordEnv):
    """Decision density: a share of the turns decides the return, the others pay noise or nothing.

    A decision shows a cue, which has one right word; each right word earns 1 / decisions, paid
    `delay` turns later (on the last turn at the latest). Decisions are spread evenly. Every other
    turn is routine: whatever the word, it pays plus or minus `noise` / decisions, each with
    probability 1/2. The sign follows from the task and all words so far, so that the same seed and
    actions give the same episode, while no word is better than another over tasks. The outcome is
    the sum of the rewards.

    Args:
        turns: Turns of every episode, K.
        density: Share of the turns that are decisions, in (0, 1]: at least one turn is a decision.
        noise: Reward of a routine turn, in units of the reward of a decision.
        delay: Turns between a decision and its reward.
        cues: Different cues that a decision may show; with 1, its right word is always the same.

    Source:
        Decision density: arXiv 2606.22164.
    """

    credit_score = "turns"

    def __init__(
        self,
        turns: int = 16,
        density: float = 0.25,
        noise: float = 0.5,
        delay: int = 0,
        cues: int = len(CUES),
    ) -> None:
        """Sets the turns, the share of decisions, the noise, the delay and the cues."""
        if not 0 < density <= 1:
            raise ConfigError(f"Density: density is {density!r}, expected a number in (0, 1].")
        if not 0 <= noise < float("inf"):
            raise ConfigError(f"Density: noise is {noise!r}, expected at least 0.")
        if not 0 <= delay < max(turns, 1):
            raise ConfigError(f"Density: delay is {delay!r}, expected 0 to {turns - 1}.")
        if not 1 <= cues <= len(CUES):
            raise ConfigError(f"Density: cues is {cues!r}, expected 1 to {len(CUES)}.")
        self.decisions = decision_turns(turns, density)
        super().__init__(turns, num_tasks=cues ** max(len(self.decisions), 1) * SALTS)
        self.noise, self.delay, self.cues = noise, delay, cues

    def step(self, action: str) -> StepResult:
        """Plays one word; `reward_parts` has the share of right words, without the noise."""
        observation, reward, terminated, truncated, info = super().step(action)
        info["reward_parts"] = {"right": self._newest / len(self.decisions)}
        return observation, reward, terminated, truncated, info

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the right word, or any word if there is noise at all.

        Demonstrations with errors thus teach the format and nothing about the decisions.
        """
        return super().expert_action(1.0 if noise > 0.0 else 0.0)

    def _draw(self) -> None:
        self._cues: list[int] = self.np_random.integers(
            self.cues, size=len(self.decisions)
        ).tolist()
        self._salt = int(self.np_random.integers(SALTS))
        self._hits, self._newest = 0, 0
        self._due: dict[int, int] = {}  # right words by the turn that pays them
        self._digest = hashlib.blake2b(str(self._salt).encode(), digest_size=8)

    @property
    def _task_key(self) -> str:
        return " ".join([*(CUES[cue] for cue in self._cues), str(self._salt)])

    def _show(self) -> str:
        if self.turns_played not in self.decisions:
            return "routine"
        return CUES[self._cues[self.decisions.index(self.turns_played)]]

    def _right(self) -> str:
        if self.turns_played not in self.decisions:
            return self.words[0]
        return self.words[self._cues[self.decisions.index(self.turns_played)] % len(self.words)]

    def _play(self, word: str) -> tuple[float, bool, float]:
        share = 1 / len(self.decisions)
        self._digest.update(f"\0{word}".encode(errors="surrogatepass"))
        reward, self._newest = 0.0, 0
        if self.turns_played in self.decisions:
            self._newest = int(word == self._right())
            self._hits += self._newest
            paid = min(self.turns_played + self.delay, self.turns - 1)
            self._due[paid] = self._due.get(paid, 0) + self._newest
        else:
            heads = self._digest.copy().digest()[0] % 2
            reward = self.noise * share * (1 if heads else -1)
        reward += self._due.pop(self.turns_played, 0) * share
        return reward, self._last, self._hits * share

    @property
    def _state_key(self) -> str:
        owed = " ".join(f"{turn}+{count}" for turn, count in sorted(self._due.items()) if count)
        return f"{self.turns_played}:{owed}" if owed else str(self.turns_played)


def decision_turns(turns: int, density: float) -> tuple[int, ...]:
    """Returns the turns that are decisions, from 0: the middles of equal parts of the episode.

    Example:
        >>> decision_turns(16, 0.25)
        (2, 6, 10, 14)
    """
    count = max(1, round(turns * density))
    return tuple((2 * n + 1) * turns // (2 * count) for n in range(count))
