"""Episodes of several sequences have one ratio, one length and one weight, however cut."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support import learners
from support.objective_reference import policy_loss as reference_loss
from support.turns import episode, turn

from gspo_env.batch.sample import to_samples
from gspo_env.errors import BatchError
from gspo_env.learner import GRPO, GSPO, ClippedLoss, DrGRPO, Loss, policy_loss
from gspo_env.model.head import body_of

learner_of = partial(learners.learner_of, dtype=torch.float64)


def in_float32(values):
    """A row holds log-probabilities of the engine and advantages in float32."""
    return tuple(values.astype(np.float32).tolist())


def episode_of(rng, parents, vocabulary=200, most=12):
    """An episode of random tokens whose turns continue the given turns."""
    played = []
    for parent in parents:
        action = rng.integers(3, vocabulary, rng.integers(1, most)).tolist()
        played.append(
            turn(
                parent=parent,
                prompt_ids=tuple(rng.integers(3, vocabulary, rng.integers(1, 2 * most)).tolist()),
                action_ids=tuple(action),
                logprobs=in_float32(np.log(rng.uniform(0.7, 1.4, len(action))) - 5.3),
                reward=float(rng.standard_normal()),
                weights_version=2,
                weights_versions=((2, 1), (4, len(action) - 1)) if len(action) > 5 else (),
            )
        )
    return episode(*played)


def episodes(seed=0):
    """A growing transcript, a compacted one, a fork, interleaved agents, and one of a turn."""
    rng = np.random.default_rng(seed)
    shapes = [
        [None, 0, 1],
        [None, 0, None, 2, None],
        [None, 0, 0, 1, 1],
        [None, None, 0, 1, 2, 3],
        [None],
    ]
    return [episode_of(rng, shape) for shape in shapes]


def credit(played, seed=1):
    rng = np.random.default_rng(seed)
    return [np.array(in_float32(rng.standard_normal(len(e.turns)))) for e in played]


def context_of(played, k):
    """The tokens before the action of a turn, from its parents."""
    parent = played.parents[k]
    before = []
    if parent is not None:
        before = [*context_of(played, parent), *played.turns[parent].action_ids]
    return [*before, *played.turns[k].prompt_ids]


def logprobs_by_turn(model, played):
    """The log-probabilities of all sampled tokens, each in its own context, without packing."""
    found = []
    for k, each in enumerate(played.turns):
        ids = torch.tensor([[*context_of(played, k), *each.action_ids]])
        rows = torch.log_softmax(model(ids).logits[0, :-1], -1)
        place = torch.arange(len(ids[0]) - len(each.action_ids) - 1, len(ids[0]) - 1)
        found.append(rows[place, ids[0, place + 1]])
    return torch.cat(found)


def as_rows(played, values):
    """One padded row for each episode, from an array for each episode."""
    longest = max(e.model_tokens for e in played)
    return np.stack([np.pad(np.asarray(v), (0, longest - len(v))) for v in values])


def by_token(played, values):
    sizes = [[len(t.action_ids) for t in e.turns] for e in played]
    return [np.repeat(v, n) for v, n in zip(values, sizes, strict=True)]


def ages_of(turn):
    """At version 4; the weights changed after the first token of a long action."""
    count = len(turn.action_ids)
    return [2] * count if count <= 5 else [2, *[0] * (count - 1)]


LOSSES = {
    "gspo": GSPO(clip_low=0.1, clip_high=0.1, old_logprobs="engine"),
    "turn": GSPO(ratio_level="turn", clip_low=0.1, clip_high=0.1, old_logprobs="engine"),
    "grpo": GRPO(old_logprobs="engine"),
    "mean": GSPO(clip_low=0.1, clip_high=0.1, ratio_mean=0.5, old_logprobs="engine"),
    "sum": DrGRPO(ratio_level="sequence", old_logprobs="engine", max_tokens=50),
    "dapo": GSPO(clip_low=0.1, clip_high=0.1, aggregation="token_mean", old_logprobs="engine"),
    "turn_mean": GSPO(clip_low=0.1, clip_high=0.1, aggregation="turn_mean", old_logprobs="engine"),
    "stale": GRPO(clip_low=0.3, clip_staleness=-1.0, positives="unclipped", old_logprobs="engine"),
    "kl": GSPO(clip_low=0.1, clip_high=0.1, kl_coef=0.3, old_logprobs="engine"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [10_000, 60, 1])
def test_the_loss_and_its_gradient_are_those_of_the_likelihood_of_whole_episodes(
    model, gradients, name, tokens
):
    loss, played = LOSSES[name], episodes()
    values = credit(played)
    learner = learner_of(model, loss, microbatch_tokens=tokens)
    found, metrics = gradients(learner, to_samples(played, values, version=4))

    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("sdpa")
    logprobs = [logprobs_by_turn(plain, e) for e in played]
    rows = [p.detach().numpy() for p in logprobs]
    options = {k: getattr(loss, k) for k in ("ratio_level", "ratio_mean", "clip_low", "clip_high")}
    options |= {k: getattr(loss, k) for k in ("aggregation", "max_tokens", "kl_coef")}
    options |= {k: getattr(loss, k) for k in ("positives", "clip_staleness")}
    expected = reference_loss(
        as_rows(played, rows),
        as_rows(played, [e.engine_logprobs for e in played]),
        as_rows(played, by_token(played, values)),
        as_rows(played, [np.ones(e.model_tokens) for e in played]).astype(bool),
        turn_ids=as_rows(played, by_token(played, [range(len(e.turns)) for e in played])),
        ages=as_rows(played, [[a for t in e.turns for a in ages_of(t)] for e in played]),
        **options,
    )
    assert metrics["train/loss"] == pytest.approx(expected.loss, abs=1e-10)
    slopes = torch.from_numpy(expected.gradient)
    sum((slopes[i, : len(p)] * p).sum() for i, p in enumerate(logprobs)).backward()
    for parameter, value in plain.named_parameters():
        torch.testing.assert_close(found[parameter], value.grad, rtol=1e-4, atol=1e-8)


def test_the_ratio_of_an_episode_in_several_rows_stays_that_of_the_whole_after_a_step(model):
    played = [e for seed in range(3) for e in episodes(seed)]
    samples = to_samples(played, credit(played))
    ends = []
    for tokens in (10_000, 1):
        config = {"minibatches": 3, "learning_rate": 1e-2, "microbatch_tokens": tokens}
        learner = learner_of(model, GSPO(clip_low=0.3, clip_high=0.3), **config)
        metrics = learner.update(samples)
        assert metrics["train/ratio_max"] > 1.01
        ends.append((metrics, {n: p.detach() for n, p in learner.policy.named_parameters()}))
    (one, weights), (other, same) = ends
    for key in ("train/loss", "train/ratio", "train/ratio_min", "train/ratio_max"):
        assert one[key] == pytest.approx(other[key], abs=1e-7)
    torch.testing.assert_close(same, weights, rtol=1e-3, atol=1e-6)


def test_the_first_step_needs_no_pass_for_its_ratios(model, gradients):
    played = episodes()
    samples = to_samples(played, credit(played))
    learner = learner_of(model, GSPO(), microbatch_tokens=1)
    passes = []
    body_of(learner.policy).register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    found, metrics = gradients(learner, samples)
    assert passes == [True] * len(samples)
    assert metrics["train/ratio_min"] == metrics["train/ratio_max"] == 1.0
    whole, _ = gradients(learner_of(model, GSPO()), samples)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-8)


def _weighted(base):
    """A loss whose weight is the mean likelihood of each whole episode's tokens."""

    class Weighted(base):
        def compute(self, inputs):
            p_N, episode_N = inputs.logprobs_N.detach().exp(), inputs.episode_N
            sums_E = p_N.new_zeros(inputs.num_episodes).index_add(0, episode_N, p_N)
            sizes_E = torch.bincount(episode_N, minlength=inputs.num_episodes)
            weight_N = (sums_E / sizes_E)[episode_N]
            changed = replace(inputs, advantages_N=inputs.advantages_N * weight_N)
            return GSPO.compute(GSPO(), changed) if base is Loss else base.compute(self, changed)

    return Weighted()


