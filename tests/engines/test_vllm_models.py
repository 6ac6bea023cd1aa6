"""Real vLLM: every weight of a model reaches the engine, or the engine is refused with a reason.

Runs where vLLM is installed: `pytest -m vllm`.
"""

import asyncio
import copy
import os
import signal
from contextlib import contextmanager

import httpx2 as httpx
import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.logprobs import difference, difference_by_version
from support.sampled_tokens import sampled_more

from gspo_env.batch.packing import pack
from gspo_env.engines import Completion, Sampling
from gspo_env.engines.vllm import local, process, server
from gspo_env.engines.vllm.local import VLLM, VLLMEngine
from gspo_env.engines.vllm.requests import sampling_fields
from gspo_env.engines.vllm.server import VLLMServer, VLLMServerEngine
from gspo_env.engines.vllm.settings import EXTENSION
from gspo_env.errors import EngineError
from gspo_env.model.adapters import add_adapter
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.export import Exporter, named_weights
from gspo_env.model.scorer import Scorer
from gspo_env.model.unused import hide
from gspo_env.runtime.processes import spawn
from gspo_env.training.weight_check import HALF_TOLERANCE
from gspo_env.training.weight_check import difference as mean_difference

pytestmark = pytest.mark.vllm

SIZES = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    **{"max_position_embeddings": 256, "tie_word_embeddings": False},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}
MODELS = {
    "Qwen3Moe": {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32},
    "Mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "Gemma3": {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 2},
    "GptOss": {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 16},
    "Llama": {"tie_word_embeddings": True},
}
EAGER = VLLM(enforce_eager=True)
ROOM = {"max_slots": 8, "max_context": 128}
PROMPTS = [list(range(2, 30)), [9, 8, 7], [40, 3, 40, 5]]


def tiny(name):
    kind = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**{**SIZES, **MODELS[name]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def perturb(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1 + 0.3 * torch.randn_like(parameter)).add_(0.01)


def differs(engine, model, packed=False):
    """The mean difference of the probabilities that the engine and the model give.

    The model computes plainly, or in packed rows as the trainer does.
    """
    if packed:
        trained = copy.deepcopy(model)
        use_ragged_attention(trained)
        scorer = Scorer(trained, 1.0)

    @torch.no_grad()
    def score(sample):
        if packed:
            row = pack([sample, sample], share=False)
            return scorer(row)[0].logprobs_N[: sample.mask.sum()].double().numpy()
        ids = torch.from_numpy(sample.token_ids)[None]
        logprobs = model(ids).logits[0].log_softmax(-1)
        places = np.flatnonzero(sample.mask)
        return logprobs[places - 1, ids[0, places]].double().numpy()

    return asyncio.run(mean_difference(engine, score, PROMPTS, max_tokens=12))


def sync(engine, weights):
    asyncio.run(engine.update_weights(weights, 1))


@pytest.fixture
def start():
    engines = []

    def start(model, kind=VLLMEngine, config=EAGER):
        engines.append(kind(model, config, **ROOM))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


EXACT, HALF = ("float32", 1e-5, 1e-2), ("bfloat16", HALF_TOLERANCE, HALF_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Mixtral", EXACT), ("Gemma3", EXACT), ("Mixtral", HALF)],
)
def test_changed_weights_reach_the_engine_in_their_dtype(start, name, kind):
    dtype, same, other = kind
    model = tiny(name).to(getattr(torch, dtype))
    engine = start(model)
    assert engine.dtype == dtype
    assert differs(engine, model) < same
    for _ in range(3):
        perturb(model)
        assert differs(engine, model) > other
        sync(engine, named_weights(model))
        assert differs(engine, model) < same
        if dtype == "float32":
            assert differs(engine, model, packed=True) < same


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_head_that_stays_tied_as_on_a_gpu_gets_the_weights_of_the_embeddings(
    start, monkeypatch, name
):
    # without packed weights, vLLM computes as on a GPU
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    monkeypatch.setattr(local, "Exporter", lambda model, untie: Exporter(model, untie=False))
    model = tiny(name)
    engine = start(model)
    assert differs(engine, model) < 1e-5
    for _ in range(2):
        perturb(model)
        assert differs(engine, model) > 1e-2
        sync(engine, named_weights(model))
        assert differs(engine, model) < 1e-5
    others = ((n, t) for n, t in named_weights(model) if "embed_tokens" not in n)
    with pytest.raises(EngineError, match=r"no new values for .*embed_tokens"):
        sync(engine, others)


@pytest.mark.parametrize("kind", [VLLMEngine, VLLMServerEngine])
def test_changed_experts_reach_the_engine_and_ids_that_the_tokenizer_lacks_are_not_sampled(
    start, kind
):
    model = tiny("Qwen3Moe")
    with torch.no_grad():
        model.get_output_embeddings().weight[50:90] *= 4
    hide(model, range(50, 90))
    config = EAGER if kind is VLLMEngine else VLLMServer(enforce_eager=True)
    engine = start(model, kind, config)
    assert differs(engine, model) < 1e-5
    for _ in range(3):
        perturb(model)
        sync(engine, named_weights(model))
        done = asyncio.run(engine.generate([9, 8, 7], Sampling(max_tokens=60, seed=1)))
        assert not set(done.token_ids) & set(range(50, 90))
        assert differs(engine, model) < 1e-5
        assert differs(engine, model, packed=True) < 1e-5
    assert (engine.copies, engine.dtype) == (1, "float32")
    if kind is VLLMServerEngine:
        names = [(name, t) for name, t in named_weights(model) if "experts.2.up_proj" not in name]
        with pytest.raises(EngineError, match="none of the 1 vLLM servers"):
            sync(engine, [*names, ("model.layers.0.mlp.extra.weight", torch.zeros(2))])


def test_adapters_reach_the_engine_in_every_form(start):
    base = tiny("Qwen3Moe")
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=["lm_head", "norm"],
        use_rslora=True,
    )
    model = get_peft_model(base, config)
    engine = start(model)
    perturb(model)
    assert differs(engine, model) > 1e-2
    sync(engine, named_weights(model))
    assert differs(engine, model) < 1e-5


