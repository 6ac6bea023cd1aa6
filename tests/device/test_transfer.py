"""Weights of a GPU on their way to a vLLM server. Runs where vLLM is: `pytest -m vllm`."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from pretend_device import PretendTensor, pretend_gpu

from gspo_env.model.export import named_weights

pytestmark = pytest.mark.vllm


class Wire:
    """A process group and a server that record what they get."""

    def __init__(self):
        self.sent, self.calls = [], []

    def broadcast(self, tensor, rank):
        self.sent.append(tensor)
        return SimpleNamespace(wait=lambda: None)

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)


def test_gloo_sends_the_weights_of_a_gpu_from_the_cpu(model):
    from gspo_env.engines.vllm import transfer

    source, wire = transfer.Weights(), Wire()
    with pretend_gpu():
        moved = copy.deepcopy(model).to("cuda")
        source.set(named_weights(moved))
        trainer = transfer.GlooTrainer(client=wire, source=source)
        trainer._group = wire
        trainer.send_weights()
    expected = dict(named_weights(model))
    assert [p.name for p in source.described()] == list(expected)
    for tensor, weight in zip(wire.sent, expected.values(), strict=True):
        assert not isinstance(tensor, PretendTensor)
        assert tensor.is_contiguous()
        assert torch.equal(tensor, weight)
    assert wire.calls == ["start_weight_update", "update_weights", "finish_weight_update"]


@pytest.mark.parametrize("backend", ["nccl", "ipc", "gloo"])
def test_a_channel_is_opened_with_what_its_backend_needs(monkeypatch, backend):
    from gspo_env.engines.vllm import transfer
    from gspo_env.engines.vllm.process import Server

    seen = []
    factory = transfer.WeightTransferTrainerFactory
    monkeypatch.setattr(factory, "trainer_init", lambda info, **keywords: seen.append(info))
    server = Server(address="http://127.0.0.1:8000")
    transfer.open_channel(backend, server, 2, transfer.Weights())
    (info,) = seen
    if backend == "ipc":
        assert info.packed
    else:
        assert (info.rank, info.world_size) == (0, 3)
        assert info.master_address == "127.0.0.1"
