"""Sleep and wake of vLLM in this process, its settings, and its channels, on a GPU."""

import asyncio
import copy
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.pretend_device import PretendTensor, pretend_gpu

from gspo_env.engines.vllm.local import VLLMEngine, engine_arguments
from gspo_env.engines.vllm.settings import VLLM, VLLMServer
from gspo_env.model.export import named_weights


class Recorder:
    """vLLM's engine without its computation: it records what it is asked."""

    def __init__(self, arguments):
        self.arguments, self.calls, self.loaded = arguments, [], {}
        self.engine_core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self.resets = self.copies = True
        self.model_config = SimpleNamespace(dtype=torch.float32)

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def wake_up(self, tags):
        self.calls.append(("wake", *tags))

    def collective_rpc(self, name, kwargs):
        self.calls.append(name)
        self.loaded = {n: t.cpu() if self.copies else t for n, t in kwargs["weights"]}
        return [{"unread": [], "stale": []}]

    def set_weight_version(self, version):
        self.calls.append(("version", version))

    def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests
        self.calls.append("reset")
        return self.resets


@pytest.fixture
def started(monkeypatch):
    """A function that starts `VLLMEngine` over a recorder, for a model on the pretend GPU."""
    vllm, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.EngineArgs = lambda **arguments: SimpleNamespace(**arguments)
    vllm.SamplingParams = lambda **arguments: SimpleNamespace(**arguments)
    vllm.LLMEngine = SimpleNamespace(from_engine_args=Recorder)
    parameters.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)

    def start(model, **settings):
        return VLLMEngine(model, VLLM(**settings), max_slots=4, max_context=64)

    return start


def test_vllm_sleeps_during_the_update_and_wakes_with_the_new_weights(model, started):
    with pretend_gpu():
        moved = copy.deepcopy(model).to("cuda")
        engine = started(moved)
        recorder = engine._engine
        assert recorder.arguments.enable_sleep_mode
        assert recorder.arguments.gpu_memory_utilization == VLLM().gpu_memory_utilization
        first, recorder.copies, recorder.calls = recorder.loaded, False, []
        asyncio.run(engine.sleep())
        asyncio.run(engine.sleep())  # asleep already
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(2)
        asyncio.run(engine.update_weights(named_weights(moved), 1))
        asyncio.run(engine.update_weights(named_weights(moved), 2))  # awake already
        assert engine.weights_version == 2
        engine.close()
    assert recorder.calls == [
        *(("sleep", 2), ("wake", "weights"), "load_checked", ("version", "1")),
        *(("wake", "kv_cache"), "reset", "load_checked", ("version", "2"), "reset", "shutdown"),
    ]
    assert recorder.loaded.keys() == first.keys()  # tied embeddings stay tied on a GPU
    for name, tensor in recorder.loaded.items():
        assert isinstance(tensor, PretendTensor)
        assert torch.equal(tensor.inner, 2 * first[name])


def test_weights_in_flight_wait_for_the_steps_that_a_gpu_still_computes(model, started):
    with pretend_gpu():
        moved = copy.deepcopy(model).to("cuda")
        engine = started(moved)
        recorder = engine._engine
        steps = ["b", "a"]  # two steps were begun; the request ends with the second

        def step():
            recorder.calls.append(f"step {steps[-1]}")
            return [ended] if steps.pop() == "b" else []

        sampled = SimpleNamespace(
            token_ids=[5, 6],
            logprobs=[{5: SimpleNamespace(logprob=-1.0)}, {6: SimpleNamespace(logprob=-2.0)}],
            finish_reason="length",
            weight_versions=[SimpleNamespace(version="0", start=0)],
        )
        ended = SimpleNamespace(finished=True, request_id="1", outputs=[sampled])
        recorder.step, recorder.calls = step, []
        recorder.engine_core.engine_core = SimpleNamespace(
            batch_queue=steps,
            pause_scheduler=lambda *how: recorder.calls.append(("pause", *how)),
            resume_scheduler=lambda: recorder.calls.append("resume"),
        )

        async def update():
            future = asyncio.get_running_loop().create_future()
            engine._running["1"] = SimpleNamespace(future=future)
            await engine.update_in_flight(named_weights(moved), 3)
            return await future

        done = asyncio.run(update())
        engine.close()
    assert (done.token_ids, done.weights_version, done.weights_versions) == ((5, 6), 0, ())
    assert recorder.calls == [
        *(("pause", "keep", False), "step a", "step b", "load_checked", ("version", "3"), "reset"),
        *("resume", "shutdown"),
    ]


def test_a_gpu_gets_its_own_arguments_of_vllm():
    settings = VLLMServer(gpu_memory_utilization=0.3, tensor_parallel_size=2)
    with pretend_gpu():
        there = engine_arguments(settings, torch.bfloat16, 8, 512)
    here = engine_arguments(settings, torch.bfloat16, 8, 512)
    assert there["gpu_memory_utilization"] == 0.3
    assert there["dtype"] == here["dtype"] == "bfloat16"
    assert there["tensor_parallel_size"] == 2
    assert "block_size" in here
    assert "block_size" not in there
    assert "enable_chunked_prefill" not in there


@pytest.mark.vllm
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
