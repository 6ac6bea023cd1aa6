"""Exported weights are those that `save_pretrained` writes, with adapters merged in."""

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from support import architectures

from gspo_env.errors import ModelError
from gspo_env.model.export import Exporter, named_weights

NAMES = [
    *("Llama", "Qwen3", "Qwen3-MoE", "Mixtral", "DeepSeek-V3", "gpt-oss", "GPT-NeoX", "Gemma 3"),
    *("Phi-3", "Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE"),
]


def tiny(name, **changes):
    """A model of an architecture in float64."""
    return architectures.build(name, 2.0, **changes).double()


def plain_logits(weights, like, ids, folder, untied=False):
    """The logits of a model of `like`'s architecture that was loaded from exported weights."""
    Exporter(like, untie=untied).write(weights, folder)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(info.values())
    return loaded.eval()(ids).logits


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_the_checkpoint(name):
    assert architectures.export_difference(architectures.build(name)) == 0


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
IDS = torch.randint(2, 160, (2, 12), generator=torch.Generator().manual_seed(0))


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
    weight.weight = torch.nn.Parameter(
        torch.ones_like(weight.weight, dtype=torch.uint8), requires_grad=False
    )
    refused(quantized, r"layers\.1\.self_attn\.q_proj has an adapter on quantized weights")
    prefixes = PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    refused(PeftModel(copy.deepcopy(base), prefixes), r"prompt_encoder\.default\.embedding\.weight")


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3"])
def test_an_untied_export_has_the_embeddings_as_output_head_too(name, tmp_path):
    model = tiny(name, tie_word_embeddings=True)
    exporter = Exporter(model, untie=True)
    weights = dict(exporter.weights(named_weights(model)))
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    found = plain_logits(named_weights(model), model, IDS, tmp_path / "model", untied=True)
    torch.testing.assert_close(found, model(IDS).logits)
