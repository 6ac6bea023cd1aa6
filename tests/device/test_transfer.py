"""The channel of weights to a vLLM server. Runs where vLLM is: `pytest -m vllm`."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
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
