"""TextWorld: `gym.make("gspo/TextWorld-v0", game="coin_collector")`."""

from __future__ import annotations

import argparse
import functools
import re
import threading
import warnings
from typing import Any

from gspo_env.errors import ConfigError, raised_as
from gspo_env.runtime.processes import PrivateFolder
from gspo_env.seeding import fingerprint
from gspo_envs.adapters.foreign import load
from gspo_envs.adapters.instances import check_choice
from gspo_envs.adapters.text_game import Screen, TextGameEnv

GAMES = {
    "simple": "--rewards dense --goal detailed",
    "coin_collector": "--level 5",
    "treasure_hunter": "--level 5",
    "cooking": "--recipe 1 --take 1 --cook",
}
"""Makers of games, with the options that they take here by default."""
_LOCK = threading.Lock()
_load = functools.partial(load, package="TextWorld", extra="textworld")
_folder = functools.cache(lambda: PrivateFolder("gspo-textworld-"))
"""Holds the compiled games of this process."""
_FIRST_TEST = 20_000
"""The first seed that evaluates."""
_META = {"save", "restore", "script", "transcrip", "restart", "quit", "q", "undo"}
"""Commands to the interpreter, some of which write files; it reads nine letters of a word."""


class TextWorldEnv(TextGameEnv):
    """A game that TextWorld makes from a seed; other seeds evaluate.

    A game is made and compiled at its first reset, which takes some seconds.

    Args:
        game: The maker, one of `GAMES`.
        params: Its options as for `tw-make`, such as "--level 10"; by default those of `GAMES`.
        games: Seeds to train on, and as many others to evaluate; at most 20,000.
        show_actions: See `TextGameEnv`.
        max_turns: Turns before the episode is truncated.

    Raises:
        ConfigError: The game is unknown, or its maker rejects the options, some only at a reset.
        MissingExtraError: TextWorld is not installed.
    """

    _env: Any = None

    def __init__(
        self,
        game: str = "coin_collector",
        *,
        params: str = "",
        games: int = 100,
        show_actions: bool = False,
        max_turns: int = 100,
    ) -> None:
        """Reads the options."""
        check_choice("TextWorld: game", game, tuple(GAMES))
        if not 1 <= games <= _FIRST_TEST:
            raise ConfigError(f"TextWorld: games is {games}, expected 1 to {_FIRST_TEST}.")
        self._world, self._make = _load("textworld"), _load("textworld.challenges").CHALLENGES
        self._name, self._params = game, params
        self._options = {split: self._read(params, split) for split in ("train", "test")}
        rows = [
            [{"game": game, "split": split, "seed": first + n} for n in range(games)]
            for split, first in (("train", 0), ("test", _FIRST_TEST))
        ]
        super().__init__(*rows, show_actions=show_actions, max_turns=max_turns)

    def open(self, row: Any, index: int, seed: int) -> Screen:
        """Makes the game of a seed, or begins it again."""
        self.close()
        names = ("won", "lost", "score", "max_score", "objective", "admissible_commands")
        infos = self._world.EnvInfos(**dict.fromkeys(names, True), extras=["walkthrough"])
        with _LOCK, warnings.catch_warnings():  # the maker has a state of its own
            warnings.simplefilter("ignore")  # jericho does not know these games, as it says
            self._env = self._world.start(self._compiled(row), infos)
            self._state = self._env.reset()
        text, goal = self._state.feedback, self._state.objective
        return self._screen(text[max(text.find(goal), 0) :])  # without the name in large letters

    def play(self, command: str) -> Screen:
        """Takes a command."""
        if any(word[:9] in _META for word in re.findall(r"\w+", command.lower())):
            return self._screen("That is not a command of the game.")
        self._state, *_ = self._env.step(command)
        return self._screen(self._state.feedback)

    def actions(self) -> list[str]:
        """Returns the commands that the game accepts now."""
        return list(self._state.admissible_commands)

    def gold(self) -> list[str]:
        """Returns the walkthrough of the maker."""
        return list(self._state["extra.walkthrough"])

    def close(self) -> None:
        """Ends the interpreter."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _read(self, params: str, split: str) -> dict[str, Any]:
        """Returns the options of the maker."""
        parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
        self._make[f"tw-{self._name}"][2](parser)
        words = ["--split", split] * (self._name == "cooking")  # unless `params` has another one
        words += (params or GAMES[self._name]).split()
        what, faults = f"TextWorld: params is {params!r}", (argparse.ArgumentError, SystemExit)
        usage = " ".join(parser.format_usage().split()[2:])
        with raised_as(ConfigError, what, *faults, mend=f"; expected {usage}"):
            return vars(parser.parse_args(words))

    def _compiled(self, row: Any) -> str:
        """Returns the file of a game."""
        settings = self._options[row["split"]]
        options = self._world.GameOptions()
        options.seeds, options.file_ext = row["seed"], ".z8"
        key = fingerprint(repr((row, settings)))
        path = _folder().path / f"{key}.z8"
        if not path.exists():
            options.path = str(path)
            with raised_as(ConfigError, f"TextWorld: params is {self._params!r}", ValueError):
                game = self._make[f"tw-{self._name}"][1](settings, options)
            self._world.generator.compile_game(game, options)
        return str(path)

    def _screen(self, text: str) -> Screen:
        state = self._state
        return Screen(
            text=text.rpartition("\n>")[0] or text,  # without the status line
            score=state.score / state.max_score,
            success=state.won,
            over=state.won or state.lost,
        )
