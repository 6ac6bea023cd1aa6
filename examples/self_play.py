"""Learns Nim by playing against itself: `gspo-env train --config examples/self_play.toml`."""

import random
import re
from dataclasses import dataclass

import numpy as np

from gspo_env.credit import Estimator
from gspo_envs.adapters.textarena import TextArenaEnv


def legal(rng, observation):
    """The random player: takes some objects of one of the piles that it was shown last."""
    piles = [(n, size) for n, size in dict(re.findall(r"pile (\d+): (\d+)", observation)).items()]
    pile, size = rng.choice([(n, int(size)) for n, size in piles if size != "0"])
    return f"[{pile} {rng.randint(1, size)}]"


class Nim(TextArenaEnv):
    """TextArena's Nim; evaluations are games against the random player, which moves second."""

    max_turns = 12

    def __init__(self, opponent="self", eval_opponent=legal, piles=(1, 2, 4)):
        players = {"opponent": opponent, "eval_opponent": eval_opponent}
        super().__init__("Nim-v0", players=2, piles=list(piles), **players)

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        self.seen = observation
        return observation, info | {"state_key": self.state()}

    def step(self, action):
        self.seen, *rest, info = super().step(action)
        return self.seen, *rest, info | {"state_key": self.state()}

    def state(self):
        game = self._bare.state
        return f"{game.game_state['piles']} {game.error_count}"

    def expert_action(self, noise=0.0):  # shows the tiny model legal moves, not good ones
        return legal(random.Random(int(self.np_random.integers(2**32))), self.seen)


@dataclass(frozen=True, kw_only=True)
class ByPlayer(Estimator):
    """Credits each turn with the reward of the player whose turn it was.

    Its baseline is the mean of what that player got after all turns of the group from this state.
    """

    credits_agents = True

    def advantages(self, group):
        got, visits = [], {}
        for i, episode in enumerate(group.episodes):
            # a game that was cut is lost for both
            parts = episode.turns[-1].info.reward_parts if episode.turns else {}
            players = [episode.reset.agent, *(turn.info.agent for turn in episode.turns[:-1])]
            players = players[: len(episode.turns)]
            got.append(np.array([parts.get(player, -1.0) for player in players]))
            for k, (turn, player) in enumerate(zip(episode.turns, players, strict=True)):
                visits.setdefault((turn.state_key, player), []).append((i, k))
        rows = [np.zeros(len(episode.turns)) for episode in group.episodes]
        for same in visits.values():
            mean = np.mean([got[i][k] for i, k in same])
            for i, k in same:
                rows[i][k] = got[i][k] - mean
        return rows
