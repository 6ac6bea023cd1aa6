"""Environments of one turn; a test changes the part that it is about."""

from gspo_env import TextEnv, ToolEnv


class Small(TextEnv):
    """Pays for every action."""

    blocking = False
    first = "go"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.first, {}

    def step(self, action):
        return "", self.reward(action), True, False, {}

    def reward(self, action):
        return 1.0


class Shown(Small):
    """It has a demonstrator."""

    def expert_action(self, noise=0.0):
        return "yes"


class Tools(ToolEnv):
    """Pays for a final answer; the tools are those of a subclass."""

    blocking = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return "go", {}

    def on_final(self, text):
        return "", 1.0, True
