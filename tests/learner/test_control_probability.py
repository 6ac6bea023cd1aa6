"""The probability of control tokens and of marks of calls where another token was sampled."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from support import learners
from support.learners import adapted

from gspo_env.model import head

learner_of = partial(learners.learner_of, dtype=torch.float64, temperature=0.8)
NAME, MARKS = "train/control_token_probability", [7, 31, 150]


def test_the_probability_of_marks_is_the_hand_worked_one_in_chunks_and_whole(monkeypatch):
    chance_NV = torch.tensor([[4, 2, 1, 1], [1, 1, 4, 2]], dtype=torch.float64) / 8
    eye, targets, marks = torch.eye(4).double(), torch.tensor([0, 1]), torch.tensor([1, 3])
    expected = torch.tensor([3 / 8, 2 / 8]).double()  # the second sampled one of them
    monkeypatch.setitem(head._CHUNK, "cpu", 4)
    chunks = head.predict(chance_NV.log(), eye, None, targets, marks_K=marks)
    whole = head.predict_from_logits(chance_NV.log(), targets, 1.0, entropy=False, marks_K=marks)
    for predictions in (chunks, whole):
        torch.testing.assert_close(predictions.marks_N, expected)
    assert not head.predict(chance_NV.log(), eye, None, targets).marks_N.any()


def mean_mass(model, samples):
    """The mean over the tokens behind the first of a turn of what other marks have, not packed."""
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("sdpa")
    masses = []
    for sample in samples:
        ids, places = torch.from_numpy(sample.token_ids), np.flatnonzero(sample.mask)
        chances = (plain(ids[None]).logits[0, places - 1].double() / 0.8).softmax(-1)
        chances[range(len(places)), ids[places]] = 0
        turns = sample.turn_ids[places]
        masses.append(chances[1:, MARKS].sum(-1)[turns[1:] == turns[:-1]])
    return torch.cat(masses).mean().item()


@pytest.mark.parametrize("observing", [0.0, 0.5])
@pytest.mark.parametrize("tokens", [10_000, 60])
@pytest.mark.parametrize("kind", ["whole", "adapter", "no linear head"])
def test_the_metric_is_that_of_the_definition_and_moves_no_weight(
    model, samples, gradients, kind, tokens, observing
):
    given = adapted(model) if kind == "adapter" else copy.deepcopy(model)
    plain = learner_of(given, microbatch_tokens=tokens, observation_coef=observing)
    given.config.mark_ids = MARKS
    watching = learner_of(given, microbatch_tokens=tokens, observation_coef=observing)
    if kind == "no linear head":
        plain.scorer.head = watching.scorer.head = None
    wanted, without = gradients(plain, samples)
    found, metrics = gradients(watching, samples)
    assert NAME not in without
    assert metrics[NAME] == pytest.approx(mean_mass(given, samples), rel=1e-6)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
