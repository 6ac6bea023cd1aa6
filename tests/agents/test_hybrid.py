"""Models that packed rows would change train one sequence a row."""

from __future__ import annotations

import asyncio

import architectures
import numpy as np
import pytest
from hybrid import Hybrid, train

from gspo_env.batch.sample import Sample
from gspo_env.engines import Transformers
from gspo_env.engines.embedded.model_cache import ModelCache
from gspo_env.errors import ModelError
from gspo_env.model import check


def short(kind, folder, **changes):
    recipe = Hybrid(
        kind=kind, hidden_size=32, demonstrations=16, imitation_steps=4, imitation_batch=8
    )
    settings = {
        "steps": 1,
        "tasks_per_step": 2,
        "eval_every": 0,
        "eval_tasks": 1,
        "rollout": {"group_size": 2, "max_turn_tokens": 6, "max_turns": 2},
    }
    return train(recipe, str(folder / "run"), **settings | changes)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_with_a_hybrid_says_so_once_and_trains_on_what_its_engine_sampled(
    rank, tmp_path, caplog
):
    history = short("LFM2", tmp_path, learner={"lora_rank": rank})
    (difference,) = (m["train/logprob_diff_max"] for _, m in history if "train/loss" in m)
    assert difference <= check.BOUND
    assert caplog.text.count("one sequence a row") == 1


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Falcon-H1"])
def test_engine_and_trainer_of_a_hybrid_agree_after_every_update(name):
    model = architectures.build(name)
    engine = Transformers().start(model, max_slots=4, max_context=128)
    learner = architectures.make_learner(model, learning_rate=1e-3, minibatches=2)

    async def play():
        return await asyncio.gather(*(architectures.converse(engine, seed) for seed in range(4)))

    for step in range(3):
        metrics = learner.update([as_sample(log) for log in asyncio.run(play())], step)
        asyncio.run(engine.update_weights([], step))
        assert metrics["train/logprob_diff_max"] <= check.BOUND
        assert metrics["train/grad_norm"] > 0


def as_sample(log):
    """The training sequence of one conversation, with random advantages."""
    prompt, done = log[-1]
    turns = np.full(len(prompt) + len(done.token_ids), -1)
    for k, (before, turn) in enumerate(log):
        turns[len(before) : len(before) + len(turn.token_ids)] = k
    logprobs = np.concatenate([turn.logprobs for _, turn in log])
    return Sample(
        token_ids=np.array([*prompt, *done.token_ids]),
        turn_ids=turns,
        advantages=np.random.default_rng(len(prompt)).normal(size=len(logprobs)),
        engine_logprobs=logprobs,
    )


def test_a_model_that_the_engine_refuses_stops_the_run_before_it_has_a_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ModelCache, "feed", None)
    with pytest.raises(ModelError, match=r"Lfm2ForCausalLM.*expected the engine vllm"):
        short("LFM2", tmp_path)
    assert not (tmp_path / "run").exists()
