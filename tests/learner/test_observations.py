"""The next-observation loss: which tokens it has, its gradient, and what it leaves alone."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support import turns
from support.learners import learner_of

from gspo_env.batch.sample import to_samples
from gspo_env.distributed.messages import pack_shares, split_over_ranks, unpack_shares
from gspo_env.model.unpacked import run_alone
from gspo_env.types import StepInfo


def turn(parent, prompt, action, mask=None):
    ids = {"prompt_ids": tuple(prompt), "action_ids": tuple(action)}
    logprobs = (-1.0,) * len(action)
    return turns.turn(parent=parent, **ids, logprobs=logprobs, info=StepInfo(token_mask=mask))


def samples_of(*played):
    return to_samples([turns.episode(*played)], [np.zeros(len(played))], version=2)


def test_observations_are_the_prompts_of_later_turns_and_no_sampled_token():
    masked = turn(None, [1, 2], [3, 4], (True, False))
    whole, fork = samples_of(masked, turn(0, [5, 6], [7]), turn(0, [8], [9]))
    assert whole.token_ids[whole.observed].tolist() == [5, 6]
    assert fork.token_ids.tolist() == [1, 2, 3, 4, 8, 9]
    assert not fork.observed.any(), "what stands before the first trained token is its prompt"


@pytest.fixture
def observing():
    """Samples with a common prefix long enough to be shared, and one without an observation."""
    rng = np.random.default_rng(3)
    prompt, action = rng.integers(3, 200, 20).tolist(), rng.integers(3, 200, 18).tolist()
    rows = []
    for number, lengths in enumerate([(4, 3), (7, 2), (1, 5)]):
        answer, last = (rng.integers(3, 200, n).tolist() for n in lengths)
        rows += samples_of(turn(None, prompt, action), turn(0, answer, last))
        rows[-1] = replace(rows[-1], episode=number, advantages=rng.normal(size=18 + lengths[1]))
    alone = samples_of(turn(None, prompt, action))[0]
    return [*rows, replace(alone, episode=9, advantages=np.ones(18))]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_gradient_is_that_of_the_models_own_cross_entropy(
    model, observing, gradients, rows, packed, monkeypatch
):
    def made(**config):
        config |= {"microbatch_tokens": 10_000 if rows == 1 else 50}
        learner = learner_of(model, dtype=torch.float64, **config)
        if not packed:
            learner.policy.set_attn_implementation("sdpa")
            monkeypatch.setattr(learner.scorer, "_run", partial(run_alone, learner.scorer.states))
            learner._share_prefixes = False
        return learner

    both, metrics = gradients(made(observation_coef=0.3), observing)
    plain, plain_metrics = gradients(made(), observing)
    own = copy.deepcopy(model).double()
    own.set_attn_implementation("sdpa")
    total = torch.zeros(())
    for sample in observing:
        ids = torch.from_numpy(sample.token_ids)[None]
        logprobs = torch.log_softmax(own(ids).logits[0, :-1], -1)
        if (places := np.flatnonzero(sample.observed)).size:
            total = total - logprobs[places - 1, sample.token_ids[places]].mean()
    (0.3 * total / len(observing)).backward()
    for name, weight in own.named_parameters():
        torch.testing.assert_close(both[name], plain[name] + weight.grad, rtol=1e-4, atol=1e-7)
    assert metrics.pop("train/observation_loss") > 0
    for name in ("train/loss", "train/entropy", "train/ratio", "train/logprob_diff_max"):
        assert metrics[name] == pytest.approx(plain_metrics[name], abs=1e-6)
    assert metrics.keys() == plain_metrics.keys()


def test_observations_reach_other_ranks(observing):
    shares = split_over_ranks(observing, 2)
    for share in shares:
        (again,) = unpack_shares(*pack_shares([share]))
        for before, after in zip(share.samples, again.samples, strict=True):
            assert before.observed.tolist() == after.observed.tolist()
