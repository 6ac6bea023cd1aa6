"""MiniGrid and BabyAI as text: partially observed grid worlds."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from gspo_env.env.base import ResetResult, StepResult
from gspo_env.errors import MissingExtraError
from gspo_env.seeding import fingerprint
from gspo_envs.adapters.foreign import ForeignEnv, check_name, load

logger = logging.getLogger(__name__)

_ACTIONS = ("left", "right", "forward", "pick up", "drop", "toggle", "wait")
_KINDS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava")
_COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
_STATES = ("open", "closed", "locked")
_FACING = ("east", "south", "west", "north")
_PASSABLE = ("empty", "floor", "goal")


class MiniGridEnv(ForeignEnv):
    """Walk through partially observed rooms to a goal given in words (MiniGrid, BabyAI).

    The reward is the game's own: reaching the goal earns 1 - 0.9 x (turns / maximum turns), all
    else nothing. An unknown action takes a turn and changes nothing.

    Args:
        game: A Gymnasium id of the package, `BabyAI-...` or `MiniGrid-...`.
        max_turns: Turns before the episode is truncated; the game's own limit by default.

    Raises:
        MissingExtraError: The package `minigrid` is not installed.
        ConfigError: The package has no such game.
    """

    draws = False
    system_prompt = (
        "You walk through rooms on squares and see a few squares around you. Do what the mission "
        f"says. Each turn write one action: {', '.join(_ACTIONS)}. Forward walks one square, left "
        "and right turn you on the spot; pick up, drop and toggle (open and close doors and boxes, "
        "with the key of its colour where it is locked) act on the square in front of you."
    )

    def __init__(self, game: str = "BabyAI-GoToLocal-v0", max_turns: int | None = None) -> None:
        """Makes the game."""
        super().__init__(max_turns)
        self._game: Any = _make(game)
        self.game, self._limit = game, max_turns

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Draws new rooms."""
        seen, _ = self._game.reset(seed=seed)
        self._bot: Any = None
        self._done: int | None = None
        self._lost = False
        self.max_turns = self._limit or self._game.unwrapped.max_steps
        key = fingerprint(seen["mission"], self._game.unwrapped.hash(64))
        return f"Mission: {seen['mission']}.\n{describe(seen)}", self._info() | {"task_key": key}

    def act(self, action: str) -> StepResult:
        """Takes an action."""
        word = " ".join(action.lower().split()).strip(".")
        reward, terminated, truncated = 0.0, False, self._turn + 1 == self.max_turns
        if word in _ACTIONS:
            self._done = _ACTIONS.index(word)
            seen, reward, terminated, late, _ = self._game.step(self._done)
            truncated = truncated or late
            observation = describe(seen)
        else:
            observation = f"Write one action: {', '.join(_ACTIONS)}."
        info = self._info()
        if terminated or truncated:
            info["success"] = bool(reward > 0)
        return observation, float(reward), terminated, truncated, info

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the action of the package's own bot, or with probability `noise` any action.

        The bot fails if a box that it needs was opened; all later actions are then random.

        Raises:
            NotImplementedError: The game is not one of BabyAI's; only they have a bot.
        """
        from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

        if not hasattr(self._game.unwrapped, "instrs"):
            raise NotImplementedError(f"{self.game} has no scripted demonstrator")
        if self._bot is None:
            bot: Any = BabyAIBot
            self._bot, self._done = bot(self._game.unwrapped), None
        action = None
        if not self._lost:
            try:
                action = int(self._bot.replan(self._done))
            except DisappearedBoxError as error:
                logger.debug("%s: its bot gives up: %s", self.game, error)
                self._lost = True
        if action is None or (noise > 0.0 and self.np_random.random() < noise):
            action = int(self.np_random.integers(len(_ACTIONS)))
        return _ACTIONS[action]

    def close(self) -> None:
        """Closes the game."""
        self._game.close()
        self._ended = True

    def _info(self) -> dict[str, Any]:
        """Returns the state key, unless the state is more than the rooms (two-part missions)."""
        game = self._game.unwrapped
        if not hasattr(getattr(game, "instrs", None), "instr_a"):
            carried = game.carrying
            thing = f"{carried.color} {carried.type}" if carried else ""
            return {"state_key": f"{game.hash()}:{thing}"}
        return {}


def describe(seen: dict[str, Any]) -> str:
    """Describes the view of the agent, which is at the bottom in the middle.

    Example:
        `You face east. The way ahead is free for 2 squares, then a wall. You see a green key 2
        ahead and 1 to the left.`
    """
    image: NDArray[np.uint8] = seen["image"]
    width, depth = image.shape[:2]
    middle = width // 2
    things = [
        _thing(image[x, y]) + _where(depth - 1 - y, x - middle)
        for y in reversed(range(depth))
        for x in range(width)
        if _KINDS[image[x, y, 0]] not in ("unseen", "empty", "wall", "floor")
        and (x, y) != (middle, depth - 1)
    ]
    free = 0
    while free + 1 < depth and _passable(image[middle, depth - 2 - free]):
        free += 1
    beyond = image[middle, depth - 2 - free] if free + 1 < depth else None
    stop = "" if beyond is None or beyond[0] == 0 else f", then {_thing(beyond)}"
    held = image[middle, depth - 1]
    parts = [
        f"You face {_FACING[int(seen['direction'])]}.",
        f"The way ahead is free for {free} square{'s' * (free != 1)}{stop}.",
        f"You see {'; '.join(things)}." if things else "You see nothing else.",
    ]
    if _KINDS[held[0]] in ("key", "ball", "box"):
        parts.append(f"You carry {_thing(held)}.")
    return " ".join(parts)


def _thing(square: NDArray[np.uint8]) -> str:
    kind = _KINDS[square[0]]
    if kind in ("wall", "lava", "goal", "floor", "empty"):
        return {"wall": "a wall", "lava": "lava", "goal": "the goal"}.get(kind, kind)
    state = f"{_STATES[square[2]]} " if kind == "door" else ""
    words = f"{state}{_COLOURS[square[1]]} {kind}"
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def _where(ahead: int, side: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    if side:
        parts.append(f"{abs(side)} to the {'left' if side < 0 else 'right'}")
    return f" {' and '.join(parts)}"


def _passable(square: NDArray[np.uint8]) -> bool:
    kind = _KINDS[square[0]]
    return kind in _PASSABLE or (kind == "door" and _STATES[square[2]] == "open")


def _make(game: str) -> Any:
    load("minigrid", "MiniGrid", "minigrid")
    level = load("minigrid.envs.babyai.core.roomgrid_level", "MiniGrid", "minigrid")
    vars(level).setdefault("print", lambda *_: None)  # it prints each draw that it rejects
    ids = [i for i in gymnasium.registry if i.startswith(("MiniGrid-", "BabyAI-"))]
    check_name("MiniGrid", game, ids)
    try:
        return gymnasium.make(game, disable_env_checker=True)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"MiniGrid: {game} cannot be made: {error}.") from error
