"""Shared prefixes: each shared token once, with the same numbers as separate sequences."""

import copy
import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.learners import learner_of, sample_of

from gspo_env.batch import prefix
from gspo_env.batch.packing import microbatches, pack
from gspo_env.batch.prefix import LEAST, build_tree, sort_by_prefix, split_minibatches
from gspo_env.learner import GSPO
from gspo_env.model import masked_attention
from gspo_env.model.attention import PackedAttention
from gspo_env.model.tree_attention import TreeAttention


def group(rng, count=8, vocabulary=200):
    """Episodes of one task: a common prompt, a first turn that most share, then separate turns."""
    prompt = rng.integers(1, vocabulary, 30)
    opening = rng.integers(1, vocabulary, 20)
    samples = []
    for n in range(count):
        first = opening if n < count - 2 else rng.integers(1, vocabulary, 20)
        own = rng.integers(1, vocabulary, rng.integers(3, 40))
        turns = [-1] * 30 + [0] * 20 + [-1] * 2 + [1] * (len(own) - 2)
        samples.append(sample_of(rng, np.concatenate([prompt, first, own]), turns))
    return samples


@pytest.fixture
def grouped():
    """Two groups, a copy of an episode, a prefix of another one, and an unrelated episode."""
    rng = np.random.default_rng(3)
    first, second = group(rng), group(rng)
    copied = sample_of(rng, first[0].token_ids, first[0].turn_ids)
    cut = sample_of(rng, first[1].token_ids[:-2], first[1].turn_ids[:-2])
    stranger = sample_of(rng, rng.integers(1, 200, 50), np.array([-1] * 10 + [0] * 40))
    mixed = [*first, *second, copied, cut, stranger]
    return [mixed[n] for n in rng.permutation(len(mixed))]


@pytest.fixture
def unshared(monkeypatch):
    """Calls a function with sharing switched off."""

    def run(work):
        with monkeypatch.context() as patch:
            patch.setattr(prefix, "_WORTH", 2.0)
            return work()

    return run


