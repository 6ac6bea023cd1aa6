"""Padded batches: the same samples, the same update, and clear errors."""

from __future__ import annotations

from functools import partial

import learners
import numpy as np
import pytest
import torch

from gspo_env.batch.padded import from_padded
from gspo_env.errors import BatchError
from gspo_env.learner import GSPO

IDS = torch.tensor([[5, 6, 7, 8, 9, 0], [0, 5, 6, 7, 0, 0], [5, 9, 9, 6, 0, 0], [5, 6, 6, 6, 6, 6]])
REAL = torch.tensor(
    [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
)
MODEL = torch.tensor(
    [[0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1]]
)
learner_of = partial(learners.learner_of, learning_rate=1e-2)


def build(advantages=(1.0, -1.0, 0.5, 0.0), **others):
    return from_padded(IDS, REAL, MODEL, advantages, **others)


def test_padding_on_either_side_is_dropped():
    samples = build([1.0, 2.0, 3.0, 4.0])
    assert samples[0].token_ids.tolist() == [5, 6, 7, 8, 9]
    assert samples[0].turn_ids.tolist() == [-1, 0, -1, 0, 0]
    assert samples[1].token_ids.tolist() == [5, 6, 7]
    assert samples[1].turn_ids.tolist() == [-1, 0, 0]
    assert samples[3].advantages.tolist() == [4.0] * 3
    assert [sample.episode for sample in samples] == [0, 1, 2, 3]


def test_the_update_is_that_of_the_same_samples_and_old_logprobs_are_used(model):
    width = model.config.vocab_size
    assert int(IDS.max()) < width
    plain = learner_of(model)
    plain.update(build())
    by_token = learner_of(model)
    spread = torch.tensor([1.0, -1.0, 0.5, 0.0])[:, None].expand(4, 6)
    by_token.update(build(spread))
    for a, b in zip(plain.policy.parameters(), by_token.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    old = torch.full((4, 6), -3.0)
    given = learner_of(model, GSPO(old_logprobs="engine"))
    metrics = given.update(build(old_logprobs=old))
    assert abs(metrics["train/ratio"] - 1) > 1e-3
    assert "train/logprob_diff_max" in metrics


def test_unknown_logprobs_are_neither_measured_nor_used(model):
    samples = build()
    metrics = learner_of(model).update(samples)
    assert "train/logprob_diff_max" not in metrics
    assert all(np.isfinite(value) for value in metrics.values())
    with pytest.raises(BatchError, match="engine_logprobs"):
        learner_of(model, GSPO(old_logprobs="engine")).update(samples)
    with pytest.raises(BatchError, match="engine_logprobs"):
        learner_of(model, GSPO(correction="truncated")).update(samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": [1.0]}, r"advantages has shape \(1, 1\); expected \(4,\) or"),
        ({"advantages": [1.0, np.nan, 0, 0]}, "the advantages hold NaN"),
        ({"old_logprobs": IDS * np.nan}, "the engine_logprobs hold NaN"),
        ({"advantages": [[1.0] * 4] * 4}, r"advantages has shape \(4, 4\)"),
    ],
)
def test_bad_batches_are_refused_in_one_sentence(changes, message):
    with pytest.raises(BatchError, match=message):
        build(**changes)


def test_masks_have_to_fit_the_tokens():
    beyond = MODEL.clone()
    beyond[1, 5] = 1
    with pytest.raises(BatchError, match="response_mask of sequence 1 is true on padding"):
        from_padded(IDS, REAL, beyond, [0.0] * 4)
    first = MODEL.clone()
    first[0, 0] = 1
    with pytest.raises(BatchError, match="the first token of a sample is sampled"):
        from_padded(IDS, REAL, first, [0.0] * 4)
    with pytest.raises(BatchError, match="attention_mask holds other values"):
        from_padded(IDS, REAL * 2, MODEL, [0.0] * 4)
