"""A whole run, export and doctor on a GPU: the CPU's numbers."""

import time

import pytest
import torch
from safetensors.torch import load_file
from support.pretend_device import pretend_gpu
from support.runs import tiny

from gspo_agents.gspo import GSPOAgent
from gspo_agents.preflight import estimate

SHORT = {
    "steps": 3,
    "tasks_per_step": 2,
    "rollout": {"max_turns": 3, "max_turn_tokens": 8, "max_context": 256},
    "eval_tasks": 2,
    "recipe": {"demonstrations": 100, "imitation_steps": 6, "imitation_batch": 16},
}


def trained(folder, **settings):
    """The metrics of a run, and the weights that it saved."""
    agent = GSPOAgent(config=tiny(**SHORT, **settings, output=str(folder)))
    history = agent.train()
    exact = [
        (step, {k: v for k, v in m.items() if not k.startswith("time/") and "_per_s" not in k})
        for step, m in history
    ]
    return exact, load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_run_has_the_numbers_of_the_cpu(tmp_path):
    settings = {"learner": {"lora_rank": 2, "minibatches": 2}, "loss": {"kl_coef": 0.1}}
    history, weights = trained(tmp_path / "cpu", **settings)
    with pretend_gpu():
        there, moved_weights = trained(tmp_path / "gpu", **settings)
    assert len(history) == 5
    for (step, metrics), (moved_step, found) in zip(history, there, strict=True):
        assert step == moved_step
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(moved_weights, weights, rtol=1e-3, atol=1e-4)


def test_a_preflight_counts_the_time_in_which_the_gpu_still_computes(monkeypatch):
    with pretend_gpu():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: time.sleep(0.2))
        agent = GSPOAgent(config=tiny(**SHORT, learner={"minibatches": 2}))
        assert estimate(agent, ()).seconds > 2 * 0.15
