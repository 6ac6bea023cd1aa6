"""Environments that workers of tests play; each is named by the path of this file."""

import os
import signal
import time
from pathlib import Path

from gspo_env.env.base import TextEnv
from gspo_env.tools.tool import as_tool, tool


class Turns(TextEnv):
    """Takes some turns; what happens in the second one depends on the seed."""

    blocking = False

    def __init__(self, fails="", once="", turns=3):
        self.fails, self.once, self.turns = fails, once, turns

    @property
    def tools(self):
        @tool
        def look() -> str:
            """Looks around."""
            return f"turn {self.turn}"

        return [as_tool(look)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.turn = seed, 0
        return f"turn 0 of {seed}", {"task_key": str(seed)}

    def step(self, action):
        self.turn += 1
        if self.turn == 2 and self.seed % 3 == 1 and self.first():
            self.fail()
        done = self.turn == self.turns
        info = {"pid": os.getpid(), "odd": (line for line in "ab")}
        if done:
            info |= {"episodic_reward": len(action) / 10, "success": len(action) % 2 == 0}
        return f"turn {self.turn} of {self.seed}", 0.5, done, False, info

    def first(self):
        """Whether this did not happen before, where it happens only once."""
        if not self.once:
            return True
        try:
            Path(self.once, f"{self.fails}-once").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def fail(self):
        match self.fails:
            case "raises":
                raise ValueError("this seed is bad")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hangs":
                time.sleep(1000)
