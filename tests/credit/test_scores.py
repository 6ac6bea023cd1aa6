"""Which rewards the estimators learn from: those of the turns, the outcome, or their sum."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.credit import estimate
from gspo_env.recipes.tiny import Tiny
from gspo_env.registry import BUILTIN, find
from gspo_env.types import Episode, Group, StepInfo, StopReason, Task, Turn

TASK = Task(env_id="test", seed=0)
TINY = Tiny(
    hidden_size=16,
    layers=1,
    heads=2,
    demonstrations=64,
    imitation_steps=80,
    imitation_learning_rate=2e-2,
)
ESTIMATORS = sorted(BUILTIN["advantage"])

COIN = """
from gspo_env import TextEnv

class Coin(TextEnv):
    \"\"\"Two words; heads as the second one is rewarded by the outcome alone.\"\"\"
    blocking = False
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "flip", {}
    def step(self, action):
        self.turn += 1
        if self.turn < 2:
            return "again", 0.0, False, False, {}
        return "", 0.0, True, False, {"episodic_reward": float(action.strip() == "heads")}
    def expert_action(self, noise=0.0):
        return str(self.np_random.choice(["heads", "tails"]))
"""


def played(rewards, outcome=None, stop=StopReason.TERMINATED):
    """An episode whose last step gives its own outcome, unless that is None."""
    last = len(rewards) - 1
    turns = tuple(
        Turn(
            prompt_ids=(1,),
            action_ids=(2,),
            logprobs=(-1.0,),
            text="",
            observation="",
            reward=reward,
            info=StepInfo(episodic_reward=outcome if k == last else None),
        )
        for k, reward in enumerate(rewards)
    )
    return Episode(
        task=TASK,
        turns=turns,
        outcome=float(sum(rewards)) if outcome is None else outcome,
        stop_reason=stop,
        terminated=stop is StopReason.TERMINATED,
        truncated=stop not in (StopReason.TERMINATED, StopReason.ERROR),
    )


def group(*episodes, **changes):
    return Group(task=TASK, episodes=episodes, **changes)


def train(tmp_path, source, name, **changes):
    (tmp_path / "mine.py").write_text(source)
    config = Config.from_recipe(
        TINY,
        env=f"{tmp_path}/mine.py:{name}",
        steps=1,
        tasks_per_step=4,
        eval_tasks=16,
        rollout={"max_turn_tokens": 4},
        tracker="none",
        **changes,
    )
    agent = GSPOAgent(config=config)
    return agent, agent.train()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_environment_that_rewards_its_outcome_alone_trains_with_every_estimator(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    _, history = train(tmp_path, COIN, "Coin", advantage=name)
    (metrics,) = (m for _, m in history if "train/advantage_rms" in m)
    assert metrics["train/advantage_rms"] > 0
    assert metrics["rollout/zero_variance_groups"] < 1


def test_the_estimator_outcome_follows_the_outcome_where_turn_rewards_oppose_it():
    failed, successful = played([0.5, 0.5], 0.0), played([0.0, 0.0], 1.0)
    (rows,) = estimate([group(failed, successful)], find("advantage", "outcome")()).advantages
    assert np.sign(rows[0]).tolist() == [-1, -1]
    assert np.sign(rows[1]).tolist() == [1, 1]
