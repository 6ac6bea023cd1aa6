"""TextWorldExpress: `gym.make("gspo/TextWorldExpress-v0", game="coin")`."""

from __future__ import annotations

import json
from typing import Any

from gspo_env.errors import ConfigError
from gspo_envs.adapters.foreign import load
from gspo_envs.adapters.instances import check_choice
from gspo_envs.adapters.text_game import JavaGameEnv, Screen

GAMES = (
    *("arithmetic", "coin", "cookingworld", "mapreader", "peckingorder", "simonsays"),
    *("sorting", "twc"),
)
_GOLD: dict[tuple[str, ...], list[str]] = {}
"""Solutions, since the random walks that find some of them have no seed."""


class TextWorldExpressEnv(JavaGameEnv):
    """A game of TextWorldExpress; training plays its 1,000 training seeds, evaluation its test.

    Args:
        game: One of `GAMES`.
        params: The game's parameters, such as "numLocations=3,includeDoors=0".
        show_actions: Whether each observation ends with the commands that the game accepts.
        max_turns: Turns before the episode is truncated.
        memory: MiB of Java's heap, shared by the games of this process.
        timeout: Seconds that one call of Java may take.

    Raises:
        ConfigError: The game or a parameter is unknown.
        MissingExtraError: TextWorldExpress or Java is not installed.
    """

    interface = "textworldexpress.runtime.PythonInterface"

    def __init__(
        self,
        game: str = "coin",
        *,
        params: str = "",
        show_actions: bool = False,
        max_turns: int = 100,
        memory: int = 128,
        timeout: float = 60.0,
    ) -> None:
        """Lists the seeds."""
        check_choice("TextWorldExpress: game", game, GAMES)
        constants = load("textworld_express.constants", "TextWorldExpress", "textworld-express")
        self.jar, self._name, self._params = constants.JAR_PATH, game, params
        self.shares = game != "sorting"
        train, test = (
            [{"game": game, "fold": fold, "seed": first + n} for n in range(1000)]
            for fold, first in (("train", 0), ("test", 20000))
        )
        super().__init__(
            *(train, test),
            show_actions=show_actions,
            max_turns=max_turns,
            memory=memory,
            timeout=timeout,
        )

    def open(self, row: Any, index: int, seed: int) -> Screen:
        """Begins the game of a seed."""
        key = self._name, self._params, row["fold"], row["seed"]
        if key not in _GOLD:  # first, since the games of `sorting` share a state
            game = self._begun(row, gold=True)
            _GOLD.setdefault(key, list(game.getGoldActionSequence()))
        self._gold = _GOLD[key]
        self._game = self._begun(row, gold=False)
        return self._screen(f"{self._game.getTaskDescription()}\n\n")

    def play(self, command: str) -> Screen:
        """Takes a command."""
        self._state = json.loads(self._game.stepJSON(command))
        return self._screen()

    def actions(self) -> list[str]:
        """Returns the commands that the game accepts now."""
        return list(self._state["validActions"])

    def gold(self) -> list[str]:
        """Returns the game's own solution, which may differ from process to process."""
        return self._gold

    def _begun(self, row: Any, *, gold: bool) -> Any:
        game = self.new_game()
        if problem := game.load(self._name, self._params):
            raise ConfigError(f"TextWorldExpress: params is {self._params!r}: {problem}")
        self._state = json.loads(game.generateNewGameJSON(row["seed"], row["fold"], gold))
        if self._state["taskfailure"]:  # a value that the game cannot read is told nowhere else
            raise ConfigError(
                f"TextWorldExpress: params is {self._params!r}: {self._state['observation']} "
                "Expected whole numbers, as in numLocations=3."
            )
        return game

    def _screen(self, before: str = "") -> Screen:
        state = self._state
        return Screen(
            text=before + state["observation"],
            score=state["score"],
            success=state["tasksuccess"],
            over=state["tasksuccess"] or state["taskfailure"],
        )
