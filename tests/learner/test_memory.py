"""Out of memory in a pass: halves give the gradient of the whole, and one sequence is an error."""

import sys
from functools import partial

import pytest
import torch
from support import learners
from support.jails import run_python

from gspo_env.errors import TrainingError
from gspo_env.learner import GSPO, DrGRPO

CPU = "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(CPU), MemoryError()]


learner_of = partial(learners.learner_of, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """A full collection takes long among all the objects of the tests."""
    monkeypatch.setattr("gc.collect", lambda: 0)


class Small:
    """A scorer on a device that fits rows of at most some tokens."""

    def __init__(self, scorer, most, error, where):
        self.scorer, self.most, self.error, self.where = scorer, most, error, where
        self.router_coefficient = scorer.router_coefficient
        self.failures = 0

    def __call__(self, row, **settings):
        predictions, balance = self.scorer(row, **settings)
        if sum(row.lengths_B) <= self.most:
            return predictions, balance
        self.failures += 1
        if self.where == "forward" or not torch.is_grad_enabled():
            raise self.error

        def fail(gradient):
            raise self.error

        if self.where == "backward":
            predictions.logprobs_N.register_hook(fail)
        else:  # when a part of the gradient has been added
            target = next(self.scorer.model.parameters())
            handle = target.register_hook(lambda g: (handle.remove(), fail(g)))
        return predictions, balance


def gradient(learner):
    return {n: p.grad.clone() for n, p in learner.masters.tensors.items() if p.grad is not None}


@pytest.mark.parametrize(
    ("where", "error", "loss"),
    [
        ("forward", ERRORS[0], GSPO()),
        ("backward", ERRORS[1], DrGRPO(aggregation="token_mean")),
        ("late", ERRORS[2], GSPO(kl_coef=0.1)),
    ],
)
def test_a_pass_in_halves_has_the_gradient_of_the_whole(model, samples, where, error, loss):
    """And adds it to a gradient that was there before."""
    whole, short = (learner_of(model, loss) for _ in range(2))
    minibatches = [learner.score(learner.prepare(samples))[0] for learner in (whole, short)]
    for learner, minibatch in zip((whole, short), minibatches, strict=True):
        learner.backward(minibatch)
    whole.backward(minibatches[0])
    most = sum(len(s.token_ids) for s in samples) // 3
    short.scorer = Small(short.scorer, most, error, where)
    short.backward(minibatches[1])
    assert short.scorer.failures >= 2
    wanted, found = gradient(whole), gradient(short)
    assert wanted.keys() == found.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_one_sequence_that_does_not_fit_is_one_sentence(model, samples):
    learner = learner_of(model)
    learner.scorer = Small(learner.scorer, 3, ERRORS[0], "forward")
    with pytest.raises(TrainingError, match=r"one sequence of \d+ tokens does not fit") as found:
        learner.update(samples)
    assert "rollout.max_context" in str(found.value)


REAL = """
import resource, sys
import numpy as np, torch
from gspo_env.batch import Sample
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.recipes.build import build_model
from gspo_env.recipes.tiny import Tiny

model = build_model(Tiny(hidden_size=64), 2_000, 0, 0)
learner = Learner(model, GSPO(), LearnerConfig(minibatches=1, warmup_steps=0), total_steps=3)
rng = np.random.default_rng(0)
samples = [
    Sample(token_ids=rng.integers(1, 2_000, 201), turn_ids=np.array([-1] + [0] * 200),
           advantages=rng.normal(size=200), engine_logprobs=None)
    for _ in range(48)
]
learner.update(samples[:6])
if "limited" in sys.argv:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 60 * 2**20, resource.RLIM_INFINITY))
metrics = learner.update(samples)
found = [metrics[f"train/{name}"] for name in ("oom_splits", "grad_norm", "loss")]
print(*found)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_a_real_allocation_that_fails_is_halved():
    whole = {}
    exec(REAL, whole)
    done = run_python("-c", REAL, "limited")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "DefaultCPUAllocator" in done.stderr
    splits, *numbers = map(float, done.stdout.split()[-3:])
    assert splits >= 1
    assert whole["found"][0] == 0
    assert numbers == pytest.approx(whole["found"][1:], rel=1e-3, abs=1e-5)