def exact(model):
    """A copy in float64, with float64 norms; the norms of the library compute in float32."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm, module)
    return model


def norm(module, x):
    return module.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


alphabet = st.lists(st.integers(0, 1), min_size=1, max_size=60).map(np.array)


@given(st.lists(alphabet, min_size=1, max_size=12))
def test_a_tree_holds_every_sequence_and_no_shared_run_twice(sequences):
    tree = build_tree(sequences, sort_by_prefix(sequences))
    size = sum(run.length for run in tree.runs)
    row, depth = np.full(size, -1), np.full(size, -1)
    for tokens, place in zip(sequences, tree.places, strict=True):
        assert np.isin(row[place], [-1, *tokens]).all()
        row[place], depth[place] = tokens, np.arange(len(tokens))
    for tokens, place in zip(sequences, tree.places, strict=True):
        assert row[place].tolist() == tokens.tolist()
    assert [run.start for run in tree.runs] == np.cumsum([0, *(r.length for r in tree.runs)])[
        :-1
    ].tolist()
    assert size <= sum(map(len, sequences)) - sort_by_prefix(sequences).saved.sum()
    for run in tree.runs:
        assert depth[run.start : run.stop].tolist() == list(
            range(run.depth, run.depth + run.length)
        )
        below = [r for r in tree.runs if run.stop <= r.start < run.end]
        assert all(r.depth >= run.depth + run.length for r in below)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("share", [False, True])
def test_attention_in_half_precision_on_a_cpu_rounds_its_weights_and_its_output(
    grouped, share, window, dtype
):
    batch = pack(grouped, share=share)
    generator = torch.Generator().manual_seed(0)
    shape = len(batch.input_ids_T), 2, 8
    values = [3 * torch.randn(*shape, generator=generator).to(dtype) for _ in range(4)]
    attention = TreeAttention(batch.runs) if share else PackedAttention(batch.lengths_B)

    def results(weight, *qkv):
        qkv = [tensor.clone().requires_grad_() for tensor in qkv]
        out = attention.attend(0, *qkv, 0.3, window)
        out.backward(weight)
        return [out.detach(), *(tensor.grad for tensor in qkv)]

    half, exact = results(*values), results(*(tensor.float() for tensor in values))
    if not share or window:  # without rounded weights
        assert torch.equal(half[0], exact[0].to(dtype))
    for result, expected in zip(half, exact, strict=True):
        assert result.dtype is dtype
        gap = (result.float() - expected).norm()
        assert gap <= torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_over_a_tree_is_that_of_each_sequence_alone(grouped, window, masked):
    batch = pack(grouped)
    sequences = [s.token_ids for s in grouped]
    tree = build_tree(sequences, sort_by_prefix(sequences))
    generator = torch.Generator().manual_seed(0)
    size = len(batch.input_ids_T)
    given = [
        torch.randn(size, h, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for h in (4, 2, 2)
    ]
    attention = TreeAttention(batch.runs)
    attend = (
        functools.partial(masked_attention.attend, attention)
        if masked
        else functools.partial(attention.attend, 0)
    )
    weight = torch.randn(size, 4, 8, dtype=torch.float64, generator=generator)
    out = attend(*given, 0.3, window)
    (out * weight).sum().backward()
    ours = [g.grad.clone() for g in given]

    places = torch.from_numpy(np.concatenate(tree.places))
    plain = [g.detach().clone().requires_grad_() for g in given]
    flat = PackedAttention(batch.lengths_B).attend(0, *(p[places] for p in plain), 0.3, window)
    torch.testing.assert_close(out[places], flat, rtol=0, atol=1e-12)
    # the weight of a token counts once, even if several sequences share it
    (flat * (weight / batch.uses_T[:, None, None])[places]).sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("level", ["sequence", "turn", "token"])
def test_the_gradient_is_that_of_computing_every_sequence(
    model, grouped, gradients, unshared, level
):
    settings = {"ratio_level": level, "old_logprobs": "engine", "clip_low": 0.5, "clip_high": 9.0}
    assert len(pack(grouped).input_ids_T) < 0.6 * sum(len(s.token_ids) for s in grouped)
    ours, metrics = gradients(learner_of(exact(model), GSPO(**settings)), grouped)
    plain = learner_of(exact(model), GSPO(**settings))
    wanted, plain_metrics = unshared(lambda: gradients(plain, grouped))
    for name, value in wanted.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)
    for name in ("train/loss", "train/ratio_max", "train/entropy", "train/logprob_diff_max"):
        assert metrics[name] == pytest.approx(plain_metrics[name], abs=1e-6)


def test_a_shared_model_token_counts_once_for_each_episode(model, gradients, unshared):
    rng = np.random.default_rng(0)
    tokens, turns, zeros = rng.integers(1, 200, 40), [-1] * 20 + [0] * 20, np.zeros(20)
    *twins, alone = (
        sample_of(rng, tokens, turns, advantages=np.full(20, credit), engine_logprobs=zeros)
        for credit in (3.0, -1.0, 1.0)
    )
    both, _ = gradients(learner_of(exact(model)), twins)
    one, _ = gradients(learner_of(exact(model)), [alone])
    assert len(pack(twins).input_ids_T) == 40
    for name, value in one.items():  # (3 - 1) / 2 sequences
        torch.testing.assert_close(both[name], value, rtol=0, atol=1e-10)


def test_rows_keep_their_limit_and_groups_stay_together(grouped):
    for limit in (60, 120, 300):
        rows = microbatches(grouped, limit)
        assert sorted(id(s) for row in rows for s in row) == sorted(map(id, grouped))
        assert all(len(row) == 1 or len(pack(row).input_ids_T) <= limit for row in rows)
    whole = len(pack(grouped).input_ids_T)
    assert len(microbatches(grouped, whole + LEAST * len(grouped))) == 1


def groups_of(sizes, rng):
    return [
        np.concatenate([head, rng.integers(0, 9, 3)])
        for size in sizes
        for head in [rng.integers(0, 9, 40)]
        for _ in range(size)
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 6), st.integers(0, 99))
def test_every_sequence_is_in_one_minibatch_and_their_sizes_are_equal(sizes, count, seed):
    rng = np.random.default_rng(seed)
    sequences = groups_of(sizes, rng)
    count = min(count, len(sequences))
    minibatches = split_minibatches(sequences, count, rng)
    assert sorted(n for minibatch in minibatches for n in minibatch) == list(range(len(sequences)))
    lengths = {len(minibatch) for minibatch in minibatches}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [8, 4, 4, 2, 8, 1, 1, 4]])
def test_every_sequence_is_equally_likely_in_every_minibatch_and_equal_groups_stay_together(sizes):
    rng = np.random.default_rng(0)
    sequences = groups_of(sizes, rng)
    counts = np.zeros((len(sequences), 4))
    for seed in range(2000):
        for n, minibatch in enumerate(split_minibatches(sequences, 4, np.random.default_rng(seed))):
            counts[minibatch, n] += 1
            assert max(sizes) > min(sizes) or len({m // 8 for m in minibatch}) == 1
    assert np.abs(counts / 2000 - 0.25).max() < 0.05
