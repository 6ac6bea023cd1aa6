"""Exported weights are those that `save_pretrained` writes, with adapters merged in."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file

from gspo_env.errors import ModelError
from gspo_env.model.export import Exporter, named_weights

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
}
MODELS = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": MLA,
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "GPTNeoX": {},
    "Gemma3": {"layer_types": ["full_attention"] * 2},
    "Phi3": {},
    "Qwen3Next": {**EXPERTS, **LINEAR},
    "Qwen3_5": LINEAR,
    "Qwen3_5Moe": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 12},
}


def tiny(name, seed=0, **changes):
    """A model of an architecture with random weights."""
    kind = f"{name}TextConfig" if name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else f"{name}Config"
    config = getattr(transformers, kind)(**{**SIZES, **MODELS[name], **changes})
    torch.manual_seed(seed)
    config._experts_implementation = "eager"  # the fused one has no float64
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def plain_logits(weights, like, ids, folder, untied=False):
    """The logits of a model of `like`'s architecture that was loaded from exported weights."""
    Exporter(like, untie=untied).write(weights, folder)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(info.values())
    return loaded.eval()(ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_those_of_the_checkpoint(name, tmp_path):
    model = tiny(name)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    exported = dict(named_weights(model))
    assert exported.keys() == written.keys()
    for key, tensor in written.items():
        torch.testing.assert_close(exported[key], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_experts_are_exported_one_matrix_each_as_a_loader_expects_them(name):
    names = list(dict(named_weights(tiny(name))))
    assert sum(".experts.3." in n for n in names) == 2 * 3
    assert not any(n.endswith("_proj") for n in names)


ADAPTERS = {
    "LoRA": {"target_modules": "all-linear"},
    "rank-stabilised": {"target_modules": "all-linear", "use_rslora": True},
    "DoRA": {"target_modules": "all-linear", "use_dora": True},
    "DoRA of the embeddings": {"target_modules": ["embed_tokens"], "use_dora": True},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "saved embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
    "output head": {"target_modules": ["lm_head", "v_proj"]},
    "tied embeddings": {
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "single tokens": {"target_modules": ["v_proj"], "trainable_token_indices": [3, 5]},
    "biases": {"target_modules": "all-linear", "bias": "all"},
    "fan in": {"target_modules": ["q_proj"], "fan_in_fan_out": True},
    "layers 1 only": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "changed base": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
}
IDS = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(model, **settings):
    """The model with a LoRA adapter whose every trained parameter has moved."""
    config = LoraConfig(**{"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings)
    peft = get_peft_model(model, config, autocast_adapter_dtype=False)
    move(peft)
    return peft.eval()


def move(model):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data.add_(noise, alpha=0.1)


@torch.no_grad()
def check(peft, base, folder):
    """The exported weights give the adapted model's logits, and the live weights stay."""
    before = copy.deepcopy(peft.state_dict())
    expected = peft(IDS).logits
    found = plain_logits(named_weights(peft), peft, IDS, folder)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (expected - base(IDS).logits).abs().max() > 1e-3
    after = peft.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=list(ADAPTERS))
def test_an_exported_adapter_is_the_model_that_was_trained(settings, tied, tmp_path):
    if settings.get("ensure_weight_tying") and not tied:
        pytest.skip("nothing is tied")
    base = tiny("Qwen3", tie_word_embeddings=tied)
    check(adapted(copy.deepcopy(base), **settings), base, tmp_path / "model")


def test_bfloat16_weights_are_rounded_once_and_keep_their_dtype():
    base = tiny("Llama").bfloat16()
    peft = adapted(copy.deepcopy(base).float(), target_modules="all-linear")
    exact = dict(named_weights(copy.deepcopy(peft)))
    for name, parameter in peft.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.bfloat16()
    for name, tensor in named_weights(peft):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].bfloat16())


def refused(model, match):
    with pytest.raises(ModelError, match=match):
        list(named_weights(model))


def test_what_no_plain_weights_can_express_is_refused_with_its_name():
    base = tiny("Qwen3", tie_word_embeddings=False)
    with_bias = adapted(copy.deepcopy(base), target_modules=["q_proj"], lora_bias=True)
    refused(with_bias, r"adapter of model\.layers\.0\.self_attn\.q_proj .*lora_bias")
    quantized = adapted(copy.deepcopy(base), target_modules=["q_proj"])
    weight = quantized.base_model.model.model.layers[1].self_attn.q_proj.base_layer
    weight.weight = torch.nn.Parameter(torch.ones(16, 16, dtype=torch.uint8), requires_grad=False)
    refused(quantized, r"layers\.1\.self_attn\.q_proj has an adapter on quantized weights")
    prefixes = PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    refused(PeftModel(copy.deepcopy(base), prefixes), r"prompt_encoder\.default\.embedding\.weight")


def test_tied_embeddings_with_an_adapter_are_exported_untied(tmp_path):
    peft = adapted(tiny("Qwen3"), target_modules=["embed_tokens"])
    assert peft.config.tie_word_embeddings
    assert "lm_head.weight" in dict(named_weights(peft))
    assert not Exporter(peft, untie=False).config.tie_word_embeddings


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
def test_an_untied_export_has_the_embeddings_as_output_head_too(name, tmp_path):
    model = tiny(name, tie_word_embeddings=True)
    exporter = Exporter(model, untie=True)
    weights = dict(exporter.weights(named_weights(model)))
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    found = plain_logits(named_weights(model), model, IDS, tmp_path / "model", untied=True)
    torch.testing.assert_close(found, model(IDS).logits)
