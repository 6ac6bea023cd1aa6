"""Real runs whose rollout goes on while the learner updates."""

import asyncio
import copy
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import talks
from support.scripted_engine import Scripted
from support.small_env import Small
from support.virtual_clock import run

from gspo_agents.gspo import GSPOAgent
from gspo_agents.setup import start_engine
from gspo_env.batch.sample import to_samples
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.config import Config, load_toml, override
from gspo_env.engines.embedded.copy import CopyEngine
from gspo_env.env.base import TextEnv
from gspo_env.errors import ConfigError
from gspo_env.learner.learner import Learner
from gspo_env.learner.losses import GSPO, decide_correction
from gspo_env.learner.settings import LearnerConfig
from gspo_env.model.export import named_weights
from gspo_env.recipes.build import build_model, build_tokenizer
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout.collector import Collector, RolloutRequest
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.trust import record
from gspo_env.types import Task


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    shutil.copy(Path(__file__).parents[1] / "support" / "talk.py", tmp_path)


def ahead(**changes):
    own = {"env": "talk.py:Uneven", "steps": 5, "eval_every": 0, "supply": {"max_staleness": 2}}
    return talks(**{**own, **changes})


def steps_of(history):
    return [(step, m) for step, m in history if "rollout/return" in m]


def tasks_of(run):
    """The groups that were lost at each checkpoint, and those that come next."""
    states = {}
    for folder in sorted(Path(run, "checkpoints").glob("step-*")):
        buffer = json.loads((folder / "state.json").read_text())["buffer"]
        states[int(folder.name[-6:])] = buffer["next"], [number for number, *_ in buffer["open"]]
    return states


@pytest.mark.slow
def test_a_run_that_plays_ahead_learns_from_tokens_of_known_versions_and_resumes_them(tmp_path):
    agent = GSPOAgent(config=ahead())
    history = agent.train()
    done = steps_of(history)
    assert [step for step, _ in done] == [1, 2, 3, 4, 5]
    assert max(m["rollout/staleness_max"] for _, m in done) in (1.0, 2.0)
    assert all(
        0 <= m["time/learner_idle"] <= 1 and 0 <= m["time/rollout_idle"] <= 1 for _, m in done
    )
    assert all(m["train/sync_logprob_diff"] < 1e-4 for _, m in done)
    assert any(m["train/grad_norm"] > 0 for _, m in done)
    states = tasks_of("run")
    assert states[5] == (15, [])
    assert states[0] == (0, [])
    assert states[2][0] == 15
    assert len(states[2][1]) == 9  # of steps 3 to 5
    part = tmp_path / "part"
    shutil.copytree("run", part, symlinks=True)
    shutil.rmtree(part / "model")
    for step in (3, 4, 5):
        shutil.rmtree(part / f"checkpoints/step-{step:06d}")
    record(part, load_toml(part / "config.toml"))
    history = GSPOAgent.resume(part).train()
    assert [step for step, _ in steps_of(history)] == [1, 2, 3, 4, 5]
    assert max(m["rollout/staleness_max"] for _, m in steps_of(history)) <= 2
    assert tasks_of(part)[5] == (15, [])


@pytest.mark.slow
def test_an_engine_on_the_learners_weights_is_refused_before_anything_is_made():
    engine = f"{Path(__file__).parents[2] / 'examples/own_engine.py'}:Plain"
    agent = GSPOAgent(config=ahead(engine={"name": engine}))
    with pytest.raises(ConfigError, match=r"max_staleness is 2, and the engine .* shares"):
        agent.train()
    assert not Path("run").exists()


def test_vllm_in_the_process_of_a_rank_is_refused():
    """Its groups would wait for the other ranks, which do not know of them."""
    with pytest.raises(ConfigError, match="the engine is 'vllm' and several ranks train"):
        GSPOAgent(config=ahead(engine={"name": "vllm"}), ranks=object())


@pytest.mark.parametrize(
    ("loss", "staleness", "correction"),
    [
        (GSPO(), 0, "none"),
        (GSPO(), 2, "truncated"),
        (GSPO(correction="mask"), 2, "mask"),
        (GSPO(correction="none"), 2, "none"),
        (GSPO(old_logprobs="engine"), 2, "none"),
    ],
)
def test_a_run_that_plays_ahead_corrects_its_loss_unless_it_is_set(loss, staleness, correction):
    assert decide_correction(loss, staleness).correction == correction


