"""The environment contract: text in, text out, a reward for each turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from gspo_env.env.spaces import UnicodeText
from gspo_env.errors import EnvironmentContractError

if TYPE_CHECKING:
    from gspo_env.env.tools import Tool

MAX_TEXT_LENGTH = 16384

TextEnvironment = gymnasium.Env[str, str]
"""What the rollout plays: any Gymnasium environment over text."""
StepResult = tuple[str, float, bool, bool, dict[str, Any]]
ResetResult = tuple[str, dict[str, Any]]


class Action(str):
    """An action as `step` gets it from the rollout: a text that knows the ids it was decoded from.

    An environment that judges tokens (a process reward model, a mask) may put one number for each
    of `token_ids` into its info: `token_advantages` reach the loss unchanged in the place of the
    estimator's, and tokens whose `token_mask` is false are context, not trained on.
    """

    token_ids: tuple[int, ...]

    def __new__(cls, text: str, token_ids: Sequence[int] = ()) -> Action:
        """Make the text and remember its ids."""
        action = super().__new__(cls, text)
        action.token_ids = tuple(token_ids)
        return action


class TextEnv(gymnasium.Env[str, str]):
    """A Gymnasium environment whose observations and actions are text.

    `step` returns the reward of the turn. On the last step `info["episodic_reward"]` may hold the
    outcome of the episode (default: the sum of the turns' rewards) and `info["success"]` a bool.
    `info["reward_parts"]` may name finite numbers that become the metrics `train/reward/NAME`.
    Messages of a conversation that began before the episode are `info["chat_history"]` of `reset`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    render_mode: str | None = None
    observation_space = UnicodeText(MAX_TEXT_LENGTH)
    action_space = UnicodeText(MAX_TEXT_LENGTH)
    system_prompt: str | None = None
    """What the policy is told before the first observation."""
    tools: Sequence[Tool] = ()
    """The tools that the chat template announces."""
    blocking: bool | None = None
    """Whether `step` waits on something outside; None lets the rollout find out."""

    def expert_action(self, noise: float = 0.0) -> str:
        """Give the next action of a scripted demonstrator.

        Args:
            noise: Probability of a slip, drawn from `np_random`.

        Raises:
            NotImplementedError: The environment has no demonstrator.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scripted demonstrator")


def extract_tag(text: str, tag: str) -> str | None:
    """Give the stripped content of the last `<tag>...</tag>` of a text, None without one.

    Example:
        >>> extract_tag("so <answer> 12 </answer>", "answer")
        '12'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def try_out(env_id: str, env: gymnasium.Env[str, str]) -> None:
    """Play one turn, so that a broken environment is found before anything is built on it.

    Raises:
        EnvironmentContractError: `reset` or `step` raised, or returned something else than text,
            a finite reward, two flags and a dict.
    """
    method = "reset(seed=0)"
    try:
        check_reset(env_id, env.reset(seed=0))
        method = "step('')"
        check_step(env_id, env.step(""))
    except EnvironmentContractError:
        raise
    except Exception as error:
        raise EnvironmentContractError(
            f"{env_id}: {method} raised {type(error).__name__}: {error}."
        ) from error


def check_step(env_id: str, result: object) -> StepResult:
    """Validate what `step` returned and give it with a Python float and Python bools.

    Raises:
        EnvironmentContractError: A part has the wrong type, or the reward is not finite.
    """
    if type(result) is tuple and len(result) == 5:
        observation, reward, terminated, truncated, info = result
        if (
            type(observation) is str
            and type(reward) is float
            and reward - reward == 0.0  # false for NaN and both infinities
            and type(terminated) is bool
            and type(truncated) is bool
            and type(info) is dict
        ):
            return result
    return _check_step_slowly(env_id, result)


def check_reset(env_id: str, result: object) -> ResetResult:
    """Validate what `reset` returned.

    Raises:
        EnvironmentContractError: It is not a pair of a text and a dict.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise _broken(env_id, "reset() result", result, "a tuple (observation, info)")
    observation, info = result
    _check_text_and_info(env_id, "reset()", observation, info)
    return observation, info


def check_tokens(env_id: str, info: dict[str, Any], count: int) -> None:
    """Validate what `step` said of single tokens.

    Raises:
        EnvironmentContractError: Not one finite number for each of the `count` sampled tokens.
    """
    for name in ("token_advantages", "token_mask"):
        if name not in info:
            continue
        try:
            values = np.asarray(info[name], dtype=np.float64)
        except (TypeError, ValueError):
            values = np.zeros(0)
        if values.shape != (count,) or not np.isfinite(values).all():
            expected = f"{count} finite numbers, one per sampled token"
            raise _broken(env_id, f"info[{name!r}]", info[name], expected)


def check_parts(env_id: str, info: dict[str, Any]) -> None:
    """Validate the named parts of a reward.

    Raises:
        EnvironmentContractError: Not a dict of finite numbers by name.
    """
    parts = info.get("reward_parts", {})
    named = isinstance(parts, dict) and all(isinstance(name, str) for name in parts)
    if not named or not all(_is_finite(value) for value in parts.values()):
        raise _broken(env_id, "info['reward_parts']", parts, "a dict of finite numbers by name")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value)


def _check_step_slowly(env_id: str, result: object) -> StepResult:
    if not isinstance(result, tuple) or len(result) != 5:
        expected = "a tuple (observation, reward, terminated, truncated, info)"
        raise _broken(env_id, "step() result", result, expected)
    observation, reward, terminated, truncated, info = result
    _check_text_and_info(env_id, "step()", observation, info)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise _broken(env_id, f"step() {name}", flag, "a bool")
    value = _finite_reward(env_id, reward)
    return observation, value, bool(terminated), bool(truncated), info


def _finite_reward(env_id: str, reward: object) -> float:
    if isinstance(reward, np.ndarray) and reward.ndim == 0:
        reward = reward[()]
    number = isinstance(reward, (int, float, np.integer, np.floating))
    if not number or isinstance(reward, bool):
        raise _broken(env_id, "step() reward", reward, "a finite number")
    try:
        value = float(reward)  # type: ignore[arg-type]
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise _broken(env_id, "step() reward", reward, "a finite number")
    return value


def _check_text_and_info(env_id: str, method: str, observation: object, info: object) -> None:
    if not isinstance(observation, str):
        raise _broken(env_id, f"{method} observation", observation, "a str")
    if not isinstance(info, dict):
        raise _broken(env_id, f"{method} info", info, "a dict")


def _broken(env_id: str, what: str, got: object, expected: str) -> EnvironmentContractError:
    shown = repr(got)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return EnvironmentContractError(
        f"{env_id}: {what} is {shown} of type {type(got).__name__}, expected {expected}."
    )
