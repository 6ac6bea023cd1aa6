"""Real vLLM: the log-probabilities of the trainer after every update, and exact tokens.

Runs where vLLM is installed: `pytest -m vllm`.
"""

import asyncio
import copy
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from support.logprobs import difference_by_version, other_weights
from support.sampled_tokens import sampled_more

from gspo_agents.gspo import GSPOAgent
from gspo_env.batch.sample import to_samples
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.config import Config
from gspo_env.credit import ReturnsToGo, estimate
from gspo_env.engines.base import Sampling
from gspo_env.engines.vllm.local import VLLM, VLLMEngine
from gspo_env.engines.vllm.server import VLLMServer, VLLMServerEngine
from gspo_env.env.registration import make_env
from gspo_env.errors import EngineError
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model.export import named_weights
from gspo_env.recipes.build import build, imitation_samples, warm_up
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import Task

pytestmark = pytest.mark.vllm

ENV = "gspo/Lookup-v0"
EAGER = VLLM(enforce_eager=True)
LIMITS = RolloutConfig(concurrency=64, max_turn_tokens=32, max_context=512)
SIZES = {"max_slots": 64, "max_context": LIMITS.max_context}


@pytest.fixture(scope="module")
def parts():
    """A model that plays, and its chat tokenizer."""
    env = make_env(ENV)
    config = Tiny(demonstrations=300, imitation_steps=60)
    model, tokenizer, demonstrations = build({ENV: env}, config, 0)
    chat = ChatTokenizer(tokenizer)
    warm_up(model, imitation_samples(demonstrations, chat), config, 0, lambda step, loss: None)
    return model, chat


@pytest.fixture(scope="module")
def engine(parts):
    running = VLLMEngine(parts[0], EAGER, **SIZES)
    yield running
    running.close()


@pytest.fixture
def same_start(in_folder):
    """Each run has a folder of its own."""


@pytest.fixture(scope="module")
def servers(request, parts):
    """Two servers, by their transfer, which start with weights that nobody sent."""
    config = VLLMServer(replicas=2, transfer=request.param, enforce_eager=True)
    running = VLLMServerEngine(build_other(parts[0]), config, max_slots=64, max_context=2048)
    yield running
    running.close()


over = partial(pytest.mark.parametrize, "servers", indirect=True)


def collect(engine, chat, tasks=16, seed=0, size=4):
    collector = Collector(engine, chat, EnvPool(lambda: make_env(ENV)), LIMITS)
    every = [Task(env_id=ENV, seed=n) for n in range(tasks)]
    return asyncio.run(collector.collect(every, seed=seed, group_size=size))


def update(learner, groups):
    """One training step; its metrics contain the mismatch before the step."""
    advantages = estimate(groups, ReturnsToGo()).advantages
    episodes = [episode for group in groups for episode in group.episodes]
    return learner.update(to_samples(episodes, [values for rows in advantages for values in rows]))


def learner_of(parts):
    settings = LearnerConfig(learning_rate=3e-3, warmup_steps=0, minibatches=2)
    return Learner(copy.deepcopy(parts[0]), GSPO(), settings, total_steps=100)


def sync(engine, learner, version):
    asyncio.run(engine.update_weights(named_weights(learner.policy), version))


def test_engine_and_trainer_agree_after_every_weight_update(parts, engine):
    learner = learner_of(parts)
    for version in range(1, 5):
        sync(engine, learner, version)
        groups = collect(engine, parts[1])  # the same prompts each time, to detect a stale cache
        assert {e.weights_versions for g in groups for e in g.episodes} == {(version, version)}
        metrics = update(learner, groups)
        assert metrics["train/logprob_diff_max"] < 1e-4
        assert metrics["train/ratio_outside_clip"] == 0.0


async def sample_while_weights_change(engine, chat, models, running, tokens=420, requests=6):
    """Sends the weights of each model while long completions run; returns prompts, completions."""
    await engine.update_weights(named_weights(models[0]), 0)
    texts = [f'Follow {n} links from "amber".' for n in range(requests)]
    prompts = [chat.start(text) for text in texts]
    jobs = [
        asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=tokens, seed=n)))
        for n, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(300):
        while not running(requests):
            await asyncio.sleep(0.01)
        for version, model in enumerate(models[1:], 1):
            await sampled_more(engine, 5 * requests)
            await engine.update_in_flight(named_weights(model), version)
        done = await asyncio.gather(*jobs)
        later = await engine.generate(prompts[0], Sampling(max_tokens=8))
    assert later.weights_version == len(models) - 1
    assert later.weights_versions == ()
    return [*zip(prompts, done, strict=True), (prompts[0], later)]


def test_weights_in_flight_each_token_agrees_with_the_trainer_of_its_version(parts, engine):
    models = [parts[0], *(other_weights(parts[0], n, 0.1) for n in (1, 2))]
    play = sample_while_weights_change(
        engine, parts[1], models, lambda count: len(engine._running) == count
    )
    log = asyncio.run(play)
    assert engine.updates_in_flight
    assert all(done.weights_versions for _, done in log[:-1])
    assert max(difference_by_version(models, *each) for each in log) < 1e-4


