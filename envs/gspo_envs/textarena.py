"""TextArena's games: `gym.make("gspo/TextArena-v0", game="TowerOfHanoi-v0")`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from gspo_env.env.base import ResetResult, StepResult
from gspo_env.importing import load_function
from gspo_envs.foreign import ForeignEnv, check_name, load, making, snapshot

Opponent = Callable[[random.Random, str], str]
"""Chooses the action of another player from that player's observation."""

_MOST_MOVES = 1000


def random_opponent(rng: random.Random, observation: str) -> str:
    """Chooses among the last actions in brackets that the game has shown."""
    shown = re.findall(r"\[[^\[\]\n]{1,24}\]", observation)[-40:]
    return rng.choice(shown) if shown else "[0]"


class TextArenaEnv(ForeignEnv):
    """A game of TextArena; the reward of the whole game comes with its last turn.

    Each reset makes a new game, and an observation contains only what is new: TextArena's own
    wrappers repeat the whole history, even that of the previous episode.

    Args:
        game: TextArena's id, such as "TowerOfHanoi-v0".
        players: Number of players that the game needs; the policy is the first.
        opponent: `module:function`, `file.py:function` or a function that plays all others.
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
        opponent: str | Opponent = random_opponent,
        max_turns: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Tries out the game."""
        super().__init__(max_turns)
        self._textarena = load("textarena", "TextArena", "textarena")
        registry = load("textarena.envs.registration", "TextArena", "textarena").ENV_REGISTRY
        check_name("TextArena", game, registry)
        self.game, self.players, self._kwargs = game, players, kwargs
        if isinstance(opponent, str):
            opponent = load_function(opponent, "opponent")
        self._opponent = opponent
        # games reject a number of players in many ways
        with making(game, f"played by {players} with arguments {kwargs}", Exception):
            self.begin(0, {})

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Makes a new game."""
        self._outer: Any = self._textarena.make(self.game, **self._kwargs)
        self._outer.reset(num_players=self.players, seed=seed)
        self._rng = random.Random(seed)
        observation = self._read(self._let_others_move())
        seen = {"observation": observation}
        key = snapshot(seen, vars(self._bare), self._bare.state.game_state)
        return observation, {"task_key": key}

    def act(self, action: str) -> StepResult:
        """Plays the policy's turn and those of all other players."""
        done, _ = self._outer.step(action)
        if not (done or self._let_others_move()):
            return self._read(False), 0.0, False, False, {}
        rewards, notes = self._bare.close()
        note = (notes or {}).get(0, {})
        reward, reason = (rewards or {}).get(0, 0.0), str(note.get("reason") or "")
        if isinstance(reward, str):  # some games return these two in the wrong order
            reward, reason = reason.removeprefix("Invalid Move: "), reward
        reward = float(reward)
        info = {"success": reward >= 1.0, "invalid_move": bool(note.get("invalid_move"))}
        return f"{self._read(True)}\n{reason}".strip(), reward, True, False, info

    @property
    def _bare(self) -> Any:
        game = self._outer
        while isinstance(game, self._textarena.Wrapper):
            game = game.env
        return game

    def _let_others_move(self) -> bool:
        for _ in range(_MOST_MOVES):
            if self._bare.state.current_player_id == 0:
                return False
            player, messages = self._bare.get_observation()
            if self._outer.step(self._opponent(self._rng, self._say(messages, player)))[0]:
                return True
        raise RuntimeError(f"{self.game}: the others made {_MOST_MOVES} moves in one turn")

    def _read(self, done: bool) -> str:
        state = self._bare.state
        if done:  # it may be any player's turn
            messages, state.observations[0] = state.observations[0], []
        else:
            messages = self._bare.get_observation()[1]
        return self._say(messages, 0)

    def _say(self, messages: Any, reader: int) -> str:
        """Joins messages, without the player's own actions, which the transcript already has."""
        game = self._textarena.GAME_ID
        own = (reader, game) if self.players == 1 else (reader,)
        lines = []
        for sender, text, kind in messages:
            if sender in own and kind is self._textarena.ObservationType.PLAYER_ACTION:
                continue
            speaker = "" if sender == game else f"[Player {sender}] "
            lines.append(f"{speaker}{text}")
        return "\n".join(lines)
