"""A tiny model that says yes half of the time, and an environment that pays for it."""

from pathlib import Path

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config, override

YES = """
from support.small_env import Small

class Yes(Small):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"Say yes, {seed % 9}.", {"task_key": str(seed % 9)}

    def reward(self, action):
        return float(action.strip() == "yes")

class Shown(Yes):
    def expert_action(self, noise=0.0):
        return "no" if self.np_random.random() < noise else "yes"
"""
SMALL = {
    "eval_tasks": 4,
    "steps": 1,
    "tasks_per_step": 2,
    "learner": {"learning_rate": 1e-9},
    "rollout": {"max_turn_tokens": 8, "max_context": 64, "group_size": 4},
    "tracker": "none",
}


def train_half(folder: Path) -> Path:
    """Writes `yes.py` and the model to a folder, which it returns."""
    (folder / "yes.py").write_text(YES)
    recipe = {"name": "tiny", "hidden_size": 32, "slips": 0.5, "demonstrations": 64}
    recipe |= {"imitation_steps": 30, "imitation_learning_rate": 1e-2}
    settings = override(Config(), {"recipe": recipe, **SMALL})
    agent = GSPOAgent(env=f"{folder}/yes.py:Shown", config=settings)
    agent.warm_up()
    agent.save(folder / "model")
    return folder
