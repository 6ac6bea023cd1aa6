"""A curriculum in a run: its options reach the environment, and the evaluation has none."""

from __future__ import annotations

import runs

from gspo_agents.gspo import GSPOAgent

GRADED = """
from small_env import Shown


class Graded(Shown):
    def reset(self, *, seed=None, options=None):
        self.level = (options or {}).get("level", 100)
        return super().reset(seed=seed)

    def reward(self, action):
        return float(self.level)
"""


def test_the_options_of_a_step_follow_from_the_results_before_it(tmp_path, in_folder):
    (tmp_path / "graded.py").write_text(GRADED)
    config = runs.tiny(
        env="graded.py:Graded",
        recipe={"imitation_learning_rate": 1e-2},
        steps=5,
        rollout={"max_turn_tokens": 8},
        curriculum={"name": "ladder", "option": "level", "values": [1, 2, 3], "success": 0.1},
    )
    history = GSPOAgent(config=config).train()
    training = [metrics for _, metrics in history if "rollout/return" in metrics]
    levels = [metrics["rollout/option/level"] for metrics in training]
    assert levels == [1, 1, 2, 2, 3]
    # an action that does not end within its limit is not seen by the environment
    assert all(0 < m["rollout/return"] <= level for m, level in zip(training, levels, strict=True))
    assert history[-1][1]["eval/return"] > 3
