"""The direct forward pass: the model's own numbers, or not used."""

import copy

import pytest
import torch
from support.plain_models import SHAPE, llama, qwen2, steps, with_weights
from transformers import LlamaConfig, LlamaForCausalLM

from gspo_env.engines.embedded.direct import DirectForward, start_direct
from gspo_env.model.adapters import add_adapter
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.check import check_model


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_ragged_steps_have_the_log_probabilities_of_the_models_modules(make, fused):
    model = with_weights(make, 0.3)
    assert start_direct(model) is not None
    direct = DirectForward(model, fused=fused)
    torch.testing.assert_close(steps(model, direct), steps(model), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_a_bfloat16_model_is_computed_as_by_its_modules_or_more_exactly(make, fused, dtype):
    if fused and dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("the processor has no AVX-512, so oneDNN has no products of bfloat16")
    model = with_weights(make, 0.1, torch.bfloat16)
    exact = steps(copy.deepcopy(model).float())
    direct = DirectForward(model, fused=fused, dtype=dtype)
    for _ in range(2):
        ours, modules = steps(model, direct), steps(model)
        rounding = (modules - exact).abs().mean()
        assert (ours - exact).abs().mean() <= 1.1 * rounding
        if dtype is torch.bfloat16:  # both round at the same places
            assert (ours - modules).abs().mean() <= 0.1 * rounding
        with torch.no_grad():  # copies follow the weights
            model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        exact = steps(copy.deepcopy(model).float())


@pytest.mark.parametrize("native", [True, False])
def test_the_processor_decides_the_arithmetic_of_a_bfloat16_model(monkeypatch, caplog, native):
    model = llama().bfloat16()
    use_ragged_attention(model)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    with caplog.at_level("INFO"):
        direct = start_direct(model)
    assert direct.dtype is (torch.bfloat16 if native else torch.float32)
    assert ("the engine computes in float32" in caplog.text) is not native


def test_the_default_model_runs_directly_and_new_weights_count_at_once(model):
    use_ragged_attention(model)
    direct = start_direct(model)
    before = steps(model, direct)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        model.model.layers[1].self_attn.k_norm.weight.mul_(0.5)
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data = -weight.data  # in other memory, of the same version
    after = steps(model, direct)
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, steps(model), rtol=1e-5, atol=1e-5)


def test_a_model_with_more_than_plain_layers_is_not_run_directly(model):
    assert DirectForward.fits(model)
    replaced = copy.deepcopy(model)
    replaced.model.layers[0].mlp.forward = lambda x: x
    others = [
        add_adapter(copy.deepcopy(model), 2),
        copy.deepcopy(model).double(),
        replaced,
        LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")),
    ]
    assert not any(DirectForward.fits(other) for other in others)


def test_the_models_own_pass_runs_while_a_module_has_a_hook(model):
    use_ragged_attention(model)
    direct = start_direct(model)
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not direct.usable
    hook.remove()
    assert direct.usable


def test_a_model_whose_logits_round_by_more_is_still_run_directly():
    model = with_weights(llama, 0.3)
    model.lm_head.weight.data.mul_(3000)
    check_model(model)
    assert start_direct(model) is not None


def test_a_pass_with_other_numbers_is_refused_and_said(model, monkeypatch, caplog):
    use_ragged_attention(model)
    # as if the model computed its norms in another way
    monkeypatch.setattr(model.config, "rms_norm_eps", 0.5)
    assert start_direct(model) is None
    assert "changes log-probabilities by" in caplog.text
