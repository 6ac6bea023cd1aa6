"""Any Gymnasium environment as text: observations are written as text, actions parsed from it."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from gspo_env.env.base import Options, ResetResult, StepResult, TextEnv, extract_tag
from gspo_env.errors import ConfigError, EnvironmentContractError
from gspo_env.redaction import clean

MAX_NUMBERS = 1024
"""Maximum numbers in one observation or action; pixels are not text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """Facts about an environment that its spaces do not contain."""

    rules: str
    actions: tuple[str, ...]
    success: float
    """A terminal step with at least this reward is a success."""
    describe: Callable[[Any, Any], str]
    """Describes an observation, given the bare environment."""
    task: Callable[[Any, Any], str] = lambda env, observation: str(observation)
    """Names the drawn task, given the bare environment and the first observation."""


def _blackjack(env: Any, observation: Any) -> str:
    total, dealer, ace = (int(part) for part in observation)
    return f"You have {total}{' with a usable ace' if ace else ''}. The dealer shows {dealer}."


def _place(columns: int, observation: Any) -> str:
    row, column = divmod(int(observation), columns)
    return f"You are at row {row}, column {column}."


def _taxi(env: Any, observation: Any) -> str:
    row, column, passenger, goal = env.decode(int(observation))
    places = [f"at {name} (row {r}, column {c})" for name, (r, c) in zip("RGYB", env.locs)]  # noqa: B905
    where = [*places, "in the taxi"][passenger]
    return (
        f"The taxi is at row {row}, column {column}. The passenger is {where}. "
        f"The destination is {places[goal].removeprefix('at ')}."
    )


_FACTS = {
    "FrozenLakeEnv": _Facts(
        rules="Walk over the frozen lake from S to G; F is ice, H a hole, @ is you.",
        actions=("left", "down", "right", "up"),
        success=1.0,
        describe=lambda env, observation: _place(env.ncol, observation),
    ),
    "CliffWalkingEnv": _Facts(
        rules="Walk to T without stepping on C, the cliff; o is ground, x is you.",
        actions=("up", "right", "down", "left"),
        success=-1.0,
        describe=lambda env, observation: _place(env.shape[1], observation),
    ),
    "TaxiEnv": _Facts(
        rules="Fetch the passenger and set them down at the destination; | is a wall, @ the taxi.",
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
        success=20.0,
        describe=_taxi,
    ),
    "BlackjackEnv": _Facts(
        rules="Come closer to 21 than the dealer without going over.",
        actions=("stick", "hit"),
        success=1.0,
        describe=_blackjack,
        task=lambda env, observation: f"{env.player} {env.dealer}",
    ),
}