@pytest.mark.parametrize("base", [GSPO, GRPO, DrGRPO, ClippedLoss, Loss])
def test_a_loss_of_ones_own_gets_the_log_probabilities_of_an_episodes_other_rows(
    model, gradients, base
):
    samples = to_samples(episodes(), credit(episodes()))
    found, _ = gradients(learner_of(model, _weighted(base), microbatch_tokens=1), samples)
    whole, _ = gradients(learner_of(model, _weighted(base)), samples)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-8)


def test_policy_loss_takes_rows_of_one_episode():
    rng = np.random.default_rng(0)
    new, old, adv = (torch.tensor(rng.standard_normal((3, 4))) for _ in range(3))
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    joined = [torch.cat([v[0], v[2]])[None] for v in (new, old, adv, mask)]
    padded = [torch.nn.functional.pad(v[1][None], (0, 4)) for v in (new, old, adv, mask)]
    whole = policy_loss(*(torch.cat(pair) for pair in zip(joined, padded, strict=True)))
    ids = torch.tensor([0, 1, 0])
    assert policy_loss(new, old, adv, mask, episode_ids=ids).loss == whole.loss
    with pytest.raises(BatchError, match=r"episode_ids has shape \(2,\)"):
        policy_loss(new, old, adv, mask, episode_ids=ids[:2])
