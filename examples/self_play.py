"""Learns Nim by playing against itself: `gspo-env train --config examples/self_play.toml`."""

import random
import re
from dataclasses import dataclass

import numpy as np

from gspo_envs.textarena import TextArenaEnv


def legal(rng, observation):
    """The random player: takes some objects of one of the piles that it was shown last."""
    piles = dict(re.findall(r"pile (\d+): (\d+)", observation))
    pile, size = rng.choice([(n, int(size)) for n, size in piles.items() if size != "0"])
    return f"[{pile} {rng.randint(1, size)}]"


class Nim(TextArenaEnv):
    """Nim with two random piles; evaluations are games against the random player."""

    max_turns = 12

    def __init__(self, opponent="self", eval_opponent=legal, largest=4):
        self.largest = largest
        super().__init__("Nim-v0", players=2, opponent=opponent, eval_opponent=eval_opponent)

    def begin(self, seed, options):
        draw = random.Random(seed)
        self._kwargs = {"piles": [draw.randint(1, self.largest) for _ in range(2)]}
        observation, info = super().begin(seed, options)
        self.shown = observation
        return observation, info

    def act(self, action):
        result = super().act(action)
        self.shown = result[0]
        return result

    def expert_action(self, noise=0.0):  # shows the tiny model legal moves, not good ones
        return legal(random.Random(int(self.np_random.integers(2**32))), self.shown)


@dataclass(frozen=True, kw_only=True)
class ByPlayer:
    """Credits each turn with what its player got, less the mean of that player in the group."""

    def advantages(self, group):
        turns = []  # of each episode: the player of each turn, and what that player got
        for episode in group.episodes:
            parts = episode.turns[-1].info.reward_parts if episode.turns else {}
            players = [episode.reset.agent, *(turn.info.agent for turn in episode.turns[:-1])]
            # a game that was cut is lost for both
            turns.append([(player, parts.get(player, -1.0)) for player in players])
        firsts = [pair for row in turns for pair in dict(row).items()]
        mean = {p: np.mean([got for q, got in firsts if q == p]) for p, _ in firsts}
        rows = [np.array([got - mean[player] for player, got in row]) for row in turns]
        return [row[: len(e.turns)] for row, e in zip(rows, group.episodes, strict=True)]
