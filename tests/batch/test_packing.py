"""Packing: no padding, each token once, and the correct predictor for each sampled token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_env.batch.packing import pack
from gspo_env.batch.padded import bare_episode
from gspo_env.batch.sample import Sample, to_samples
from gspo_env.errors import BatchError
from gspo_env.model.attention import PackedAttention, sdpa
from gspo_env.types import Task


def sample_of(turn_ids, start):
    turns = np.array(turn_ids, dtype=np.int64)
    n = int((turns >= 0).sum())
    return Sample(
        token_ids=np.arange(start, start + len(turns)),
        turn_ids=turns,
        advantages=np.arange(n, dtype=np.float64),
        engine_logprobs=np.zeros(n),
    )


def test_a_worked_example():
    batch = pack([sample_of([-1, -1, 0, 0, -1, 1], 10), sample_of([-1, 0], 50)])
    assert batch.input_ids_T.tolist() == [10, 11, 12, 13, 14, 15, 50, 51]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert batch.lengths_B == (6, 2)
    assert batch.source_N.tolist() == [1, 2, 4, 6]
    assert batch.target_N.tolist() == [12, 13, 15, 51]
    assert batch.episode_N.tolist() == [0, 0, 0, 1]
    assert batch.turn_N.tolist() == [0, 0, 1, 0]
    assert batch.advantages_N.tolist() == [0, 1, 2, 0]


lengths = st.lists(st.integers(2, 40), min_size=1, max_size=20)


@given(lengths, st.sampled_from([None, 3]))
def test_attention_of_a_packed_row_is_that_of_each_sequence_alone(sizes, window):
    generator = torch.Generator().manual_seed(len(sizes))
    total = sum(sizes)
    query = torch.randn(total, 4, 8, dtype=torch.float64, generator=generator)
    key, value = (
        torch.randn(total, 2, 8, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    out = PackedAttention(sizes).attend(0, query, key, value, 0.3, window)
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        q, k, v = (t[part].transpose(0, 1)[None] for t in (query, key, value))
        place = torch.arange(size)
        distance = place[:, None] - place
        mask = (distance >= 0) & (distance < (window or size + 1))
        alone = sdpa(q, k, v, 0.3, mask, causal=False)[0].transpose(0, 1)
        torch.testing.assert_close(out[part], alone, rtol=0, atol=1e-12)
        start += size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turn_ids": np.array([0, -1, 0])}, "the first token of a sample"),
        ({"turn_ids": np.array([-1, 0])}, "turn_ids of a sample has 2 values; expected 3"),
        ({"advantages": np.ones(3)}, "advantages of a sample has 3 values; expected 2"),
        ({"advantages": np.ones(0)}, "advantages of a sample has 0 values; expected 2"),
        ({"engine_logprobs": np.ones(1)}, "engine_logprobs of a sample has 1 values; expected 2"),
    ],
)
def test_a_sample_whose_arrays_do_not_fit_is_refused(changes, message):
    arrays = {"turn_ids": np.array([-1, 0, 0]), "advantages": np.ones(2)} | changes
    with pytest.raises(BatchError, match=message):
        Sample(token_ids=np.arange(3), **arrays)


@pytest.mark.parametrize("sizes", [(2, 0), (0, 2), (3, 0, 0), (0, 2, 1, 1), (1, 1)])
def test_an_empty_turn_does_not_turn_values_of_tokens_into_values_of_turns(sizes):
    task = Task(env_id="test", seed=0)
    bare = [bare_episode(task, row, [0.0] * len(row)) for row in (sizes, (3,))]
    turns = [tuple(replace(turn, prompt_ids=(9,)) for turn in e.turns) for e in bare]
    episodes = [replace(e, turns=row) for e, row in zip(bare, turns, strict=True)]
    tokens = [np.arange(1.0, 1 + sum(sizes)), np.arange(3.0)]
    of_tokens = to_samples(episodes, tokens)
    assert [s.advantages.tolist() for s in of_tokens] == [row.tolist() for row in tokens]
    of_turns = np.arange(1.0, 1 + len(sizes))
    first = to_samples(episodes, [of_turns, np.array([7.0])])[0]
    np.testing.assert_array_equal(first.advantages, np.repeat(of_turns, sizes))
