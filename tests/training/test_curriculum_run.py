"""A curriculum in a run: its options reach the environment, and the evaluation has none."""

from __future__ import annotations

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.recipes.tiny import Tiny

GRADED = """
from gspo_env import TextEnv


class Graded(TextEnv):
    blocking = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = (options or {}).get("level", 100)
        return "go", {"task_key": str(seed)}

    def step(self, action):
        return "", float(self.level), True, False, {}

    def expert_action(self, noise=0.0):
        return "yes"
"""


def test_the_options_of_a_step_follow_from_the_results_before_it(tmp_path, in_folder):
    (tmp_path / "graded.py").write_text(GRADED)
    config = Config.from_recipe(
        Tiny(hidden_size=32, demonstrations=16, imitation_steps=40, imitation_learning_rate=1e-2),
        env="graded.py:Graded",
        steps=5,
        tasks_per_step=2,
        eval_every=0,
        eval_tasks=2,
        rollout={"group_size": 2, "max_turn_tokens": 8},
        curriculum={"name": "ladder", "option": "level", "values": [1, 2, 3], "success": 0.1},
        tracker="none",
    )
    history = GSPOAgent(config=config).train()
    training = [metrics for _, metrics in history if "rollout/return" in metrics]
    levels = [metrics["rollout/option/level"] for metrics in training]
    assert levels == [1, 1, 2, 2, 3]
    # an action that does not end within its limit is not seen by the environment
    assert all(0 < m["rollout/return"] <= level for m, level in zip(training, levels, strict=True))
    assert history[-1][1]["eval/return"] > 3
