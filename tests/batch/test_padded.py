"""Padded batches: the same samples, the same update, and clear errors."""

from functools import partial

import numpy as np
import pytest
import torch
from support import learners

from gspo_env.batch.padded import from_padded
from gspo_env.credit import ReturnsToGo
from gspo_env.errors import BatchError
from gspo_env.learner import GSPO

IDS = torch.tensor([[5, 6, 7, 8, 9, 0], [0, 5, 6, 7, 0, 0], [5, 9, 9, 6, 0, 0], [5, 6, 6, 6, 6, 6]])
REAL = torch.tensor(
    [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
)
MODEL = torch.tensor(
    [[0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1]]
)
TURNS = torch.tensor(
    [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]]
)
GROUPS = [3, 3, 8, 8]
learner_of = partial(learners.learner_of, learning_rate=1e-2)


def build(**credit):
    return from_padded(IDS, REAL, MODEL, **credit)


def test_padding_on_either_side_is_dropped_and_turns_are_kept():
    samples = build(advantages=[1.0, 2.0, 3.0, 4.0], turn_ids=TURNS)
    assert samples[0].token_ids.tolist() == [5, 6, 7, 8, 9]
    assert samples[0].turn_ids.tolist() == [-1, 0, -1, 1, 1]
    assert samples[1].token_ids.tolist() == [5, 6, 7]
    assert samples[1].turn_ids.tolist() == [-1, 0, 0]
    assert samples[3].advantages.tolist() == [4.0] * 3


def test_rewards_of_episodes_become_the_groups_outcome_advantages():
    samples = build(rewards=[1.0, 0.0, 2.0, 2.0], group_ids=GROUPS)
    assert [s.advantages.tolist() for s in samples] == [[0.5] * 3, [-0.5] * 2, [0.0] * 2, [0.0] * 3]


def test_rewards_of_turns_go_through_any_estimator():
    rewards = [[1.0, 2.0], [0.5, np.nan], [0.0, 1.0], [1.0, 1.0]]
    samples = build(
        rewards=rewards, group_ids=GROUPS, turn_ids=TURNS, estimator=ReturnsToGo(scale="none")
    )
    # returns-to-go [3, 2] and [0.5]: each against the same turn of the other, else its mean
    np.testing.assert_allclose(samples[0].advantages, [3 - 0.5, 2 - 0.5, 2 - 0.5])
    np.testing.assert_allclose(samples[1].advantages, [0.5 - 3] * 2)


def test_the_update_is_that_of_the_same_samples_and_old_logprobs_are_used(model):
    width = model.config.vocab_size
    assert int(IDS.max()) < width
    plain = learner_of(model)
    plain.update(build(advantages=[1.0, -1.0, 0.5, 0.0]))
    by_token = learner_of(model)
    spread = torch.tensor([1.0, -1.0, 0.5, 0.0])[:, None].expand(4, 6)
    by_token.update(build(token_advantages=spread))
    assert all(map(torch.equal, plain.policy.parameters(), by_token.policy.parameters()))
    old = torch.full((4, 6), -3.0)
    given = learner_of(model, GSPO(old_logprobs="engine"))
    metrics = given.update(build(advantages=[1.0, -1.0, 0.5, 0.0], old_logprobs=old))
    assert abs(metrics["train/ratio"] - 1) > 1e-3
    assert "train/logprob_diff_max" in metrics


def test_unknown_logprobs_are_neither_measured_nor_used(model):
    samples = build(advantages=[1.0, -1.0, 0.5, 0.0])
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
        ({"advantages": [1.0]}, r"advantages has shape \(1,\); expected \(4,\)"),
        ({}, "exactly one of rewards, advantages and token_advantages"),
        ({"rewards": [1.0] * 4}, "without group_ids"),
        ({"rewards": [1.0] * 4, "group_ids": [0.5] * 4}, "group_ids has dtype float64"),
        ({"rewards": [1.0, np.nan, 0, 0], "group_ids": GROUPS}, "rewards of sequence 1"),
        ({"advantages": [1.0] * 4, "turn_ids": TURNS * 2}, r"turn_ids of sequence 0 are \[0, 2\]"),
        ({"advantages": [1.0] * 4, "old_logprobs": IDS * np.nan}, "old_logprobs hold NaN"),
        ({"token_advantages": [[1.0] * 4] * 4}, r"token_advantages has shape \(4, 4\)"),
    ],
)
def test_bad_batches_are_refused_in_one_sentence(changes, message):
    with pytest.raises(BatchError, match=message):
        build(**changes)


def test_masks_have_to_fit_the_tokens():
    beyond = MODEL.clone()
    beyond[1, 5] = 1
    with pytest.raises(BatchError, match="response_mask of sequence 1 is true on padding"):
        from_padded(IDS, REAL, beyond, advantages=[0.0] * 4)
    first = MODEL.clone()
    first[0, 0] = 1
    with pytest.raises(BatchError, match="first token of sequence 0"):
        from_padded(IDS, REAL, first, advantages=[0.0] * 4)
    with pytest.raises(BatchError, match="attention_mask holds other values"):
        from_padded(IDS, REAL * 2, MODEL, advantages=[0.0] * 4)


def test_rows_of_one_episode_get_the_credit_of_one_row_with_all_of_its_turns():
    rows = {"group_ids": [1, 1, 1], "episode_ids": [7, 8, 7]}
    ids, real = np.ones((3, 4), dtype=int), np.ones((3, 4))
    model = [[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    turns = [[0] * 4, [0, 0, 1, 1], [1] * 4]
    rewards = [[1.0, 0.5], [0.0, 2.0], [1.0, 0.5]]
    estimator = ReturnsToGo(scale="none")
    first, other, second = from_padded(
        ids, real, model, rewards=rewards, turn_ids=turns, estimator=estimator, **rows
    )
    assert (first.episode, other.episode, second.episode) == (7, 8, 7)
    joined = from_padded(
        np.ones((2, 8), dtype=int),
        np.ones((2, 8)),
        [model[0] + model[2], model[1] + [0] * 4],
        rewards=[rewards[0], rewards[1]],
        group_ids=[1, 1],
        turn_ids=[turns[0] + turns[2], turns[1] + [0] * 4],
        estimator=estimator,
    )
    assert [*first.advantages, *second.advantages] == joined[0].advantages.tolist()
    assert other.advantages.tolist() == joined[1].advantages.tolist()


def test_rows_of_an_episode_are_turns_in_order_by_default():
    samples = from_padded(
        IDS, REAL, MODEL, rewards=[1.0, 0.0, 1.0, 4.0], group_ids=[3] * 4, episode_ids=[5, 6, 5, 7]
    )
    assert [s.turn_ids.max() for s in samples] == [0, 0, 1, 0]
    assert samples[0].advantages[0] == samples[2].advantages[0] == pytest.approx(1 - 5 / 3)


def test_rows_of_an_episode_that_do_not_fit_together_are_named():
    rows = {"group_ids": GROUPS, "episode_ids": [5, 5, 6, 7]}
    with pytest.raises(BatchError, match=r"rewards of rows \[0, 1\] are .* they are one episode"):
        build(rewards=[1.0, 0.0, 2.0, 2.0], **rows)
    with pytest.raises(BatchError, match=r"turn_ids of sequences \[0, 1\] are \[0, 0, 1\]"):
        build(rewards=[1.0, 1.0, 2.0, 2.0], turn_ids=TURNS, **rows)
