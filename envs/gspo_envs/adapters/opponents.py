"""Opponents of an environment for several players: a function, random moves, or a trained model."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from gspo_env.env.registration import load_agent
from gspo_env.errors import ConfigError
from gspo_env.registry import load_function

Opponent = Callable[[random.Random, str], str]
"""Chooses the action of another player from what that player reads next."""
MakeOpponent = Callable[[], Opponent]
"""Makes the opponent of one player for one episode."""


def random_opponent(rng: random.Random, observation: str) -> str:
    """Chooses among the last actions in brackets that the game has shown."""
    shown = re.findall(r"\[[^\[\]\n]{1,24}\]", observation)[-40:]
    return rng.choice(shown) if shown else "[0]"


def load_opponent(opponent: str | Opponent) -> tuple[MakeOpponent, bool]:
    """Returns what makes an opponent for each episode, and whether it waits for an engine.

    Args:
        opponent: A function, `module:function`, `file.py:function`, `random`, or the folder of a
            run or of a model, which is read as data. A folder is loaded once in a process; its
            model remembers the episode, and samples with random numbers of the environment.

    Raises:
        ConfigError: It is none of these.
        ModelError: The folder has no model that can be loaded.
    """
    if not isinstance(opponent, str):
        function = opponent
    elif opponent == "random":
        function = random_opponent
    elif Path(opponent).is_dir():
        return load_agent("frozen").load(opponent).player, True
    elif ":" in opponent:
        function = load_function(opponent, "opponent")
    else:
        raise ConfigError(
            f"opponent is {opponent!r}; expected 'random', the folder of a run or of a model, or "
            "module:function"
        )
    return lambda: function, False
