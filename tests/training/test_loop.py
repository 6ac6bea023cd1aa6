"""The training loop where there is little to train on."""

from __future__ import annotations

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.recipes.tiny import Tiny

MASKED = """
from gspo_env import TextEnv

class Masked(TextEnv):
    \"\"\"No sampled token may be trained on.\"\"\"
    blocking = False
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}
    def step(self, action):
        tokens = getattr(action, "token_ids", ())
        return "", 1.0, True, False, {"token_mask": [False] * len(tokens)}
    def expert_action(self, noise=0.0):
        return "yes"
"""

TINY = Tiny(hidden_size=16, layers=1, heads=2, demonstrations=16, imitation_steps=4)


def test_a_step_without_a_token_to_train_on_is_skipped_and_the_run_goes_on(tmp_path, in_folder):
    (tmp_path / "masked.py").write_text(MASKED)
    config = Config.from_recipe(
        TINY,
        env="masked.py:Masked",
        steps=2,
        tasks_per_step=2,
        eval_tasks=2,
        credit={"train_on_truncated": False},  # an action that was cut has no mask
        tracker="none",
    )
    history = GSPOAgent(config=config).train()
    assert [step for step, _ in history] == [0, 1, 2, 2]
    assert all("train/loss" not in metrics for _, metrics in history)
