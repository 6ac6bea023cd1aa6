"""The agent end to end: the same seed gives the same run, and what it saves comes back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.env.registration import make_env
from gspo_env.recipes.embedded import EmbeddedConfig
from gspo_env.rollout.collector import RolloutConfig
from gspo_env.tracking.base import NoTracker


def tiny(**changes):
    config = Config(
        steps=3,
        tasks_per_step=4,
        eval_every=2,
        eval_tasks=8,
        rollout=RolloutConfig(group_size=4),
        embedded=EmbeddedConfig(hidden_size=32, demonstrations=64, imitation_steps=40),
        tracker=NoTracker(),
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def timeless(history):
    """A history without what the clock decides."""
    return [
        (step, {k: v for k, v in m.items() if "time/" not in k and "per_second" not in k})
        for step, m in history
    ]


def test_the_same_seed_gives_the_same_metrics_and_another_seed_others():
    first, again, other = (
        timeless(GSPOAgent(config=tiny(seed=seed)).train()) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_a_run_evaluates_first_last_and_in_between_and_names_its_metrics():
    history = GSPOAgent(config=tiny()).train()
    assert [step for step, m in history if "eval/success" in m] == [0, 2, 3]
    every = set().union(*(m for _, m in history))
    assert every >= {
        *("train/loss", "train/ratio", "train/ratio_min", "train/ratio_max"),
        *("train/clipped_fraction", "train/entropy", "train/grad_norm", "train/return"),
        *("train/outcome", "train/success", "train/turns", "train/tokens_per_second"),
        *("eval/success", "eval/success_greedy", "eval/return", "eval/turns"),
        *("rollout/tokens", "rollout/tokens_per_second", "rollout/zero_variance_groups"),
        *("rollout/logprob_diff_mean", "rollout/logprob_diff_p99", "rollout/logprob_diff_max"),
        *("rollout/stop/terminated", "rollout/env_errors"),
        *("time/rollout", "time/update", "time/sync", "time/eval"),
    }
    assert all(m.get("rollout/logprob_diff_max", 0.0) < 1e-4 for _, m in history)


def test_the_saved_model_loads_with_transformers_and_says_the_same(tmp_path):
    agent = GSPOAgent(config=tiny(steps=1))
    agent.train()
    loaded = AutoModelForCausalLM.from_pretrained(agent.folder / "model")
    agent.model.set_attn_implementation("sdpa")
    ids = torch.tensor([[5, 9, 300, 20]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, agent.model(ids).logits)


def test_a_saved_lora_run_loads_with_transformers_alone(tmp_path):
    config = tiny(steps=1)
    config = dataclasses.replace(
        config, learner=dataclasses.replace(config.learner, lora_rank=2, learning_rate=1e-2)
    )
    agent = GSPOAgent(config=config)
    agent.train()
    loaded = AutoModelForCausalLM.from_pretrained(agent.folder / "model")
    agent.model.get_base_model().set_attn_implementation("sdpa")
    ids = torch.tensor([[5, 9, 300, 20]])
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(ids).logits, agent.model(ids).logits, rtol=1e-4, atol=1e-5
        )


def test_save_and_load_give_an_agent_that_acts_the_same(tmp_path):
    agent = GSPOAgent(config=tiny())
    agent.save(tmp_path / "kept")
    again = GSPOAgent.load(tmp_path / "kept")
    env = make_env(agent.env_id)
    observation, _ = env.reset(seed=1)
    assert agent.act(observation, first=True) == again.act(observation, first=True)
    assert agent.act("oak", role="tool") == again.act("oak", role="tool")
    mine, theirs = (a.evaluate(tasks=4, samples=2) for a in (agent, again))
    for one, other in zip(mine, theirs, strict=True):
        assert [e.token_ids.tolist() for e in one.episodes] == [
            e.token_ids.tolist() for e in other.episodes
        ]


def test_a_model_in_hand_is_trained_where_it_is(player):
    import copy

    model = copy.deepcopy(player.model)
    before = copy.deepcopy(model.state_dict())
    learner = dataclasses.replace(tiny().learner, learning_rate=1e-2)
    config = tiny(steps=1, learner=learner)
    agent = GSPOAgent(model, player.env_id, config, tokenizer=player.tokenizer)
    agent.train()
    assert agent.model is model
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