class Gated(TextEnv):
    """Three turns; the second one begins when the test says so."""

    takes_cut_actions = True
    reached, go_on = threading.Event(), threading.Event()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return f"say {seed}", {}

    def step(self, action):
        self.turn += 1
        if self.turn == 2:
            self.reached.set()
            self.go_on.wait(30)
        return "more", 1.0, self.turn == 3, False, {}


def score(model, episode):
    """The log-probabilities of an episode's tokens by a model, turn by turn."""
    learner = Learner(model, GSPO(), LearnerConfig(), total_steps=1)
    (sample,) = to_samples([episode], [np.zeros(len(episode.turns))])
    values = learner.logprobs(learner.pack([sample])).tolist()
    return [[values.pop(0) for _ in turn.action_ids] for turn in episode.turns]


def test_weights_change_between_two_turns_and_each_turn_has_the_log_probabilities_of_its_own():
    """The learner's weights move all the time; the engine takes them once, in mid-episode."""
    config = override(Config(), {"rollout": {"max_turn_tokens": 8, "max_context": 256}})
    tokenizer = build_tokenizer(["say more yes no 0 1 2 3"])
    model = build_model(Tiny(hidden_size=16, layers=1, heads=2), len(tokenizer), 2, 0)
    engine = start_engine(model, config, ahead=True)
    assert isinstance(engine, CopyEngine)
    assert engine.copies
    pool = EnvPool(Gated)
    collector = Collector(engine, ChatTokenizer(tokenizer), pool, config.rollout)
    old = copy.deepcopy(model)

    def disturb():
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.3)

    async def work():
        task = Task(env_id="gated", seed=3)
        job = RolloutRequest(task=task, seed=0, place=0, group_size=1, temperature=1.0)
        playing = asyncio.create_task(collector.play_group(job, asyncio.Semaphore(1)))
        disturb()
        await asyncio.to_thread(Gated.reached.wait, 30)
        disturb()
        await collector.update_in_flight(named_weights(model), 7)
        new = copy.deepcopy(model)
        disturb()
        Gated.go_on.set()
        return new, (await playing).episodes[0]

    noise = torch.Generator().manual_seed(0)
    new, episode = asyncio.run(work())
    pool.close()
    assert [turn.weights_version for turn in episode.turns] == [0, 0, 7]
    assert episode.weights_versions == (0, 7)
    assert engine.weights_version == 7
    before, after = score(old, episode), score(new, episode)
    own, other = [*before[:2], after[2]], [*after[:2], before[2]]
    for turn, right, wrong in zip(episode.turns, own, other, strict=True):
        assert np.abs(np.subtract(turn.logprobs, right)).max() < 1e-4
        assert np.abs(np.subtract(turn.logprobs, wrong)).max() > 1e-2


def test_no_action_begins_while_an_engine_takes_weights_that_cannot_in_flight():
    log = []

    class Slow(Scripted):
        running = 0

        async def generate(self, prompt_ids, sampling, session=None):
            log.append("begin")
            self.running += 1
            await asyncio.sleep(1.0)
            self.running -= 1
            return await super().generate(prompt_ids, sampling, session)

        async def update_weights(self, named, version):
            log.append("from")
            while self.running:
                await asyncio.sleep(0.1)
            await asyncio.sleep(5.0)
            self.weights_version = version
            log.append("to")

    class Talks(Small):
        takes_cut_actions = True

        def step(self, action):
            return "more", 0.0, *self.end_turn(False), {}

    limits = RolloutConfig(max_turn_tokens=2, max_context=200)
    chat = ChatTokenizer(build_tokenizer(["go more"]))
    pool = EnvPool(lambda: Talks(max_turns=9), Talks())
    collector = Collector(Slow(lambda *_: (5, 5)), chat, pool, limits)

    async def work():
        tasks = [Task(env_id="x", seed=n) for n in range(3)]
        playing = asyncio.create_task(collector.collect(tasks, seed=0, group_size=2))
        for version in (1, 2):
            await asyncio.sleep(2.5)
            await collector.update_in_flight((), version)
        return await playing

    groups = run(work())
    assert log.count("from") == 2
    for start in (n for n, what in enumerate(log) if what == "from"):
        assert log[start + 1] == "to"
    for episode in (e for group in groups for e in group.episodes):
        versions = [turn.weights_version for turn in episode.turns]
        assert versions == [0] * 3 + [1] * 3 + [2] * 3