class GymTextEnv(TextEnv):
    """Any Gymnasium environment as text, `env="FrozenLake-v1"` by default.

    An action is written `<action>left</action>`: a name or number if actions are discrete, JSON for
    all other spaces. The system prompt gives the grammar.

    Args:
        env: Id of the Gymnasium environment.
        invalid_reward: Reward of a turn whose action cannot be parsed.
        invalid_steps: Whether the environment then takes a random action, or no step.
        max_turns: Turns before truncation, including unreadable actions; by default the
            environment's own limit, else 100.
        action_names: Names of discrete actions, in order; known for Gymnasium's `toy_text`.
        kwargs: Arguments of the environment, such as `is_slippery=False`.

    Raises:
        ConfigError: The environment cannot be made, or its spaces cannot be text.
    """

    blocking = False
    credit_score = "turns"

    def __init__(
        self,
        env: str = "FrozenLake-v1",
        *,
        invalid_reward: float = 0.0,
        invalid_steps: bool = False,
        max_turns: int | None = None,
        action_names: tuple[str, ...] = (),
        **kwargs: Any,
    ) -> None:
        """Makes the inner environment and the prompt."""
        super().__init__(max_turns)
        if not math.isfinite(invalid_reward):
            raise ConfigError(f"GymText: invalid_reward is {invalid_reward}, expected a number.")
        self.inner, self._id = _make(env, kwargs), env
        for name in ("observation_space", "action_space"):
            _refuse(env, name, getattr(self.inner, name))
        self._actions = copy.deepcopy(self.inner.action_space)  # a class may share its spaces
        limit = self.inner.spec.max_episode_steps if self.inner.spec else None
        self.max_turns = max_turns or limit or 100
        self.invalid_reward, self.invalid_steps = invalid_reward, invalid_steps
        self._facts = _FACTS.get(type(self.inner.unwrapped).__name__)
        self.limits_steps = self._facts is None
        self._names = tuple(action_names) or (self._facts.actions if self._facts else ())
        count = getattr(self._actions, "n", 0)
        if self._names and len(self._names) != count:
            raise ConfigError(
                f"GymText: action_names is {self._names}, expected {count} for {self._actions}."
            )
        self._grammar = f"<action>{_grammar(self._actions, self._names)}</action>"
        rules = self._facts.rules if self._facts else f"Act in {env}."
        self.system_prompt = f"{rules} Each turn, write one action as {self._grammar}."

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Resets the inner environment with a seed drawn from ours."""
        super().reset(seed=seed, options=options)
        inner_seed, action_seed = (int(s) for s in self.np_random.integers(2**31, size=2))
        observation, info = self.inner.reset(seed=inner_seed, options=options or None)
        self._actions.seed(action_seed)
        self._seen, self._taken = observation, False
        return self._show(observation), self._info(observation) | self._task(observation, info)

    def step(self, action: str) -> StepResult:
        """Parses an action and takes it.

        Raises:
            EnvironmentContractError: The episode has ended or has not begun.
        """
        self.require_episode()
        tagged = extract_tag(action, "action")
        space = self._actions
        value = read_action(space, action.strip() if tagged is None else tagged, self._names)
        lines, penalty, game_reward, info = [], 0.0, 0.0, {}
        terminated = truncated = False
        if value is None:
            lines, penalty = [f"Write one action as {self._grammar}."], self.invalid_reward
            info["invalid_action"] = True
            value = space.sample() if self.invalid_steps else None
        if value is not None:
            self._taken = True
            self._seen, reward, terminated, truncated, _ = self.inner.step(value)
            lines, game_reward = [*lines, self._show(self._seen)], self._number(reward)
        terminated, truncated = self.end_turn(terminated, truncated)
        info |= self._info(self._seen)
        if (terminated or truncated) and self._facts is not None:
            info["success"] = bool(terminated and game_reward >= self._facts.success)
        return "\n".join(lines), game_reward + penalty, terminated, truncated, info

    def close(self) -> None:
        """Closes the inner environment; `reset` may still be called."""
        self.inner.close()

    def expert_action(self, noise: float = 0.0) -> str:
        """Plays optimally if the environment has a table `P` of its transitions, else at random.

        With probability `noise` the action is drawn from the whole space.
        """
        if self._policy and self.np_random.random() >= noise:
            return f"<action>{self._write(self._policy[int(self._seen)])}</action>"
        return f"<action>{self._write(self._actions.sample())}</action>"

    @cached_property
    def _policy(self) -> dict[int, int]:
        return _solve(getattr(self.inner.unwrapped, "P", None) or {})

    @property
    def num_tasks(self) -> int | None:  # type: ignore[override]
        """The number of first states, if the environment has a table of their probabilities."""
        starts = getattr(self.inner.unwrapped, "initial_state_distrib", None)
        return None if starts is None else int(np.count_nonzero(starts))

    def _task(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        """Returns the inner environment's own task key, or that of a known environment."""
        key = info.get("task_key")
        if key is None and self._facts is not None:
            key = self._facts.task(self.inner.unwrapped, observation)
        return {} if key is None else {"task_key": key}

    def _write(self, action: Any) -> str:
        space = self._actions
        if isinstance(space, spaces.Discrete) and self._names:
            return self._names[int(action) - int(space.start)]
        return write_value(space, action)

    def _number(self, reward: Any) -> float:
        """Returns a reward, which some environments give as an array of one number.

        Raises:
            EnvironmentContractError: It is not one finite number.
        """
        with contextlib.suppress(TypeError, ValueError):
            numbers = np.asarray(reward, dtype=np.float64)
            if numbers.size == 1 and np.isfinite(numbers).all():
                return float(numbers.item())
        raise self._fault("reward", reward, "a finite number")

    def _fault(self, what: str, value: Any, expected: str) -> EnvironmentContractError:
        call = f"step {self.turns_played + 1}" if self._taken else "reset"
        return EnvironmentContractError(
            f"GymText: the {what} of {self._id} in {call} is {reprlib.repr(value)}, "
            f"expected {expected}."
        )

    def _show(self, observation: Any) -> str:
        parts = []
        if self.inner.render_mode == "ansi":
            parts.append(_plain(str(self.inner.render())))
        if self._facts is not None:
            parts.append(self._facts.describe(self.inner.unwrapped, observation))
        space = self.inner.observation_space
        try:
            text = "\n".join(parts) or write_value(space, observation)
        except (TypeError, ValueError, LookupError):
            raise self._fault("observation", observation, f"an element of {space}") from None
        return clean(text, self.observation_space.max_length)

    def _info(self, observation: Any) -> dict[str, Any]:
        space = self.inner.observation_space
        return {"state_key": write_value(space, observation)} if _is_discrete(space) else {}


def write_value(space: spaces.Space[Any], value: Any) -> str:
    """Formats an element of a space as text: JSON, or the bare text or number.

    Example:
        >>> write_value(spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,)))), (1, [0.5, 1]))
        '[1, [0.5, 1.0]]'
    """
    return str(value) if isinstance(space, spaces.Text) else json.dumps(_to_json(space, value))


def read_action(space: spaces.Space[Any], text: str, names: tuple[str, ...] = ()) -> Any:
    """Parses an element of a space from text; None if the text is not one of its elements.

    Example:
        >>> read_action(spaces.Discrete(2), "Hit", ("stick", "hit"))
        1
    """
    if isinstance(space, spaces.Text):
        return text if space.contains(text) else None
    folded = [name.casefold() for name in names]
    if isinstance(space, spaces.Discrete) and text.casefold() in folded:
        return int(space.start) + folded.index(text.casefold())
    try:
        value = _from_json(space, json.loads(text))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return value if space.contains(value) else None


