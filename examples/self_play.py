"""Learns Nim by playing against itself: `gspo-env train --config examples/self_play.toml`."""

import random
import re

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
