"""The chunked head: values and gradients of full logits, for every chunk size."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import architectures, learners
from torch import nn

from gspo_env.batch.packing import pack
from gspo_env.model import head
from gspo_env.model.attention import use_ragged_attention

learner_of = partial(learners.learner_of, dtype=torch.float64, temperature=0.8)


@pytest.fixture
def chunk(monkeypatch):
    def set_to(logits):
        monkeypatch.setitem(head._CHUNK, "cpu", logits)

    return set_to


def both(count, vocabulary, temperature, bias, seed=0, dtype=torch.float64, entropy=False):
    """Values and gradients of the chunked head and of full logits."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    parts = [random(count, 6), random(vocabulary, 6)] + [random(vocabulary)] * bias
    target = torch.randint(vocabulary, (count,), generator=generator)
    weights = random(count)
    answers = []
    for chunked in (True, False):
        given = [p.clone().requires_grad_() for p in parts]
        b = given[2] if bias else None
        if chunked:
            output = head.predict(given[0], given[1], b, target, temperature, entropy=entropy)
        else:
            logits = nn.functional.linear(given[0], given[1], b)
            output = head.predict_from_logits(
                logits, target, temperature, entropy=entropy, marks_K=target[:0]
            )
        total = (output.logprobs_N * weights).sum()
        (total + (output.entropy_N * weights.flip(0)).sum() * entropy).backward()
        assert output.entropy_N.requires_grad == entropy
        answers.append((output, [g.grad for g in given]))
    return answers


@given(
    *(st.integers(1, 30), st.integers(2, 40), st.floats(0.3, 3), st.booleans()),
    *(st.integers(1, 200), st.booleans()),
)
def test_the_chunked_head_equals_full_logits(count, vocabulary, temperature, bias, size, entropy):
    whole, head._CHUNK["cpu"] = head._CHUNK["cpu"], size
    try:
        (ours, d_ours), (full, d_full) = both(count, vocabulary, temperature, bias, entropy=entropy)
    finally:
        head._CHUNK["cpu"] = whole
    torch.testing.assert_close(ours.logprobs_N, full.logprobs_N, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.entropy_N, full.entropy_N, rtol=0, atol=1e-10)
    assert torch.equal(ours.top1_N, full.top1_N)
    for a, b in zip(d_ours, d_full, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tied", [True, False])
def test_the_learner_has_the_gradient_of_full_logits(model, samples, gradients, chunk, tied):
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.7)
    chunk(10 * model.config.vocab_size)
    ours = learner_of(model)
    assert ours.scorer.head is ours.policy.lm_head
    found, metrics = gradients(ours, samples)
    plain = learner_of(model)
    plain.scorer.head = None
    wanted, plain_metrics = gradients(plain, samples)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    for name in ("train/loss", "train/entropy", "train/top1"):
        assert metrics[name] == pytest.approx(plain_metrics[name], abs=1e-9)


def test_an_adapter_on_the_head_counts(model, samples):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    policy = learners.adapted(model, target_modules=["q_proj", "lm_head"])
    learner = learner_of(policy)
    assert learner.scorer.head is None
    merged = learner_of(copy.deepcopy(policy).double().merge_and_unload().requires_grad_())
    batch = pack(samples)
    torch.testing.assert_close(learner.logprobs(batch), merged.logprobs(batch), rtol=0, atol=1e-9)


def test_a_model_that_caps_its_logits_is_not_taken_for_a_linear_head():
    capped, plain = (architectures.build("Gemma 2", attn_logit_softcapping=None) for _ in range(2))
    plain.config.final_logit_softcapping = None
    for each in (capped, plain):
        use_ragged_attention(each)
    assert head.linear_head(capped, packed=True) is None
    assert head.linear_head(plain, packed=True) is plain.lm_head
