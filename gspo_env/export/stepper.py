"""One episode turn by turn, for libraries whose loop calls the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Generator, Sequence
from typing import Any

from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.env.registration import make_env, register_builtin, resolve_env
from gspo_env.errors import EnvironmentContractError
from gspo_env.rollout.play import PolicyInput, PolicyOutput, play
from gspo_env.seeding import HELD_OUT
from gspo_env.types import Episode, Message, StopReason, Task


class _Question:
    """Hands what a policy sees to the other library, and waits for its action."""

    def __init__(self, inputs: PolicyInput) -> None:
        self.inputs = inputs

    def __await__(self) -> Generator[PolicyInput, str | PolicyOutput, str | PolicyOutput]:
        return (yield self.inputs)


async def _ask(inputs: PolicyInput) -> str | PolicyOutput:
    return await _Question(inputs)


class Stepper:
    """Plays an environment with actions that come from outside; `play` runs the episode.

    Args:
        env: What `resolve_env` takes.
        env_kwargs: Arguments of the environment.

    Example:
        >>> stepper = Stepper("gspo/KeyDoor-v0", turns=2)
        >>> first = stepper.reset(seed=0)
        >>> [stepper.step("no") is None for turn in range(2)], stepper.episode.outcome
        ([False, True], 0.0)
    """

    def __init__(self, env: str | type, **env_kwargs: Any) -> None:
        """Makes the environment."""
        register_builtin()
        self.env_id = resolve_env(env)
        self.env: TextEnvironment = make_env(env, **env_kwargs)
        self.episode: Episode | None = None
        """The episode, once it is over."""
        self.observation = ""
        """The last observation, that of the end included."""
        self.now: PolicyInput | None = None
        """What the next action answers; None once the episode is over."""
        self._playing: Coroutine[Any, Any, Episode] | None = None

    def reset(self, seed: int, **options: Any) -> PolicyInput:
        """Begins an episode, and cuts one that is running.

        Raises:
            EnvironmentContractError: The environment cannot begin it.
        """
        self.cut()
        self.episode = None
        task = Task(env_id=self.env_id, seed=seed, options=options)
        self._playing = play(self.env, task, _ask)
        self._send(None)
        if self.now is None:
            raise EnvironmentContractError(f"{self.env_id}: {self._error()}")
        return self.now

    def step(self, action: str | PolicyOutput) -> PolicyInput | None:
        """Takes an action; returns what the next one answers, or None at the end.

        Raises:
            EnvironmentContractError: No episode is running, or the environment fails.
        """
        if self.now is None:
            raise EnvironmentContractError(f"{self.env_id}: step() was called outside an episode")
        self._send(action)
        if self.episode is not None and self.episode.failed:
            raise EnvironmentContractError(f"{self.env_id}: {self._error()}")
        return self.now

    def cut(self) -> Episode | None:
        """Ends a running episode, as at the rollout's limit of turns; returns the last episode."""
        if self.now is not None:
            self._send(PolicyOutput(stop=StopReason.MAX_TURNS))
            attribute(self.env, "abandon", lambda: None)()
        return self.episode

    def close(self) -> None:
        """Ends the episode and closes the environment."""
        self.cut()
        self.env.close()

    def _send(self, action: str | PolicyOutput | None) -> None:
        assert self._playing is not None
        try:
            self.now = self._playing.send(action)
            self.observation = self.now.observation
        except StopIteration as done:
            self.episode, self.now = done.value, None
            self.observation = done.value.final_observation

    def _error(self) -> str:
        return (self.episode.error if self.episode else None) or "the episode ended at its reset"


def conversation(now: PolicyInput) -> tuple[Message, ...]:
    """Returns the first conversation of an episode."""
    return now.prompt.first_messages(now.observation)


def record(episode: Episode) -> dict[str, Any]:
    """Returns what a library with one reward for an episode has no place for, as JSON."""
    parts: Counter[str] = Counter()
    for turn in episode.turns:
        parts.update(turn.info.reward_parts)
    return {
        "turn_rewards": [float(reward) for reward in episode.rewards],
        "outcome": float(episode.outcome),
        "success": bool(episode.success),
        "stop_reason": episode.stop_reason.value,
        "terminated": episode.ending.terminated,
        "truncated": episode.ending.truncated,
        "reward_parts": dict(parts),
    }


def seeds(count: int, *, first: int = 0, held_out: bool = False) -> Sequence[int]:
    """Returns seeds of training tasks, or of those that `evaluate` plays."""
    begin = first + (HELD_OUT if held_out else 0)
    return range(begin, begin + count)
