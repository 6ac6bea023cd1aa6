"""A run that goes on from a checkpoint is the same run, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config, override
from gspo_env.recipes.tiny import Tiny

SHORT = Tiny(hidden_size=32, demonstrations=64, imitation_steps=40, imitation_learning_rate=1e-2)

WAYS = {
    "full": {},
    "LoRA": {"learner": {"lora_rank": 2}},
    "bfloat16": {"model_dtype": "bfloat16"},
    "float16, LoRA": {"model_dtype": "float16", "learner": {"lora_rank": 2}},
    "a KL reference": {"loss": {"kl_coef": 0.05}},
    "a KL reference, LoRA": {"loss": {"kl_coef": 0.05}, "learner": {"lora_rank": 2}},
    "one minibatch, constant": {"learner": {"minibatches": 1, "schedule": "constant"}},
    "outcomes that use the global generators": {"env_kwargs": {"noise": 1.0}},
}

TALK = '''
import random
import zlib

import numpy as np
import torch

from gspo_env import TextEnv


class Talk(TextEnv):
    """Three turns, with a reward for each text; or an outcome from the global generators."""

    blocking = False

    def __init__(self, noise=0.0):
        super().__init__()
        self.noise = noise

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return f"say {seed % 7}", {"task_key": str(seed)}

    def step(self, action):
        self.turn += 1
        done, reward = self.turn == 3, zlib.crc32(action.encode()) % 5 / 4
        if not self.noise:
            return "more", reward, done, False, {}
        drawn = random.random() + np.random.random() + float(torch.rand(()))
        return "more", 0.0, done, False, {"episodic_reward": drawn} if done else {}

    def expert_action(self, noise=0.0):
        return self.np_random.choice(["yes", "no", "maybe so"]).item()
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)


def config(**changes):
    made = Config.from_recipe(
        SHORT,
        env="talk.py:Talk",
        steps=4,
        tasks_per_step=3,
        eval_every=2,
        eval_tasks=4,
        rollout={"group_size": 4, "max_turn_tokens": 8},
        checkpoints={"save_every": 1, "keep": 9},
        learner={"warmup_steps": 2},
        tracker="none",
        output="run",
    )
    return override(made, changes)


def timeless(history):
    """A history without times and rates."""
    return [
        (step, {k: v for k, v in m.items() if "time/" not in k and "per_second" not in k})
        for step, m in history
    ]


def state(folder):
    """The tensors and the numbers of a checkpoint, without what differs from run to run."""
    numbers = json.loads((folder / "state.json").read_text())
    numbers["history"] = timeless(numbers["history"])
    del numbers["config"]  # it names the folder
    return load_file(folder / "state-00001.safetensors"), numbers


def same(first, second):
    """Whether two checkpoints are equal to the last bit."""
    (tensors, numbers), (others, other_numbers) = state(first), state(second)
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    assert numbers == other_numbers


def cut(run, step, to):
    """Copies a run as it was after a step."""
    shutil.copytree(run, to, symlinks=True)
    shutil.rmtree(to / "model")
    for folder in (to / "checkpoints").glob("step-*"):
        if int(folder.name[-6:]) > step:
            shutil.rmtree(folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_goes_on_ends_with_the_bits_of_the_uninterrupted_one(way, tmp_path):
    whole = GSPOAgent(config=config(**WAYS[way]))
    history = whole.train()
    assert any(m.get("train/grad_norm", 0) > 0 for _, m in history)
    for step in (0, 3):
        part = tmp_path / f"part{step}"
        cut(tmp_path / "run", step, part)
        torch.rand(3)  # a process that goes on has drawn other numbers before
        again = GSPOAgent.resume(part)
        assert timeless(again.train()) == timeless(history)
        for done in range(step + 1, 5):
            name = f"checkpoints/step-{done:06d}"
            same(tmp_path / "run" / name, part / name)
        for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(a, b)
