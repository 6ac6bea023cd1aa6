"""TextArena's games: `gym.make("gspo/TextArena-v0", game="TowerOfHanoi-v0")`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from gspo_env.env.base import Options, ResetResult, StepResult
from gspo_env.env.registration import load_agent
from gspo_env.errors import ConfigError
from gspo_env.registry import load_function
from gspo_env.seeding import HELD_OUT
from gspo_envs.adapters.foreign import ForeignEnv, check_name, load, making, snapshot

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


_MOST_MOVES = 1000


class TextArenaEnv(ForeignEnv):
    """A game of TextArena; the reward of the whole game comes with its last turn.

    Each reset makes a new game, and an observation contains only what is new: TextArena's own
    wrappers repeat the whole history, even that of the previous episode.

    Args:
        game: TextArena's id, such as "TowerOfHanoi-v0".
        players: Number of players that the game needs; the policy is the first.
        opponent: Plays all others: `random`, the folder of a run or of a model, `module:function`,
            `file.py:function` or a function. With `self`, the policy plays all players in one
            transcript: `info["agent"]` names the player whose turn it is, and the `reward_parts`
            of the last turn hold the reward of each.
        eval_opponent: The opponent in evaluations, which have seeds of their own; `opponent` by
            default.
        max_turns: Turns before truncation; most games have their own limit.
        kwargs: Arguments of the game, such as `num_disks=4`.

    Raises:
        ConfigError: The game is unknown, broken or needs another number of players.
        MissingExtraError: TextArena, or word lists of NLTK that the game needs, are not installed.
    """

    def __init__(
        self,
        game: str = "TowerOfHanoi-v0",
        *,
        players: int = 1,
        opponent: Literal["random", "self"] | str | Opponent = "random",
        eval_opponent: Literal["random", "self"] | str | Opponent | None = None,
        max_turns: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Tries out the game."""
        super().__init__(max_turns)
        self.blocking, self._evaluates = False, False
        self._textarena = load("textarena", "TextArena", "textarena")
        registry = load("textarena.envs.registration", "TextArena", "textarena").ENV_REGISTRY
        check_name("TextArena", game, registry)
        self.rewards_by_agent = opponent == "self"
        self.game, self.players, self._kwargs = game, players, kwargs
        if "self" in (opponent, eval_opponent) and players < 2:
            raise ConfigError(f"opponent is 'self' and players {players}; expected 2 or more")
        self._make = self._find(opponent)
        self._make_eval = self._make if eval_opponent is None else self._find(eval_opponent)
        # games reject a number of players in many ways
        with making(game, f"played by {players} with arguments {kwargs}", Exception):
            self.begin(0, {})

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins an episode against the opponent of the training or of the evaluation."""
        self._evaluates = seed is not None and seed >= HELD_OUT
        return super().reset(seed=seed, options=options)

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Makes a new game."""
        self._outer: Any = self._textarena.make(self.game, **self._kwargs)
        self._outer.reset(num_players=self.players, seed=seed)
        self._rng = random.Random(seed)
        self._others: dict[int, Opponent] = {}
        observation = self._read(self._let_others_move())
        seen = {"observation": observation}
        key = snapshot(seen, vars(self._bare), self._bare.state.game_state)
        return observation, {"task_key": key, **self._agent()}

    def act(self, action: str) -> StepResult:
        """Plays the policy's turn and those of all other players."""
        done, _ = self._outer.step(action)
        if not (done or self._let_others_move()):
            return self._read(False), 0.0, False, False, self._agent()
        rewards, notes = self._bare.close()
        note = (notes or {}).get(0, {})
        reward, reason = (rewards or {}).get(0, 0.0), str(note.get("reason") or "")
        if isinstance(reward, str):  # some games return these two in the wrong order
            reward, reason = reason.removeprefix("Invalid Move: "), reward
        reward = float(reward)
        info: dict[str, Any] = {"success": reward >= 1.0, "scored": 0 in (rewards or {})}
        info["invalid_move"] = bool(note.get("invalid_move"))
        if self._maker is None:
            info["reward_parts"] = {f"player_{n}": float(r) for n, r in (rewards or {}).items()}
        return f"{self._read(True)}\n{reason}".strip(), reward, True, False, info

    @property
    def _bare(self) -> Any:
        game = self._outer
        while isinstance(game, self._textarena.Wrapper):
            game = game.env
        return game

    def _find(self, opponent: str | Opponent) -> MakeOpponent | None:
        """Loads an opponent; None if the policy plays all players."""
        if opponent == "self":
            return None
        make, waits = load_opponent(opponent)
        self.blocking = self.blocking or waits  # then the environment runs in a thread
        return make

    @property
    def _maker(self) -> MakeOpponent | None:
        return self._make_eval if self._evaluates else self._make

    def _agent(self) -> dict[str, Any]:
        """Returns the `info` that names the next player, if the policy plays all of them."""
        if self._maker is not None:
            return {}
        return {"agent": f"player_{self._bare.state.current_player_id}"}

    def _let_others_move(self) -> bool:
        make = self._maker
        for _ in range(_MOST_MOVES):
            if make is None or self._bare.state.current_player_id == 0:
                return False
            player, messages = self._bare.get_observation()
            if player not in self._others:
                self._others[player] = make()
            other = self._others[player]
            observation = self._say(messages, player)
            with self._elsewhere():
                action = other(self._rng, observation)
            if self._outer.step(action)[0]:
                return True
        raise RuntimeError(f"{self.game}: the others made {_MOST_MOVES} moves in one turn")

    def _read(self, done: bool) -> str:
        state = self._bare.state
        if done:  # it may be any player's turn
            messages, state.observations[0] = state.observations[0], []
            return self._say(messages, 0)
        reader, messages = self._bare.get_observation()
        return self._say(messages, reader)

    def _say(self, messages: Any, reader: int) -> str:
        """Joins messages, without the player's own actions, which the transcript already has."""
        game = self._textarena.GAME_ID
        silent = (reader, game) if self.players == 1 else (reader,)
        lines = []
        for sender, text, kind in messages:
            if sender in silent and kind is self._textarena.ObservationType.PLAYER_ACTION:
                continue
            speaker = "" if sender == game else f"[Player {sender}] "
            lines.append(f"{speaker}{text}")
        return "\n".join(lines)
