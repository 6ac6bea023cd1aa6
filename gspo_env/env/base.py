"""The environment contract: text in, text out, a reward for each turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium

from gspo_env.env.spaces import UnicodeText
from gspo_env.errors import ConfigError, EnvironmentContractError

if TYPE_CHECKING:
    from gspo_env.env.tools import Tool

MAX_TEXT_LENGTH = 16384

TextEnvironment = gymnasium.Env[str, str]
"""What the rollout plays: any Gymnasium environment over text."""
StepResult = tuple[str, float, bool, bool, dict[str, Any]]
ResetResult = tuple[str, dict[str, Any]]
Options = dict[str, Any] | None
"""What `reset` takes as `options`."""


class Action(str):
    """The action that `step` gets from the rollout: a text that knows the ids it was decoded from.

    An environment that judges tokens (a process reward model, a mask) may return one number for
    each of `token_ids` as `token_advantages` or `token_mask`, see `gspo_env.types.StepInfo`.
    """

    token_ids: tuple[int, ...]

    def __new__(cls, text: str, token_ids: Sequence[int] = ()) -> Action:
        """Make the text and remember its ids."""
        action = super().__new__(cls, text)
        action.token_ids = tuple(token_ids)
        return action


class TextEnv(gymnasium.Env[str, str]):
    """A Gymnasium environment whose observations and actions are text.

    `step` returns the reward of the turn. `gspo_env.types.ResetInfo` and `StepInfo` list the keys
    of `info` that training reads, such as `episodic_reward` and `success` on the last step.

    Args:
        max_turns: Turns after which `end_turn` truncates the episode; by default the class's.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    observation_space = UnicodeText(MAX_TEXT_LENGTH)
    action_space = UnicodeText(MAX_TEXT_LENGTH)
    system_prompt: str | None = None
    """What the policy is told before the first observation; `reset` may change it."""
    tools: Sequence[Tool] = ()
    """The tools that the chat template announces; `reset` may change them."""
    blocking: bool | None = None
    """False if `reset` and `step` never wait; all other environments run in threads, where the
    order of episodes, and with it the rounding of a batch, is not repeatable."""
    gives_outcome: bool | None = None
    """Whether finished episodes have an `episodic_reward`; None: the first finished ones decide."""
    outcome_if_cut: float = 0.0
    """Outcome of an episode that the rollout cut, where finished ones have an `episodic_reward`;
    at most that of the worst finished episode, else being cut pays."""
    max_turns: int | None = None
    """Turns after which `end_turn` truncates the episode."""

    _turn: int = 0
    """Turns of the episode that `end_turn` has counted."""
    _ended: bool = True

    def __init__(self, max_turns: int | None = None) -> None:
        """Set the limit on turns; a subclass without one need not call this."""
        if max_turns is not None:
            if max_turns < 1:
                name = type(self).__name__
                raise ConfigError(f"{name}: max_turns is {max_turns}, expected at least 1.")
            self.max_turns = max_turns

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Seed `np_random` and begin an episode."""
        super().reset(seed=seed, options=options)
        self._turn, self._ended = 0, False
        return "", {}

    def require_episode(self) -> None:
        """Refuse a step outside an episode; `step` calls it first.

        Raises:
            EnvironmentContractError: The episode has ended or has not begun.
        """
        if self._ended:
            raise EnvironmentContractError(
                f"{type(self).__name__}: step() was called outside an episode, call reset() first."
            )

    def end_turn(self, terminated: bool, truncated: bool = False) -> tuple[bool, bool]:
        """Count the turn; return both flags of the step, `max_turns` applied, never both true."""
        self._turn += 1
        late = self.max_turns is not None and self._turn >= self.max_turns
        truncated = not terminated and bool(truncated or late)
        self._ended = bool(terminated or truncated)
        return bool(terminated), truncated

    def expert_action(self, noise: float = 0.0) -> str:
        """Give the next action of a scripted demonstrator.

        Args:
            noise: Probability of a slip, drawn from `np_random`.

        Raises:
            NotImplementedError: The environment has no demonstrator.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scripted demonstrator")


def attribute(env: TextEnvironment, name: str, default: Any) -> Any:
    """Return an attribute of an environment, found through its wrappers, or the default."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def clean(text: str, limit: int | None = None) -> str:
    """Replace lone surrogates, for which no tokenizer has ids, and cut the text at a limit."""
    text = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    return text[:limit]


def extract_tag(text: str, tag: str) -> str | None:
    """Give the stripped content of the last `<tag>...</tag>` of a text, None without one.

    Example:
        >>> extract_tag("so <answer> 12 </answer>", "answer")
        '12'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None