def test_weights_that_cannot_be_loaded_in_flight_end_the_requests(parts, engine):
    wrong = [("model.no_such_weight", torch.zeros(1))]

    async def play():
        job = asyncio.create_task(engine.generate([5, 6, 7], Sampling(max_tokens=400)))
        await sampled_more(engine, 1)
        with pytest.raises(EngineError, match=r"no_such_weight|no new values"):
            await engine.update_in_flight(wrong, 1)
        with pytest.raises(EngineError, match="vLLM failed"):
            await job

    asyncio.run(play())
    asyncio.run(engine.update_in_flight(named_weights(parts[0]), 4))
    log = collect(engine, parts[1], tasks=2)
    assert update(learner_of(parts), log)["train/logprob_diff_max"] < 1e-4


@over(["folder"])
def test_two_servers_take_weights_in_flight(parts, servers):
    before = servers.servers_lost
    models = [parts[0], *(other_weights(parts[0], n, 0.1) for n in (1, 2))]
    play = sample_while_weights_change(
        servers,
        parts[1],
        models,
        lambda count: sum(len(server.requests) for server in servers._servers) == count,
        tokens=1900,
    )
    log = asyncio.run(play)
    assert servers.servers_lost == before
    assert sum(bool(done.weights_versions) for _, done in log) >= 4
    assert max(difference_by_version(models, *each) for each in log) < 1e-4


def test_the_same_seed_gives_the_same_action_whatever_else_runs(parts, engine):
    prompt = list(parts[1].start('Follow 2 links from "amber".'))
    sampling = Sampling(max_tokens=12, stop_ids=parts[1].stop_ids, seed=7)

    async def crowd():
        others = [
            engine.generate(prompt[: 4 + n % 5], Sampling(max_tokens=9, seed=n)) for n in range(20)
        ]
        return (await asyncio.gather(engine.generate(prompt, sampling), *others))[0]

    alone = asyncio.run(engine.generate(prompt, sampling))
    assert alone.token_ids == asyncio.run(crowd()).token_ids


def test_an_abandoned_request_is_aborted_and_the_engine_goes_on(parts, engine):
    prompt = list(parts[1].start("hello"))

    async def impatient():
        endless = engine.generate(prompt, Sampling(max_tokens=400))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(endless, 0.05)
        return await engine.generate(prompt, Sampling(max_tokens=3))

    assert len(asyncio.run(impatient()).token_ids) == 3
    with pytest.raises(EngineError, match="do not fit a context"):
        asyncio.run(engine.generate(prompt, Sampling(max_tokens=5000)))


def check_ahead(history, staleness):
    """Checks that each group was trained on once, none too late, and on the weights that played."""
    assert max(m.get("train/sync_logprob_diff", 0.0) for _, m in history) < 1e-4
    log = [m for _, m in history if "rollout/return" in m]
    before = [m["rollout/episodes_before"] for m in log]
    assert len(set(np.diff(before))) == 1
    assert 0 < max(m["rollout/staleness_max"] for m in log) <= staleness
    assert sum(m["rollout/lost_episodes"] + m["rollout/dropped_groups"] for m in log) == 0


def short_run(**changes):
    return Config.from_recipe(
        recipe={"demonstrations": 500, "imitation_steps": 60},
        tasks_per_step=8,
        eval_tasks=8,
        tracker="none",
        **changes,
    )


@pytest.mark.usefixtures("same_start")
def test_a_run_that_plays_ahead_of_vllm_in_this_process_trains_on_each_group_once():
    config = short_run(engine=EAGER, supply={"max_staleness": 1}, steps=4)
    check_ahead(GSPOAgent(config=config).train(), 1)


@pytest.mark.usefixtures("same_start")
def test_a_server_killed_in_mid_run_loses_no_episode_and_training_goes_on(monkeypatch):
    """The groups of two steps are in flight, which take new weights between two tokens."""
    fleet = VLLMServer(replicas=2, enforce_eager=True)
    agent = GSPOAgent(config=short_run(engine=fleet, supply={"max_staleness": 2}, steps=6))
    generate = VLLMServerEngine.generate
    requests, used, pids = 0, set(), []

    async def killing(servers, prompt_ids, sampling, session=None):
        nonlocal requests
        used.add(servers)
        requests += servers.weights_version >= 2
        if requests == 20:
            requests += 1
            pids.extend(servers.pids)
            os.kill(pids[0], signal.SIGKILL)
        return await generate(servers, prompt_ids, sampling, session)

    monkeypatch.setattr(VLLMServerEngine, "generate", killing)
    history = agent.train()
    assert requests > 20
    (servers,) = used
    assert servers.servers_lost == servers.server_restarts == 1
    assert all(m.get("rollout/env_errors", 0.0) == 0.0 for _, m in history)
    check_ahead(history, 2)
    assert not any(_runs(pid) for pid in pids)


@over(["folder"])
def test_servers_that_still_run_cancelled_requests_take_the_next_weights(parts, servers):
    prompt, before = list(parts[1].start("hello")), servers.servers_lost

    async def timed_out():
        for version in range(1, 4):
            jobs = [
                asyncio.create_task(servers.generate(prompt, Sampling(max_tokens=400, seed=n)))
                for n in range(8)
            ]
            await sampled_more(servers, 8)
            for job in jobs:
                job.cancel()
            await servers.update_weights(named_weights(parts[0]), version)
        return await servers.generate(prompt, Sampling(max_tokens=3))

    assert asyncio.run(timed_out()).weights_version == 3
    assert servers.servers_lost == before


def build_other(model):
    """The same architecture with other weights."""
    return type(model)(model.config)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