def test_an_adapter_travels_alone_and_requests_in_flight_go_on_with_it(start, caplog):
    model = add_adapter(tiny("Llama"), 4)
    perturb(model)
    engine = start(model, config=VLLM(enforce_eager=True, adapter_only=True))
    assert engine.adapter_only, caplog.text
    assert differs(engine, model) < 1e-5
    perturb(model)
    assert differs(engine, model) > 1e-3  # what a server shows that missed a version
    sync(engine, named_weights(model, adapter=True))
    assert differs(engine, model) < 1e-5
    before = copy.deepcopy(model)
    perturb(model)

    async def change():
        jobs = [
            asyncio.create_task(engine.generate([9, 8, 7], Sampling(max_tokens=100, seed=n)))
            for n in range(4)
        ]
        await sampled_more(engine, 8)
        await engine.update_in_flight(named_weights(model, adapter=True), 2)
        return await asyncio.gather(*jobs)

    for done in asyncio.run(change()):
        parts = done.weights_versions or ((done.weights_version, 100),)
        versions = np.repeat([version for version, _ in parts], [tokens for _, tokens in parts])
        with torch.no_grad():
            ids = torch.tensor([[9, 8, 7, *done.token_ids]])
            both = torch.stack([m(ids).logits[0, 2:-1].log_softmax(-1) for m in (before, model)])
        expected = both[versions - 1, np.arange(100), list(done.token_ids)]
        assert (torch.tensor(done.logprobs) - expected).abs().max() < 1e-4
    assert differs(engine, model) < 1e-5


def test_adapters_of_servers_that_are_killed_in_actions_and_in_an_update_are_never_stale(
    start, monkeypatch
):
    model = add_adapter(tiny("Llama"), 4)
    perturb(model)
    engine = start(
        model, VLLMServerEngine, VLLMServer(replicas=2, enforce_eager=True, adapter_only=True)
    )
    assert engine.adapter_only
    models, adopt, kills = [copy.deepcopy(model)], server.call, []

    def killing(client, method, **keywords):
        if method == "load_adapter" and kills == ["an action"]:
            kills.append("an update")
            os.kill(engine.pids[-1], signal.SIGKILL)
        return adopt(client, method, **keywords)

    monkeypatch.setattr(server, "call", killing)

    async def play():
        jobs = [
            asyncio.create_task(engine.generate([9, 8, 7], Sampling(max_tokens=110, seed=n)))
            for n in range(8)
        ]
        while not all(each.requests for each in engine._servers):
            await asyncio.sleep(0.01)
        kills.append("an action")
        os.kill(engine.pids[0], signal.SIGKILL)
        log = list(await asyncio.gather(*jobs))
        for version in (1, 2):
            perturb(model)
            models.append(copy.deepcopy(model))
            jobs = [
                asyncio.create_task(engine.generate([9, 8, 7], Sampling(max_tokens=110, seed=n)))
                for n in range(8)
            ]
            await asyncio.sleep(0)
            await engine.update_in_flight(named_weights(model, adapter=True), version)
            log += await asyncio.gather(*jobs)
        while engine.copies < 2:
            await asyncio.sleep(0.1)
        for each in (0, 1):  # started again, empty
            log.append(await engine.generate_on(each, [9, 8, 7], Sampling(max_tokens=20)))
        return log

    log = asyncio.run(play())
    assert kills == ["an action", "an update"]
    assert engine.servers_lost == engine.server_restarts == 2
    assert [len(done.token_ids) for done in log] == [110] * 24 + [20] * 2
    assert {done.weights_version for done in log[-2:]} == {2}
    assert max(difference_by_version(models, [9, 8, 7], done) for done in log) < 1e-4


