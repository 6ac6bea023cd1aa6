"""Tiny, real models, tokenizers and samples that the tests share."""

import contextlib
import fcntl
import functools
import os
import re
import sqlite3
from types import SimpleNamespace

import hypothesis
import pytest

# the process that starts the test processes reads this file too, and needs no heavy library
from gspo_env.runtime.processes import usable_cores

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are more test processes than cores
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the numbers that tests expect are a CPU's
hypothesis.settings.register_profile("shared", deadline=None)  # other programs may be running
hypothesis.settings.load_profile("shared")

WORDS = [
    'Follow 3 links from "amber".',
    "You are a helpful assistant. Use the tool, then answer.",
    "<answer>cedar</answer> birch stone river",
]


def pytest_xdist_auto_num_workers(config):
    """One test process more than cores, since some tests wait; a variable of xdist wins."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else usable_cores() + 1


def pytest_xdist_make_scheduler(config, log):
    """The tests of a file with fixtures of its own run in one process, which makes these once."""
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def has_fixtures(file):
        text = (config.rootpath / file).read_text()
        return re.search(r'^@pytest\.fixture\(scope="module"(, params=.*)?\)', text, re.MULTILINE)

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if has_fixtures(file) else nodeid

    return Scheduler(config, log)


def pytest_ignore_collect(collection_path, config):
    """Imports only files with a marker that `-m` asks for; all of them take 13 s a process."""
    names = "|".join(set(re.findall(r"\w+", config.option.markexpr)) - {"or"})
    paths = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    if not names or "not" in names or collection_path.suffix != ".py" or collection_path in paths:
        return None
    marker = re.compile(rf'mark\.({names})\b|"({names})"')
    return None if marker.search(collection_path.read_text()) else True


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory):
    """Records of trained folders do not go to the home of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # otherwise each engine of vLLM starts a process that finds out what its models can do
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        # a killed process loses nothing that it wrote; only a machine without power would
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Runs the test in a new working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def shared_file(tmp_path_factory):
    """Returns the path of a file that the first test process writes, and the others read."""

    def share(name, write):
        base = tmp_path_factory.getbasetemp()
        base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (base / name).exists():
                write(base / name)
        return base / name

    return share


@pytest.fixture(scope="session")
def empty_store(shared_file):
    """The file of a new store of MLflow; all test processes copy it, since making one is slow."""
    import sqlalchemy
    from mlflow.store.db import utils

    def write(path):
        utils._initialize_tables(sqlalchemy.create_engine(f"sqlite:///{path}"))

    return shared_file("empty.db", write)


@pytest.fixture
def quick_store(empty_store, monkeypatch):
    """A new store of MLflow is a copy."""

    def copy(engine):
        with (
            contextlib.closing(sqlite3.connect(empty_store)) as source,
            contextlib.closing(sqlite3.connect(engine.url.database)) as target,
        ):
            source.backup(target)

    monkeypatch.setattr("mlflow.store.db.utils._initialize_tables", copy)


@pytest.fixture(scope="session")
def tokenizer():
    """A word tokenizer with a ChatML template."""
    from gspo_env.recipes.build import build_tokenizer

    return build_tokenizer(
        WORDS, ['<tool_call>{"name": "lookup", "arguments": {"key": "', '"}}</tool_call>']
    )


@pytest.fixture(scope="session")
def chat(tokenizer):
    """The chat tokenizer over the tiny tokenizer."""
    from gspo_env.chat.tokenizer import ChatTokenizer

    return ChatTokenizer(tokenizer)


@pytest.fixture
def model(tokenizer):
    """A tiny Qwen3 with random weights, large enough to prefer some ids."""
    from gspo_env.recipes.build import build_model
    from gspo_env.recipes.tiny import Tiny

    shape = Tiny(hidden_size=32, initializer_range=0.02)
    tiny = build_model(shape, len(tokenizer), tokenizer.eos_token_id, 0)
    for parameter in tiny.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return tiny


@pytest.fixture(scope="session")
def player(shared_file):
    """A real model after a short warm-up on the look-up environment: it ends its turns."""
    import torch

    from gspo_env.chat.tokenizer import ChatTokenizer
    from gspo_env.env.registration import make_env
    from gspo_env.recipes.build import build, imitation_samples, warm_up
    from gspo_env.recipes.tiny import Tiny

    env_id = "gspo/Lookup-v0"
    env = make_env(env_id)
    config = Tiny(
        hidden_size=32, demonstrations=200, imitation_steps=60, imitation_learning_rate=1e-2
    )
    tiny, words, demonstrations = build({env_id: env}, config, seed=0)
    chat = ChatTokenizer(words)
    samples = imitation_samples(demonstrations, chat)

    def write(path):
        warm_up(tiny, samples, config, 0, lambda step, loss: None)
        torch.save(tiny.state_dict(), path)

    tiny.load_state_dict(torch.load(shared_file("player.pt", write)))
    return SimpleNamespace(env_id=env_id, model=tiny, tokenizer=words, chat=chat, samples=samples)


def make_samples(rng, count, vocabulary=200):
    """Random multi-turn samples."""
    import numpy as np
    from support.learners import sample_of

    samples = []
    for _ in range(count):
        spans = [
            (int(rng.integers(1, 12)), int(rng.integers(1, 6))) for _ in range(rng.integers(1, 5))
        ]
        turns = np.concatenate([[-1] * env + [k] * model for k, (env, model) in enumerate(spans)])
        samples.append(sample_of(rng, rng.integers(1, vocabulary, len(turns)), turns))
    return samples


@pytest.fixture
def samples():
    """A dozen random multi-turn samples."""
    import numpy as np

    return make_samples(np.random.default_rng(0), 12)


def gradients_and_metrics(learner, samples):
    """The gradient by parameter name and the metrics, without an optimiser step."""
    from gspo_env.learner.stats import UpdateStats, to_cpu

    (minibatch,) = learner.score(learner.prepare(samples))
    stats = UpdateStats(
        passes=to_cpu(learner.backward(minibatch)),
        grad_norms=(0.0,),
        skipped_steps=0,
        loss_scale=None,
        learning_rate=0.0,
        seconds=1.0,
        clip_range=learner.loss.clip_range,
    )
    trained = learner.masters.tensors.items()
    found = {n: p.grad.clone() for n, p in trained if p.grad is not None}
    learner.optimizer.zero_grad()
    return found, stats.metrics()


@pytest.fixture
def gradients():
    """The gradient of a learner's one minibatch, and its metrics."""
    return gradients_and_metrics
