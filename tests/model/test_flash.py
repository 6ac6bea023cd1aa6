"""Attention by flash kernels for rows of sequences: the numbers of the other paths.

The kernels run on a reference that takes the same calls, in float64, or on a pretend GPU.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import flash_reference
from support.pretend_device import pretend_gpu

from gspo_env.batch.prefix import Run
from gspo_env.model import masked_attention
from gspo_env.model.attention import PackedAttention, has_kernel
from gspo_env.model.tree_attention import TreeAttention

flash_reference.register()
WINDOWS = st.sampled_from([None, None, 1, 2, 5, 100])
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)])


@st.composite
def trees(draw):
    """Random runs in depth-first order."""
    runs = []

    def grow(start, depth, level):
        length = draw(st.integers(1, 6))
        end = start + length
        place = len(runs)
        runs.append(None)
        for _ in range(draw(st.integers(0, 3)) if level < 3 else 0):
            end = grow(end, depth + length, level + 1)
        runs[place] = Run(start=start, length=length, depth=depth, end=end)
        return end

    row = 0
    for _ in range(draw(st.integers(1, 3))):
        row = grow(row, 0, 0)
    return tuple(runs)


def rows(count, heads, dtype=torch.float64, size=8, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, n, size, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]


def results(attend, tensors):
    """The output and the gradients for a fixed gradient of it."""
    out = attend(*tensors)
    rng = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, gradient)]


def compare(make, tensors, window, tolerance):
    with pytest.MonkeyPatch.context() as patched:
        plain = make()
        expected = results(lambda q, k, v: plain.attend(0, q, k, v, 0.3, window), tensors)
        patched.setattr(PackedAttention, "has_kernel", staticmethod(lambda *_: True))
        found = results(lambda q, k, v: make().attend(0, q, k, v, 0.3, window), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), HEADS, WINDOWS)
def test_packed_rows_have_the_output_and_gradients_of_padded_buckets(lengths, heads, window):
    compare(lambda: PackedAttention(lengths), rows(sum(lengths), heads), window, 1e-10)


@given(trees(), HEADS, WINDOWS)
def test_trees_have_the_output_and_gradients_of_the_masked_path(runs, heads, window):
    count = sum(run.length for run in runs)

    class Masked(TreeAttention):
        def attend(self, layer, q, k, v, scale, window):
            if has_kernel(q, k, v):
                return super().attend(layer, q, k, v, scale, window)
            return masked_attention.attend(self, q, k, v, scale, window)

    compare(lambda: Masked(runs), rows(count, heads), window, 1e-10)


def tensors_of(dtype=torch.bfloat16, sizes=(16, 16, 16), device="cuda"):
    return [torch.zeros(3, 2, n, dtype=dtype, device=device) for n in sizes]


def test_the_kernels_are_for_half_precision_on_a_gpu():
    assert not has_kernel(*tensors_of(device="cpu"))
    with pretend_gpu():
        assert has_kernel(*tensors_of())
        assert has_kernel(*tensors_of(torch.float16))
        assert not has_kernel(*tensors_of(torch.float32))
        q, k, v = tensors_of()
        assert has_kernel(q.float(), k.float(), v)  # as some norms leave them
        assert not has_kernel(q, k, v.float())


FORK = [
    Run(start=0, length=6, depth=0, end=20),
    Run(start=6, length=9, depth=6, end=15),
    Run(start=15, length=5, depth=6, end=20),
]


def on_both(make, window, dtype):
    """The results on a CPU in float64 and on a pretend GPU, and the GPU."""
    tensors = rows(20, (4, 2), torch.float64)
    expected = results(lambda q, k, v: make("cpu").attend(0, q, k, v, 0.3, window), tensors)
    with pretend_gpu() as gpu:
        moved = [t.detach().to(dtype).to("cuda").requires_grad_() for t in tensors]
        attention = make("cuda")
        gpu.clear()
        out = attention.attend(0, *moved, 0.3, window)
        rng = torch.Generator().manual_seed(1)
        gradient = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(dtype).to("cuda")
        return expected, [out, *torch.autograd.grad(out, moved, gradient)], gpu


@pytest.mark.parametrize("largest", [0, 1 << 24])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_on_a_gpu_have_the_numbers_of_the_cpu(window, largest, monkeypatch):
    """One mask for a small row, and one for each bucket of a large one."""
    monkeypatch.setattr(masked_attention, "_WHOLE", largest)
    expected, found, gpu = on_both(lambda d: TreeAttention(FORK, d), window, torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.inner, b, rtol=1e-10, atol=1e-10)
    gathers = any("index_select" in name for name in gpu.kernels)
    assert gathers == (not largest)
    assert not [place for _, place in gpu.waits if place.startswith("gspo_env")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["packed", "tree"])
def test_a_gpu_runs_the_kernels_and_nothing_else(kind, window, dtype):
    def make(device):
        return (
            PackedAttention([7, 1, 12], device) if kind == "packed" else TreeAttention(FORK, device)
        )

    expected, found, gpu = on_both(make, window, dtype)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.inner.double(), b, rtol=0.05, atol=0.05)
    called = " ".join(gpu.kernels)
    assert "_varlen_attn" in called or "_flash_attention_forward" in called
    assert "scaled_dot_product" not in called
    waits = [place for (_, place), _ in gpu.waits.items() if place.startswith("gspo_env")]
    assert not waits
