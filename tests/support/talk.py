"""Short talks for real runs; files in the working folder make them wait or fail."""

import asyncio
import random
import time
import zlib
from pathlib import Path

import numpy as np
import torch

from gspo_env import TextEnv


class Talk(TextEnv):
    """Some turns with a reward for each text; or an outcome from the global generators.

    Training waits in it while there is a file `wait`, and each step while there is `slow`.
    """

    blocking = False

    def __init__(self, turns=3, noise=0.0, lead=""):
        super().__init__()
        self.turns, self.noise, self.lead = turns, noise, lead

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn, self.seed = 0, seed
        return f"{self.lead}say {seed % 7}", {"task_key": str(seed)}

    def step(self, action):
        if Path("wait").exists():
            Path("waiting").touch()
            time.sleep(60)
        if Path("slow").exists():
            time.sleep(0.1)
        self.turn += 1
        done, reward = self.turn == self.turns, zlib.crc32(action.encode()) % 5 / 4
        if not self.noise:
            return "more", reward, done, False, {}
        drawn = random.random() + np.random.random() + float(torch.rand(()))
        return "more", 0.0, done, False, {"episodic_reward": drawn} if done else {}

    def expert_action(self, noise=0.0):
        return self.np_random.choice(["yes", "no", "maybe so"]).item()

    def close(self):
        if Path("unclosable").exists():
            raise RuntimeError("does not close")


class Uneven(Talk):
    """Some of its steps are slow."""

    blocking = None

    async def step(self, action):
        if getattr(action, "token_ids", ()) and self.seed % 5 == 0:
            await asyncio.sleep(0.2)
        return super().step(action)


class Declared(Talk):
    """It declares its score, so the settings of a run are not those of its file."""

    credit_score = "turns"
