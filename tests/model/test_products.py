"""Products of oneDNN in place of MKL's: the same numbers, wherever a tensor comes from."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gspo_env.model.adapters import add_adapter
from gspo_env.model.attention import attend_by_products, is_half, weighted_sum
from gspo_env.model.products import attend_by_blocks, matmul, use_wide_products

SIZE = 96


def _layers():
    """Returns a changed layer, and a copy in float64."""
    torch.manual_seed(0)
    layer = nn.Linear(SIZE, SIZE)
    exact = copy.deepcopy(layer).double()
    use_wide_products(layer)
    return layer, exact


@settings(max_examples=12, deadline=None)
@given(
    shape=st.sampled_from([(5,), (2, 3), (1, 1, 7), (0,), ()]),
    start=st.integers(0, 2),
    frozen=st.sampled_from([(), ("weight",), ("weight", "bias")]),
)
def test_a_layer_and_its_gradients_are_those_in_float64(shape, start, frozen):
    layer, exact = _layers()
    for name in frozen:
        for module in (layer, exact):
            getattr(module, name).requires_grad_(False)
    wide = torch.randn(*shape, SIZE + 2, requires_grad=True)
    x = wide[..., start : start + SIZE]  # not contiguous
    x64 = wide.detach().double()[..., start : start + SIZE].requires_grad_()
    weights = torch.randn(*shape, SIZE)
    out, out64 = layer(x), exact(x64)
    torch.testing.assert_close(out.double(), out64, rtol=1e-4, atol=1e-4)
    (out * weights).sum().backward()
    (out64 * weights.double()).sum().backward()
    ours = wide.grad[..., start : start + SIZE]
    torch.testing.assert_close(ours.double(), x64.grad, rtol=1e-4, atol=1e-4)
    for parameter, expected in zip(layer.parameters(), exact.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad.double(), expected.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_computed_as_before(dtype):
    layer, _ = _layers()
    plain = nn.Linear(SIZE, SIZE, dtype=dtype)
    plain.load_state_dict(layer.to(dtype).state_dict())
    x = torch.randn(3, SIZE, dtype=dtype)
    assert torch.equal(layer(x), plain(x))


def test_autocast_is_obeyed():
    layer, _ = _layers()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, SIZE)).dtype is torch.bfloat16


def test_a_changed_model_takes_the_same_adapter(model):
    plain = copy.deepcopy(model)
    use_wide_products(model)
    ids = torch.arange(1, 9)[None]
    names = [
        {name for name, _ in add_adapter(m, rank=2).named_parameters()} for m in (model, plain)
    ]
    assert names[0] == names[1]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_special_layers_stay_as_they_are():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(8, 8))
    use_wide_products(model)
    assert type(model[0]) is Own


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
def test_products_of_transposed_matrices(transposed):
    torch.manual_seed(0)
    a, b = torch.randn(40, 50), torch.randn(50, 60)
    a, b = (x.t().contiguous().t() if t else x for x, t in zip((a, b), transposed, strict=True))
    torch.testing.assert_close(matmul(a, b).double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 600)), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 1), (6, 2), (3, 3)]),
    size=st.sampled_from([16, 64, 256]),
    window=st.sampled_from([None, 50]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_attention_by_blocks_is_that_of_each_query_alone(rows, heads, size, window, dtype):
    torch.manual_seed(0)
    queries = max(count for _, count in rows)
    length = -(-max(start + queries for start, _ in rows) // 16) * 16
    q, k, v = (
        torch.randn(len(rows), *shape, size).to(dtype)
        for shape in ((heads[0], queries), (heads[1], length), (heads[1], length))
    )
    place = torch.tensor([start for start, _ in rows])[:, None] + torch.arange(queries)
    distance = place[:, None, :, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    mask = torch.where(visible, 0.0, -torch.inf)
    sizes = [(row, count) for row, (_, count) in enumerate(rows)]
    out, norm = attend_by_blocks(q, k.float(), v, 0.2, mask, normaliser=True, sizes=sizes)
    repeated = (t.double().repeat_interleave(heads[0] // heads[1], 1) for t in (k, v))
    k64, v64 = repeated
    scores = 0.2 * q.double() @ k64.transpose(2, 3) + mask
    expected, tolerance = scores.softmax(-1) @ v64, 2e-2 if is_half(v) else 1e-4
    for row, count in sizes:
        ours, exact = out[row, :, :count].double(), expected[row, :, :count]
        torch.testing.assert_close(ours, exact, rtol=tolerance, atol=tolerance)
        exact = scores[row, :, :count].logsumexp(-1)
        torch.testing.assert_close(norm[row, :, :count].double(), exact, rtol=1e-4, atol=1e-4)
        assert (out[row, :, count:] == 0).all()


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="needs AVX-512"
)
@pytest.mark.parametrize("length", [480, 1040, 2064])
def test_a_query_of_a_bfloat16_model_has_one_output_however_many_are_computed(length):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 64).bfloat16() for heads in (8, 2, 2))
    keys = k.float().transpose(2, 3).contiguous().transpose(2, 3)
    visible = torch.arange(length) <= torch.arange(length)[:, None]
    mask = torch.where(visible, 0.0, -torch.inf)[None, None]
    whole, _ = attend_by_products(q, keys, v, 0.125, mask)
    for place in range(length // 2, length - 16, 48):
        near = slice(place // 16 * 16 + 16)
        query = slice(place, place + 1)
        part = q[:, :, query], keys[:, :, near], v[:, :, near], 0.125, mask[:, :, query, near]
        alone, _ = attend_by_products(*part)
        assert torch.equal(alone, whole[:, :, query])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("length", "places"),
    [(48, 64), (208, 1024), (1024, 1040), (1040, 2048), (1104, 1500), (2048, 2048), (3008, 3072)],
)
def test_places_of_a_cache_without_weight_change_no_bit_of_a_sum(dtype, length, places):
    torch.manual_seed(0)
    weights, values = torch.rand(6, 3, length).softmax(-1), torch.randn(6, places, 64).to(dtype)
    total = weighted_sum(weights, values)
    assert torch.equal(total, weighted_sum(weights, values[:, :length].contiguous()))
    exact = weights.to(dtype).double() @ values[:, :length].double()
    torch.testing.assert_close(total.double(), exact, rtol=0, atol=2e-3)