def _to_json(space: spaces.Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _to_json(inner, value[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [_to_json(inner, v) for inner, v in zip(space.spaces, value, strict=True)]
    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return int(value)
    array = np.asarray(value, dtype=space.dtype)
    if array.dtype.kind != "f":
        return array.tolist()
    rounded = [float(f"{number:.4g}") for number in array.ravel()]
    return np.array(rounded).reshape(array.shape).tolist()


def _from_json(space: spaces.Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        if set(value) != set(space.spaces):
            raise ValueError("other keys")
        return {key: _from_json(inner, value[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_from_json(inner, v) for inner, v in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Text):
        return value
    if isinstance(space, spaces.Discrete):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError("not a whole number")
        return value
    array = np.asarray(value, dtype=np.float64).reshape(space.shape or ())
    with np.errstate(all="ignore"):
        cast = array.astype(space.dtype)
    if cast.dtype.kind != "f" and not np.array_equal(cast, array):
        raise ValueError("not whole numbers of the space")
    return cast


def _solve(table: dict[int, dict[int, list[tuple[float, int, float, bool]]]]) -> dict[int, int]:
    """Computes the best action of each state by value iteration with a discount of 0.99."""
    values = dict.fromkeys(table, 0.0)

    def worth(outcomes: list[tuple[float, int, float, bool]]) -> float:
        return sum(p * (gain + 0.99 * values[s] * (not done)) for p, s, gain, done in outcomes)

    change = 1.0
    while change > 1e-6:
        change = 0.0
        for state, actions in table.items():
            best = max(worth(outcomes) for outcomes in actions.values())
            change = max(change, abs(best - values[state]))
            values[state] = best
    return {
        state: max(actions, key=lambda action: worth(actions[action]))
        for state, actions in table.items()
    }


def _grammar(space: spaces.Space[Any], names: tuple[str, ...]) -> str:
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return "|".join(names) if names else f"number from {first} to {first + int(space.n) - 1}"
    if isinstance(space, spaces.Dict):
        inner = (f'"{key}": {_grammar(value, ())}' for key, value in space.spaces.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(space, spaces.Tuple):
        return f"[{', '.join(_grammar(value, ()) for value in space.spaces)}]"
    if isinstance(space, spaces.Text):
        return f"text of {space.min_length} to {space.max_length} characters"
    if isinstance(space, spaces.MultiDiscrete):
        return f"JSON list of whole numbers, each from {space.start.tolist()} and below " + str(
            (space.start + space.nvec).tolist()
        )
    if isinstance(space, spaces.MultiBinary):
        return f"JSON list of {list(space.shape)} zeros and ones"
    low, high = (write_value(space, bound) for bound in (space.low, space.high))  # type: ignore[attr-defined]
    return f"JSON list of shape {list(space.shape or ())} from {low} to {high}"


def _leaves(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    if isinstance(space, spaces.Dict):
        return [leaf for inner in space.spaces.values() for leaf in _leaves(inner)]
    if isinstance(space, spaces.Tuple):
        return [leaf for inner in space.spaces for leaf in _leaves(inner)]
    return [space]


def _is_discrete(space: spaces.Space[Any]) -> bool:
    kinds = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    return all(isinstance(leaf, kinds) for leaf in _leaves(space))


def _refuse(env: str, name: str, space: spaces.Space[Any]) -> None:
    kinds = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete, spaces.Text)
    for leaf in _leaves(space):
        if not isinstance(leaf, kinds):
            allowed = ", ".join(kind.__name__ for kind in (*kinds, spaces.Tuple, spaces.Dict))
            raise ConfigError(f"GymText: the {name} of {env} holds {leaf}, expected {allowed}.")
    numbers = sum(math.prod(leaf.shape or ()) for leaf in _leaves(space))
    if numbers > MAX_NUMBERS:
        raise ConfigError(
            f"GymText: the {name} of {env} holds {numbers} numbers, at most {MAX_NUMBERS} are text."
        )


def _make(env: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        inner = gymnasium.make(env, disable_env_checker=True, **kwargs)
        if "ansi" in inner.metadata.get("render_modes", []):
            inner.close()
            inner = gymnasium.make(env, disable_env_checker=True, render_mode="ansi", **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, KeyError) as error:
        reason = str(error).split(" was raised from")[0]
        raise ConfigError(f"GymText: {env!r} cannot be made with {kwargs}: {reason}") from error
    return inner


def _plain(ansi: str) -> str:
    """Replaces a coloured background by @ and removes other colours and the last action."""
    marked = re.sub(r"\x1b\[(?:\d+;)*4\d(?:;\d+)*m.\x1b\[0m", "@", ansi)
    lines = re.sub(r"\x1b\[[\d;]*m", "", marked).splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.startswith("  ("))
