"""The pretend GPU itself: it raises where a GPU raises, and counts where the host waits for it."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pretend_device import PretendTensor, pretend_gpu
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def gpu():
    with pretend_gpu() as device:
        yield device


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: a.add_(b),
        lambda a, b: b.add_(a),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(b > 0, a, a),
        lambda a, b: torch.nn.functional.linear(a, b),
        lambda a, b: a.index_select(0, torch.zeros(2, dtype=torch.long)),
        lambda a, b: b.index_select(0, torch.zeros(2, dtype=torch.long, device="cuda")),
    ],
)
def test_tensors_of_two_devices_raise(gpu, mix):
    a, b = torch.ones(3, 3, device="cuda"), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="all tensors to be on one device"):
        mix(a, b)


def test_scalars_and_copies_may_cross(gpu):
    a = torch.ones(3, device="cuda")
    assert (a * torch.tensor(2.0)).tolist() == [2, 2, 2]
    a.copy_(torch.arange(3.0))
    assert a.cpu().tolist() == [0, 1, 2]
    assert torch.equal(a.to("cpu", torch.float64), torch.arange(3.0).double())
    assert a[torch.tensor([2])].tolist() == [2]


def test_a_pretend_tensor_is_no_numpy_array_and_stays_on_its_device(gpu):
    a = torch.ones(3, device="cuda", requires_grad=True)
    assert a.device == torch.device("cuda:0")
    for made in (a.clone(), a.new_zeros(2), torch.zeros_like(a), a.detach(), a[0], a.double()):
        assert isinstance(made, PretendTensor)
        assert made.device.type == "cuda"
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        a.detach().numpy()
    with pytest.raises(RuntimeError, match="set to a tensor on the CPU"):
        a.data = torch.ones(3)


def test_data_of_another_dtype_is_seen_by_the_next_call(gpu):
    a = torch.nn.Parameter(torch.full((2,), 1.5, device="cuda", dtype=torch.bfloat16))
    a.data = a.data.float()
    assert a.dtype == (a * 2).dtype == torch.float32
    assert (a * 2).tolist() == [3, 3]


def test_a_shape_that_changes_in_place_is_seen(gpu):
    a = torch.ones(1, 3, device="cuda")
    assert a.squeeze_(0).shape == a.shape == (3,)
    assert (a + torch.ones(3, device="cuda")).shape == (3,)
    assert (a @ torch.ones(3, 2, device="cuda")).shape == (2,)


def test_a_view_in_inference_mode_is_possible(gpu):
    a = torch.ones(1, 3, device="cuda")
    with torch.inference_mode():
        assert (a.T @ a).transpose(0, 1)[0].tolist() == [1, 1, 1]
        assert not a.T.is_inference()
        assert (a + 1).T.is_inference()


def test_gradients_and_recomputation_give_the_numbers_of_the_cpu(gpu):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    moved, rows = copy.deepcopy(layer).to("cuda"), torch.randn(5, 4)
    layer(rows).square().sum().backward()
    checkpoint(moved, rows.to("cuda"), use_reentrant=False).square().sum().backward()
    for a, b in zip(layer.parameters(), moved.parameters(), strict=True):
        assert isinstance(b.grad, PretendTensor)
        assert torch.equal(a.grad, b.grad.cpu())


def test_tied_weights_stay_tied(gpu):
    layer = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    layer[1].weight = layer[0].weight
    layer.to("cuda")
    assert layer[1].weight is layer[0].weight
    assert len(list(layer.parameters())) == 3


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda a: a.sum().item(), "_local_scalar_dense"),
        (lambda a: float(a.sum()), "_local_scalar_dense"),
        (lambda a: bool((a > 0).all()), "_local_scalar_dense"),
        (lambda a: a.tolist(), "tolist"),
        (lambda a: a.cpu(), "download"),
        (lambda a: a.to("cpu"), "download"),
        (lambda a: (a > 0).nonzero(), "nonzero"),
        (lambda a: a[a > 0], "index"),
        (lambda a: a.masked_select(a > 0), "masked_select"),
        (lambda a: a[torch.tensor([0])], "index"),
        (lambda a: a[[0, 1]], "index"),
        (lambda a: a.unique(), "_unique2"),
        (lambda a: torch.bincount(a.long()), "bincount"),
        (lambda a: a.repeat_interleave(torch.ones_like(a).long()), "repeat_interleave"),
        (lambda a: torch.equal(a, a), "equal"),
        (lambda a: torch.tensor([1.0], device="cuda"), "tensor"),
        (lambda a: torch.ones(2).to("cuda"), "upload from memory that is not pinned"),
        (lambda a: torch.ones(2).pin_memory().to("cuda"), "upload from memory that is not pinned"),
    ],
)
def test_a_call_that_waits_for_the_device_is_counted_with_its_line(gpu, call, name):
    a = torch.arange(3.0, device="cuda")
    gpu.clear()
    call(a)
    ((found, place), count), *rest = gpu.waits.items()
    assert (count, rest) == (1, [])
    assert found.startswith(name)
    assert place.startswith("tests/device/test_pretend_device.py:")
    assert "lambda" in place


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a * 2 + torch.arange(3, device="cuda"),
        lambda a: torch.full((3,), 2.0, device="cuda") @ a,
        lambda a: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
        lambda a: a.index_add(0, a.long(), a)[a.long()],
        lambda a: a.masked_fill(a > 0, 1.0),
        lambda a: a.repeat_interleave(2),
        lambda a: torch.where(a > 0, a, 0.0),
    ],
)
def test_a_call_that_does_not_wait_is_not_counted(gpu, call):
    a = torch.arange(3.0, device="cuda")
    gpu.clear()
    call(a)
    assert not gpu.waits


def test_another_thread_reads_it_like_this_one(gpu):
    a = torch.arange(3.0, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: ((a + 1).cpu(), a.device.type)).result()
    assert not isinstance(found[0], PretendTensor)
    assert (found[0].tolist(), found[1]) == ([1, 2, 3], "cuda")


def test_nothing_is_left_behind():
    before = torch.nn.Module.to, torch.cuda.is_available
    with pretend_gpu():
        assert torch.cuda.is_available()
    assert (torch.nn.Module.to, torch.cuda.is_available) == before
    assert not torch.cuda.is_available()