def test_an_adapter_shares_a_server_with_those_of_others_and_is_freed_in_the_end(start, tmp_path):
    base = tiny("Llama")
    theirs, model = (add_adapter(copy.deepcopy(base), rank) for rank in (2, 4))
    perturb(theirs)
    base.save_pretrained(tmp_path / "base")
    theirs.save_pretrained(tmp_path / "theirs")
    with foreign_server(tmp_path / "base", tmp_path) as address:
        client = httpx.Client(base_url=address, timeout=60.0)
        body = {"lora_name": "theirs", "lora_path": str(tmp_path / "theirs")}
        client.post("/v1/load_lora_adapter", json=body).raise_for_status()
        settings = VLLMServer(addresses=(address,), adapter_only=True)

        def names():
            return {each["id"] for each in client.get("/v1/models").json()["data"]} - {"base"}

        for version in (1, 2):
            engine = start(model, VLLMServerEngine, settings)
            assert engine.adapter_only
            for _ in range(2):
                perturb(model)
                asyncio.run(engine.update_weights(named_weights(model, adapter=True), version))
                assert differs(engine, model) < 1e-5
                assert names() == {"theirs", engine.adapter}
                assert difference(theirs, [9, 8, 7], asked(client, "theirs")) < 1e-4
            with pytest.raises(EngineError, match="has an adapter 'gspo-env-adapter' of its own"):
                start(model, VLLMServerEngine, settings)
            assert differs(engine, model) < 1e-5
            engine.close()
            assert names() == {"theirs"}


@contextmanager
def foreign_server(model, folder):
    """The address of a vLLM server that somebody else started, with room for two adapters."""
    port = process.free_port("127.0.0.1")
    command = [
        *(*process._command(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--enable-scale-out", "--skip-tokenizer-init", "--max-model-len"),
        *("128", "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--block-size", "32"),
        *("--dtype", "float32", "--no-enable-chunked-prefill", "--served-model-name", "base"),
    ]
    environment = {
        **{"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    with (folder / "log").open("wb") as log:
        guard = spawn(command, log=log, env={**os.environ, **environment})
    one = process.Server(address=f"http://127.0.0.1:{port}")
    try:
        process.wait([one], 300.0)
        yield one.address
    finally:
        guard.ask_to_end()
        guard.end()


def asked(client, name):
    """A completion by one of the server's models."""
    sampling = sampling_fields(Sampling(max_tokens=20, seed=3))
    body = {"token_ids": [9, 8, 7], "model": name, "sampling_params": sampling}
    (choice,) = (
        client.post("/inference/v1/generate", json=body).raise_for_status().json()["choices"]
    )
    logprobs = [place["logprob"] for place in choice["logprobs"]["content"]]
    return Completion.of(choice["token_ids"], logprobs, "length", [(0, 0)])


def test_an_adapter_that_the_engine_does_not_take_travels_in_whole_weights(start, caplog):
    model = add_adapter(tiny("Llama"), 4)
    perturb(model)
    config = VLLM(enforce_eager=True, adapter_only=True, engine_args={"max_lora_rank": 1})
    engine = start(model, config=config)
    assert caplog.text.count("whole weights are sent") == 1
    assert "rank" in caplog.text
    for _ in range(2):
        assert differs(engine, model) < 1e-5
        perturb(model)
        sync(engine, named_weights(model, adapter=engine.adapter_only))
    assert differs(engine, model) < 1e-5


def test_requests_that_follow_a_small_cache_are_not_preempted(start):
    model = tiny("Llama")
    config = VLLM(
        enforce_eager=True, follow_cache=True, engine_args={"num_gpu_blocks_override": 13}
    )
    engine = start(model, config=config)
    preempted = []
    scheduler = engine._engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *a, **k: (preempted.append(a), preempt(*a, **k))

    async def play():
        jobs = (
            engine.generate([9, 8, 7 + n], Sampling(max_tokens=110, seed=n), f"{n}")
            for n in range(8)
        )
        return await asyncio.gather(*jobs)

    followed = asyncio.run(play())
    assert not preempted
    assert engine.metrics() == {"rollout/preemptions": 0.0}
    engine._cache_limit = None
    plain = asyncio.run(play())
    assert preempted
    assert [done.token_ids for done in plain] == [done.token_ids for done in followed]


def test_a_weight_that_the_engine_does_not_take_or_get_is_named(start):
    model = tiny("Qwen3Moe")
    engine = start(model)
    weights = dict(named_weights(model))
    extra = {**weights, "lm_head.bias": torch.zeros(128)}
    with pytest.raises(EngineError, match=r"did not read 1 weights \(lm_head\.bias\)"):
        sync(engine, extra.items())
    fewer = {name: t for name, t in weights.items() if "layers.1.input_layernorm" not in name}
    with pytest.raises(EngineError, match=r"no new values for 1 .*layers\.1\.input_layernorm"):
        sync(engine, fewer.items())
    unknown = {**weights, "other.weight": torch.zeros(2)}
    with pytest.raises(EngineError, match=r"does not take the weights: ValueError: .* 'other'"):
        sync(engine, unknown.items())
    sync(engine, weights.items())
    assert differs(engine, model) < 1e-5


def test_a_loader_that_writes_past_the_update_is_refused(start):
    with pytest.raises(EngineError, match=r"no new values for .*experts"):
        start(tiny("GptOss"))
