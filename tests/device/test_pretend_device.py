"""The pretend GPU itself: it raises where a GPU raises, and counts where the host waits for it."""

from __future__ import annotations

import pytest
import torch
from pretend_device import PretendTensor, pretend_gpu


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
