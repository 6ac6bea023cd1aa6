"""GGUF files are read as the models that they were, or refused; SmolLM2 is one."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.auto import CONFIG_MAPPING

from gspo_env.errors import MissingExtraError, ModelError
from gspo_env.model import load
from gspo_env.model.load import load_model
from gspo_env.model.save import save_model
from gspo_env.recipes.build import TEMPLATE

TOKENS = [*bytes_to_unicode().values(), "lo", "<|im_start|>", "<|im_end|>"]


def write_gguf(model, path, architecture, **metadata):
    """Writes a model as llama.cpp's converter does."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or 16
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata.items():
        writer.add_string(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 3])
    writer.add_token_merges(["l o"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_chat_template(TEMPLATE)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = weight.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if architecture == "llama" and (count := heads.get(name.split(".")[-2])):
            split = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny(kind, **changes):
    torch.manual_seed(0)
    settings = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"max_position_embeddings": 512, "eos_token_id": len(TOKENS) - 1, "pad_token_id": 0}
    settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    config = CONFIG_MAPPING[kind](**{**settings, "head_dim": 16, **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for weight in model.parameters():  # norms and biases, too
        weight.data.add_(0.1 * torch.randn_like(weight))
    return model


def logits(model):
    with torch.no_grad():
        return model(torch.arange(200)[None] % len(TOKENS)).logits


READ = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-heads": ("llama", {"head_dim": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-heads": ("qwen3", {"head_dim": 24}),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.real
def test_a_model_from_gguf_has_the_logits_of_the_original_and_is_saved_as_a_folder(tmp_path, name):
    architecture, changes = READ[name]
    original = tiny(architecture, **changes)
    write_gguf(original, tmp_path / "tiny.gguf", architecture)
    model, tokenizer = load_model(str(tmp_path / "tiny.gguf"))
    torch.testing.assert_close(logits(model), logits(original), atol=1e-5, rtol=0)
    save_model(model, tokenizer, tmp_path / "folder")
    again, words = load_model(str(tmp_path / "folder"))
    assert torch.equal(logits(again), logits(model))
    assert words.apply_chat_template([{"role": "user", "content": "lo"}], tokenize=False) == (
        "<|im_start|>user\nlo<|im_end|>\n"
    )
    assert "quantization_config" not in json.loads((tmp_path / "folder/config.json").read_text())


REFUSED = {
    "architecture": ("gemma3", {}, {}, "architecture 'gemma3'; expected one of llama"),
    "scaling": ("llama", {}, {"rope.scaling.type": "yarn"}, "scales its position encoding"),
    "damaged": ("qwen2", {}, None, "is damaged or not complete"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.real
def test_a_gguf_file_that_would_be_read_wrongly_is_refused(tmp_path, name):
    architecture, changes, metadata, match = REFUSED[name]
    kind = "gemma3_text" if architecture == "gemma3" else architecture
    write_gguf(tiny(kind, **changes), tmp_path / "x.gguf", architecture, **(metadata or {}))
    if metadata is None:
        (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:3000])
    with pytest.raises(ModelError, match=match):
        load_model(str(tmp_path / "x.gguf"))


STRANGE = {
    "big-endian": ({}, 1, "has big-endian numbers"),
    "part": ({"add_chat_template": ("add_uint16", "split.count", 2)}, 0, "one of 2 parts of a"),
    "no tokenizer": ({"add_token_list": None}, 0, "has no tokenizer"),
    "more tokens": (
        {"add_token_list": ("add_token_list", [*TOKENS, "x"])},
        0,
        "has 260 tokens and 259 embeddings",
    ),
    "no such end": ({"add_eos_token_id": ("add_eos_token_id", 999)}, 0, "names a token 999 of"),
    "split": (
        {"add_eos_token_id": ("add_tokenizer_pre", "deepseek-llm")},
        0,
        "splits texts as 'deepseek-llm'",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.real
def test_a_strange_gguf_file_is_refused_in_one_sentence(tmp_path, monkeypatch, name):
    gguf = pytest.importorskip("gguf")
    instead, order, match = STRANGE[name]

    class Writer(gguf.GGUFWriter):
        def __init__(self, *args):
            super().__init__(*args, False, gguf.GGUFEndian(order))

        def __getattribute__(self, called):
            if called not in instead:
                return super().__getattribute__(called)
            method, *arguments = instead[called] or ("add_name", "tiny")
            return lambda *_: getattr(gguf.GGUFWriter, method)(self, *arguments)

    monkeypatch.setattr(gguf, "GGUFWriter", Writer)
    write_gguf(tiny("qwen2"), tmp_path / "x.gguf", "qwen2")
    with pytest.raises(ModelError, match=f"{match}[^\\n]*$"):
        load_model(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize("change", [lambda rows: rows[:5], lambda rows: rows[None]])
@pytest.mark.real
def test_a_gguf_tensor_of_another_shape_is_refused(tmp_path, monkeypatch, change):
    gguf = pytest.importorskip("gguf")
    add = gguf.GGUFWriter.add_tensor

    def changed(self, name, rows):
        add(self, name, change(rows) if "ffn_down" in name else rows)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", changed)
    write_gguf(tiny("qwen2"), tmp_path / "x.gguf", "qwen2")
    with pytest.raises(ModelError, match=r"exactly the weights.*down_proj"):
        load_model(str(tmp_path / "x.gguf"))


def test_a_folder_with_gguf_files_is_refused_with_the_name_of_one(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ModelError, match=r"without config\.json.*or one file: .*a\.gguf'$"):
        load_model(str(tmp_path))


def test_a_missing_file_or_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(load.PACKAGED, "smollm2", ("no_such_module", "pip install some-wheel"))
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[gguf\]' && pip install some"):
        load_model("smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="there is no file"):
        load_model(str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").touch()
    with pytest.raises(MissingExtraError, match=r"gguf is not installed: pip install -e '\.\[gguf"):
        load_model(str(tmp_path / "x.gguf"))
