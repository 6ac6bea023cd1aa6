"""The training loop where there is little to train on."""

from support import runs

from gspo_agents.gspo import GSPOAgent

MASKED = """
from support.small_env import Shown

class Masked(Shown):
    \"\"\"No sampled token may be trained on.\"\"\"
    def step(self, action):
        tokens = getattr(action, "token_ids", ())
        return "", 1.0, True, False, {"token_mask": [False] * len(tokens)}
"""


def test_a_step_without_a_token_to_train_on_is_skipped_and_the_run_goes_on(tmp_path, in_folder):
    (tmp_path / "masked.py").write_text(MASKED)
    config = runs.tiny(
        env="masked.py:Masked",
        credit={"train_on_truncated": False},  # an action that was cut has no mask
    )
    history = GSPOAgent(config=config).train()
    assert [step for step, _ in history] == [0, 1, 2, 2]
    assert all("train/loss" not in metrics for _, metrics in history)
