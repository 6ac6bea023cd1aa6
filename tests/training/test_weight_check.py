"""The probe after an update of the weights notices an engine that is not the trained model."""

import asyncio
import copy
import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file
from support.learners import learner_of
from support.runs import tiny

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import override
from gspo_env.engines import Engine
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.registration import make_env
from gspo_env.errors import EngineError, TrainingError, above
from gspo_env.model.export import named_weights
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.training.weight_check import HALF_TOLERANCE, check_sync


class Copying(Engine):
    """An engine with copies of the weights, of which one may miss a weight of each update."""

    def __init__(self, model, copies=1, missed="", dtype="float32"):
        self.copies, self.dtype, self.tolerance, self.missed = copies, dtype, None, missed
        self.asked = [0] * copies
        self.models = [copy.deepcopy(model) for _ in range(copies)]
        self.engines = [TransformersEngine(each, max_context=512) for each in self.models]
        self.running = [0] * copies

    async def generate(self, prompt_ids, sampling, session=None):
        one = min(range(self.copies), key=self.running.__getitem__)
        return await self.generate_on(one, prompt_ids, sampling)

    async def generate_on(self, one, prompt_ids, sampling):
        self.asked[one] += 1
        self.running[one] += 1
        try:
            return await self.engines[one].generate(prompt_ids, sampling)
        finally:
            self.running[one] -= 1

    async def update_weights(self, named_tensors, version):
        for name, tensor in named_tensors:
            for one, model in enumerate(self.models):
                if not (one == 0 and self.missed and self.missed in name):
                    model.get_parameter(name).data.copy_(tensor)
        for engine in self.engines:
            await engine.update_weights([], version)

    def close(self):
        for engine in self.engines:
            engine.close()


@pytest.fixture
def learner(model):
    return learner_of(model)


