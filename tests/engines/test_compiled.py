"""Compiled operations of a decode step: the numbers of PyTorch's, in bfloat16 to the last bit."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_models import llama, qwen2, qwen3, steps, with_weights

from gspo_env.engines.embedded.compiled import describe, start_compiled
from gspo_env.engines.embedded.direct import DirectForward
from gspo_env.engines.embedded.kv_attention import Queries
from gspo_env.model.attention import use_ragged_attention, value_places


@pytest.fixture(autouse=True, scope="module")
def compiler():
    if not describe().startswith("compiled"):
        pytest.skip(f"decoding is computed {describe()}")


@st.composite
def decoding(draw):
    """Rows of a step: their slots and positions, which begin alike, and the shape of the heads."""
    slots = draw(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True))
    most = draw(st.sampled_from([16, 160, 1600]))
    common = 16 * draw(st.integers(0, most // 16 - 1))
    starts = draw(st.lists(st.integers(common, most - 1), min_size=12, max_size=12))[: len(slots)]
    alike = draw(st.permutations(range(len(slots))))[: draw(st.integers(0, len(slots)))]
    heads, shared = draw(st.sampled_from([(9, 3), (4, 4), (7, 1), (10, 2)]))
    return {
        **{"slots": slots, "starts": starts, "alike": alike, "common": common},
        **{"heads": heads, "shared": shared, "capacity": most},
        "size": draw(st.sampled_from([32, 64, 96, 128])),
        "window": draw(st.sampled_from([None, 1, 20, 700])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "threads": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=60, deadline=None)
@given(decoding())
def test_attention_of_decoding_rows_is_that_of_pytorch(case):
    slots, starts = np.array(case["slots"]), np.array(case["starts"])
    shared, size, dtype, capacity = (case[k] for k in ("shared", "size", "dtype", "capacity"))
    generator = torch.Generator().manual_seed(case["seed"])
    half = dtype is torch.bfloat16

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    keys = random(12, shared, size, capacity).float()
    values = random(12, shared, value_places(capacity) if half else capacity, size)
    alike, common = case["alike"], case["common"]
    for row in alike[1:]:
        keys[slots[row], ..., :common] = keys[slots[alike[0]], ..., :common]
        values[slots[row], :, :common] = values[slots[alike[0]], :, :common]
    prefix = (common, [np.array(alike)]) if common and len(alike) > 1 else (0, [])
    query, key, value = random(len(slots), case["heads"] + 2 * shared, size).split(
        [case["heads"], shared, shared], 1
    )
    keys, others = keys.transpose(2, 3), (keys.clone().transpose(2, 3), values.clone())
    places = torch.tensor(slots), torch.tensor(starts)
    for cached, new in zip(others, (key, value), strict=True):
        cached.transpose(1, 2).index_put_(places, new.to(cached.dtype))

    families = [(7, common) if row in alike else None for row in range(len(slots))]

    def attend(rows, keys, values):
        step = Queries(slots, starts, np.ones_like(slots), prefix, rows)
        step.place(iter(map(torch.from_numpy, step.arrays)))
        assert step.store(key, value) is (rows is not None)
        return step.attend(query, keys, values, size**-0.5, case["window"])

    before = torch.get_num_threads()
    torch.set_num_threads(case["threads"])
    rows = partial(start_compiled(llama().config, 2).rows, families)
    ours = attend(rows, keys, values)
    expected = attend(None, *others)
    torch.set_num_threads(before)
    # PyTorch's own order depends on the number of queries, and on that of more than 512 values
    if half and max(starts) < 512 and (size == 64 or case["heads"] >= 4 * shared):
        assert torch.equal(ours, expected)
    elif half:
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=2**-9)
    else:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(keys, others[0])
    assert torch.equal(values, others[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_ragged_steps_have_the_numbers_of_the_models_modules(make, dtype):
    model = with_weights(make, 0.1, dtype)
    direct = DirectForward(model, fused=True, compiled=True)
    assert direct.rows is not None
    modules, ours = steps(model), steps(model, direct)
    if dtype is torch.bfloat16:
        exact = steps(copy.deepcopy(model).float())
        assert (ours - modules).abs().mean() <= 0.1 * (modules - exact).abs().mean()
    else:
        torch.testing.assert_close(ours, modules, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["k_proj", "v_proj", "o_proj"])
def test_a_weight_that_is_no_number_shows_in_the_log_probabilities(name):
    model = llama().eval()
    use_ragged_attention(model)
    direct = DirectForward(model, fused=True, compiled=True)
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, name).weight[3, 5] = torch.nan
    assert steps(model, direct).isnan().any(-1).all()


@pytest.mark.parametrize("command", ["no-such-compiler", "cc --no-such-option", 'cc "'])
def test_without_a_working_compiler_pytorch_computes_and_the_reason_is_said(
    monkeypatch, caplog, command
):
    monkeypatch.setenv("CC", command)
    model = llama().eval()
    use_ragged_attention(model)
    with caplog.at_level("INFO"):
        direct = DirectForward(model, fused=True, compiled=True)
    assert direct.rows is None
    assert f"{command} fails: " in caplog.text
    assert f"{command} fails: " in describe()
    torch.testing.assert_close(steps(model, direct), steps(model), rtol=1e-5, atol=2e-5)


def test_sizes_without_whole_vectors_are_left_to_pytorch():
    config = llama().config
    config.intermediate_size = 88
    assert start_compiled(config, 2) is None