def perturb(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.mul_(1 + 0.1 * noise.to(parameter.dtype))


def probed(engine, learner, chat, **limits):
    pool = EnvPool(lambda: make_env("gspo/Lookup-v0"))
    config = RolloutConfig(**{"max_turn_tokens": 32, "max_context": 512} | limits)
    collector = Collector(engine, chat, pool, config)

    async def run():
        await engine.update_weights(named_weights(learner.policy), 1)
        return await check_sync(collector, learner)

    return asyncio.run(run())


def test_a_right_update_differs_by_no_more_than_rounding(learner, chat):
    engine = Copying(learner.policy)
    perturb(learner.policy)
    assert probed(engine, learner, chat)["train/sync_logprob_diff"] < 1e-5


@pytest.mark.parametrize("missed", ["q_proj", "layers.1.mlp.down_proj", "norm", "embed"])
def test_a_weight_that_missed_an_update_stops_the_run(learner, chat, missed):
    engine = Copying(learner.policy, missed=missed)
    perturb(learner.policy)
    message = r"differ from the trainer's by \d.* at most 0\.001 in float32: .* `transformers`"
    with pytest.raises(EngineError, match=message):
        probed(engine, learner, chat)


def test_an_engine_that_does_not_answer_is_named(learner, chat):
    engine = Copying(learner.policy)

    async def silent(*_):
        await asyncio.sleep(60.0)

    engine.generate_on = silent
    with pytest.raises(EngineError, match=r"did not answer a probe of 16 tokens within 0\.1 s"):
        probed(engine, learner, chat, episode_timeout=0.1)


def test_every_copy_is_probed(learner, chat):
    engine = Copying(learner.policy, copies=3, missed="q_proj")
    perturb(learner.policy)
    with pytest.raises(EngineError, match="did not reach it"):
        probed(engine, learner, chat)
    assert engine.asked == [4, 4, 4]


def test_the_bound_follows_the_less_exact_dtype_unless_one_is_set(learner, chat):
    engine = Copying(learner.policy, missed="v_proj", dtype="bfloat16")
    engine.tolerance = math.inf
    perturb(learner.policy)
    found = probed(engine, learner, chat)["train/sync_logprob_diff"]
    assert 1e-3 < found < HALF_TOLERANCE
    engine.tolerance = None
    assert probed(engine, learner, chat)["train/sync_logprob_diff"] == found
    engine.tolerance = found / 2
    with pytest.raises(EngineError, match=f"at most {found / 2:g} in bfloat16 and float32"):
        probed(engine, learner, chat)


def test_a_probability_that_is_no_number_stops_the_run(learner, chat):
    engine = Copying(learner.policy)
    learner.policy.get_input_embeddings().weight.data[5:] = math.nan
    with pytest.raises(EngineError, match=r"logprobs is .*nan.*are the weights finite"):
        probed(engine, learner, chat)


def test_the_probe_fits_the_shortest_context_and_the_temperature(model, chat):
    learner = learner_of(model, temperature=0.7)
    engine = Copying(model)
    limits = {"max_turn_tokens": 3, "max_context": 5, "temperature": 0.7}
    assert probed(engine, learner, chat, **limits)["train/sync_logprob_diff"] < 1e-5


def test_a_run_probes_an_engine_that_has_a_copy(in_folder):
    agent = GSPOAgent(config=tiny(recipe={"imitation_steps": 4}))
    agent._engine = Copying(agent.model)
    seen = [
        m["train/sync_logprob_diff"] for _, m in agent.train() if "train/sync_logprob_diff" in m
    ]
    assert len(seen) == 2
    assert all(0 < value < 1e-4 for value in seen)


class Rejecting(Copying):
    """An engine that computes another model after the first sync of some versions."""

    undo_updates = True

    def __init__(self, model, bad, again=False):
        super().__init__(model)
        self.bad, self.again, self.seen = bad, again, []

    async def update_weights(self, named_tensors, version):
        await super().update_weights(named_tensors, version)
        if version in self.bad and (self.again or version not in self.seen):
            perturb(self.models[0])
        self.seen.append(version)


def rejecting_run(folder, bad, steps=4, **changes):
    config = tiny(
        **{"steps": steps, "output": str(folder), "learner": {"entropy_coef": 0.01}},
        recipe={"imitation_steps": 4},
        checkpoints={"save_every": 1, "keep": 9},
    )
    agent = GSPOAgent(config=override(config, changes))
    agent._engine = Rejecting(agent.model, bad)
    return agent


def weights_at(folder, step):
    (file,) = (folder / "checkpoints" / f"step-{step:06d}").glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("bad", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_update_that_is_rejected_is_undone_and_a_resumed_run_goes_on_alike(tmp_path, bad):
    whole = rejecting_run(tmp_path / "whole", {bad}).train()
    metrics = [m for _, m in whole if "train/undone_updates" in m]
    undone_updates = [m["train/undone_updates"] for m in metrics]
    assert undone_updates == [float(n == bad) for n in range(1, 5)]
    assert metrics[bad - 1]["train/rejected_logprob_diff"] > 1e-3
    assert all(m["train/sync_logprob_diff"] < 1e-4 for m in metrics)
    former, undone, later = (weights_at(tmp_path / "whole", bad + n) for n in (-1, 0, 1))
    assert former.keys() == undone.keys()
    assert all(torch.equal(former[name], undone[name]) for name in former)
    assert not all(torch.equal(later[name], undone[name]) for name in undone)
    part = rejecting_run(tmp_path / "parts", {bad}, steps=bad)
    part.train()
    agent = GSPOAgent.resume(tmp_path / "parts", dataclasses.replace(part.config, steps=4))
    agent._engine = Rejecting(agent.model, ())
    agent.train()
    whole_end, parts_end = (weights_at(tmp_path / name, 4) for name in ("whole", "parts"))
    assert all(torch.equal(whole_end[name], parts_end[name]) for name in whole_end)


@pytest.mark.slow
def test_an_engine_that_differs_after_the_update_is_undone_stops_the_run(tmp_path):
    agent = rejecting_run(tmp_path / "run", {2})
    agent._engine.again = True
    with pytest.raises(EngineError, match="differ from the trainer's"):
        agent.train()


@pytest.mark.slow
def test_too_many_undone_updates_in_a_row_stop_the_run(tmp_path):
    agent = rejecting_run(tmp_path / "run", {2, 3, 4}, learner={"max_skipped_steps": 2})
    with pytest.raises(TrainingError, match=r"3 updates in a row were undone"):
        agent.train()


@pytest.mark.parametrize("bound", [1e-4, 1.04e-4, 0.3, 2.0])
@pytest.mark.parametrize("factor", [1 + 1e-9, 1.0004, 1.3, 50.0, math.inf, math.nan])
def test_a_value_above_its_bound_never_looks_equal_to_it(bound, factor):
    text = above(bound * factor, bound)
    assert not float(text) <= float(f"{bound:g}")
    assert len(text) < 16
