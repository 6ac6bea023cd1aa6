"""Models are loaded as data; the seed decides an adapter's first weights."""

import ast
import copy
import ctypes
import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_env.errors import ModelError
from gspo_env.model import add_adapter, save_adapter
from gspo_env.model.export import named_weights
from gspo_env.model.head import match_tokenizer
from gspo_env.model.load import load_model
from gspo_env.model.save import replaced_folder, save_model


def first_weights(model, seed):
    adapted = add_adapter(copy.deepcopy(model), 2, seed)
    return torch.cat([p.flatten() for n, p in adapted.named_parameters() if "lora_A" in n])


def test_the_seed_decides_the_first_weights_of_an_adapter(model):
    torch.manual_seed(1)
    first = first_weights(model, 0)
    torch.manual_seed(2)
    assert torch.equal(first_weights(model, 0), first)
    assert not torch.equal(first_weights(model, 3), first)


def layers_with_adapter(model, **settings):
    adapted = add_adapter(copy.deepcopy(model), 2, **settings)
    return {n.split(".")[-4] for n, _ in adapted.named_parameters() if "lora_A" in n}


def test_targets_choose_the_layers_that_get_an_adapter(model):
    assert layers_with_adapter(model, targets="q_proj, v_proj") == {"q_proj", "v_proj"}
    assert layers_with_adapter(model) > {"q_proj", "down_proj"}


@pytest.mark.parametrize("targets", ["q_proj,query", "lm_head"])  # the tiny model's head is tied
def test_a_target_that_can_have_no_adapter_is_named_with_those_that_can(model, targets):
    wrong = targets.rpartition(",")[2]
    with pytest.raises(ModelError, match=f"lora_targets has {wrong}; .*down_proj.*q_proj"):
        layers_with_adapter(model, targets=targets)


def test_alpha_scales_what_the_adapter_adds(model):
    weight = model.model.layers[0].mlp.down_proj.weight.detach()

    def added(alpha):
        adapted = add_adapter(copy.deepcopy(model), 2, alpha=alpha)
        for name, factor in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(factor, 1.0)
        return adapted.merge_and_unload().model.layers[0].mlp.down_proj.weight.detach() - weight

    torch.testing.assert_close(added(6.0), 1.5 * added(0.0), rtol=1e-4, atol=1e-5)


def test_a_saved_adapter_loads_with_peft_alone(model, tmp_path):
    from peft import PeftModel

    adapted = add_adapter(copy.deepcopy(model), 2)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    save_adapter(adapted, tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(again(ids).logits, adapted(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_has_the_merged_weights_that_an_engine_gets(
    model, tokenizer, dtype, tmp_path
):
    adapted = add_adapter(copy.deepcopy(model).to(dtype), 2)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    save_model(adapted, tokenizer, tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    sent = dict(named_weights(adapted))
    assert saved.keys() == sent.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in sent.items())
    ids = torch.tensor([[3, 4, 5]])
    again, _ = load_model(str(tmp_path / "model"), "auto" if dtype is torch.float32 else "bfloat16")
    torch.testing.assert_close(again(ids).logits, adapted(ids).logits, rtol=0, atol=0.1)


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch proof",)


@pytest.fixture
def folder(tmp_path, in_folder, model, tokenizer):
    """A saved model, in the working folder."""
    save_model(model, tokenizer, tmp_path / "theirs")
    return tmp_path / "theirs"


def refused(name, words):
    with pytest.raises(ModelError, match=words):
        load_model(str(name))


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "part.bin"])
def test_pickled_weights_run_nothing_also_where_an_index_names_them(folder, name):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload()}, folder / name)
    if name == "part.bin":
        index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "cannot load the model")
    assert not Path("proof").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("known", [True, False])
def test_code_beside_a_model_is_not_imported(folder, file, known):
    (folder / "helper.py").write_text("open('proof', 'w').close()\n")
    places = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    other = {} if known or file != "config.json" else {"model_type": "theirs"}
    change(folder / file, auto_map=dict.fromkeys(places, "helper.Theirs"), **other)
    with nullcontext() if known or not other else pytest.raises(ModelError, match="custom code"):
        load_model(str(folder))
    assert not Path("proof").exists()


def test_a_model_of_which_weights_are_missing_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    lost = sorted(name for name in weights if "layers.0.mlp" in name)
    save_file({n: w for n, w in weights.items() if n not in lost}, folder / "model.safetensors")
    refused(folder, rf"has no {lost[0]}, .*\(3 weights missing\)")


def test_weights_of_another_shape_than_in_the_config_are_named(folder):
    change(folder / "config.json", intermediate_size=48)
    refused(folder, r"has no model\.layers\.0\.mlp\.down_proj\.weight.* shape")


@pytest.mark.parametrize("text", ["[]", "5", "null", "{}", '"a"', "x"])
def test_a_config_that_is_no_object_is_one_sentence(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, r"is not a JSON object|Should have a `model_type`")


def test_a_kernel_that_a_config_names_is_refused(folder):
    change(folder / "config.json", attn_implementation="theirs/kernel")
    refused(folder, "names a kernel to run, 'theirs/kernel'")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize("times", [6, 200])
def test_a_normalizer_or_decoder_that_multiplies_texts_is_refused(folder, part, times):
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * (800 // times)}
    change(folder / "tokenizer.json", **{part: {"type": "Sequence", f"{part}s": [one] * times}})
    refused(folder, f"its {part} makes texts more than 64 times as long")
    change(folder / "tokenizer.json", normalizer={"type": "Prepend", "prepend": "a" * 65})
    refused(folder, "makes texts more than 64 times as long")


def test_a_huge_token_is_refused(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token = tokenizer["added_tokens"][-1] | {"content": "a" * 20_000, "id": 9_999}
    change(folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], token])
    refused(folder, "a token has more than 16,384 characters")


@pytest.mark.parametrize(
    "shard", ["../all.safetensors", "/dev/zero", "sub/all.safetensors", "", "..", 7]
)
def test_an_index_or_a_config_that_names_weights_elsewhere_is_refused(folder, shard):
    (folder / "sub").mkdir()
    (folder / "model.safetensors").rename(folder.parent / "all.safetensors")
    change(folder / "config.json", transformers_weights=shard)
    refused(folder, r"names the weights .*; expected a file beside it")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, r"names the weights .*; expected a file beside it")
    (folder / "model.safetensors.index.json").write_text("[7]")
    refused(folder, "is not an index of weights")


@pytest.mark.parametrize("key", ["num_labels", "num_hidden_layers"])
def test_a_config_that_would_fill_the_memory_is_refused(folder, key):
    change(folder / "config.json", text_config={key: 10**9})
    refused(folder, f"{key} 1,000,000,000; expected at most 10,000")


@pytest.mark.parametrize("key", ["sliding_window", "max_size"])
def test_a_size_of_more_than_64_bits_is_refused(folder, key):
    change(folder / "config.json", **{key: 10**30})
    refused(folder, f"{key} 1,000,.*; expected at most")


@pytest.mark.parametrize("ids", [[[1]], {"a": 1}, [None, "x"], 10**30])
def test_ends_of_a_generation_config_that_are_no_ids_are_left_out(folder, ids):
    model, tokenizer = load_model(str(folder))
    own = match_tokenizer(model, tokenizer)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert set(match_tokenizer(*load_model(str(folder)))) <= set(own)


def test_a_token_without_an_embedding_is_refused(folder):
    tokens = {str(10**6): {"content": "x", "special": False}}
    change(folder / "tokenizer_config.json", added_tokens_decoder=tokens)
    with pytest.raises(ModelError, match="'x', for which the model has no embedding"):
        match_tokenizer(*load_model(str(folder)))


def test_an_adapter_that_names_another_model_is_refused(folder):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "theirs/elsewhere"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    refused(folder, "has an adapter")
    (folder / "config.json").unlink()
    refused(folder, "but it has an adapter")


def test_a_file_of_a_model_that_never_ends_or_is_too_large_is_refused(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    refused(folder, "is not a regular file")
    (folder / "config.json").unlink()
    with (folder / "config.json").open("w") as file:
        file.truncate(2**22 + 1)
    refused(folder, "bytes; expected at most")
    (folder / "config.json").write_text("[" * 10**5)
    refused(folder, "is not a JSON object: ")
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "tools.jinja")
    refused(folder, "is not a regular file")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "a/b/c", "runs/gone", "~/x", "a b", ""])
def test_a_name_that_can_be_no_hub_id_is_a_missing_folder_without_a_connection(
    tmp_path, in_folder, monkeypatch, name
):
    def connect(*arguments):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ModelError, match=r"there is no folder|folder without"):
        load_model(name)


def test_every_call_that_loads_a_model_refuses_its_code(request):
    calls = []
    for package in ("gspo_env", "envs", "agents"):
        for file in (request.config.rootpath / package).rglob("*.py"):
            if "from_pretrained" not in (source := file.read_text()):
                continue
            for node in ast.walk(ast.parse(source)):
                # `AutoConfig.for_model` reads no folder
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                    "from_pretrained"
                ):
                    calls.append(ast.unparse(node))
    assert len(calls) >= 3
    assert not [call for call in calls if "trust_remote_code=False" not in call]


@pytest.mark.parametrize("after", [False, True])
def test_a_folder_is_there_when_its_replacement_is_killed(tmp_path, after):
    folder, libc = tmp_path / "model", ctypes.CDLL(None)
    folder.mkdir()
    (folder / "weights").write_text("old")
    if (child := os.fork()) == 0:
        exchange = libc.renameat2

        def killed(*args):
            if after:
                exchange(*args)
            os._exit(0)

        libc.renameat2, ctypes.CDLL = killed, lambda name: libc
        with replaced_folder(folder) as part:
            (part / "weights").write_text("new")
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (folder / "weights").read_text() == ("new" if after else "old")


def test_a_folder_is_replaced_where_two_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    for text in ("old", "new"):
        with replaced_folder(tmp_path / "model") as part:
            (part / "weights").write_text(text)
        assert (tmp_path / "model" / "weights").read_text() == text
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_refused_with_their_name(folder, name, value):
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refused(folder, rf"the weights {name} of .* are not finite")


def test_weights_that_are_infinite_only_in_the_chosen_dtype_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load_model(str(folder))
    with pytest.raises(ModelError, match=r"model\.norm\.weight of .* are not finite in float16"):
        load_model(str(folder), "float16")


@pytest.fixture
def hub_model(folder, monkeypatch):
    """The folder of the model "someone/theirs" in a cache of the hub, whose files are links."""
    cache = folder.parent / "cache"
    place = cache / "models--someone--theirs"
    snapshot = place / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for blobs in (place / "blobs", place / "refs"):
        blobs.mkdir()
    (place / "refs" / "main").write_text(snapshot.name)
    for file in list(folder.iterdir()):
        file.rename(place / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return place


def test_a_hub_model_is_loaded_from_the_cache(hub_model, model):
    loaded, tokenizer = load_model("someone/theirs")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, model.get_parameter(name))
    assert loaded.config.name_or_path == tokenizer.name_or_path == "someone/theirs"


def test_a_hub_model_has_the_checks_of_a_folder(hub_model):
    blob = hub_model / "blobs" / "config.json"
    text = blob.read_text()
    change(blob, num_labels=10**9)
    refused("someone/theirs", r"^the config of .* has num_labels 1,000,000,000")
    blob.write_text(text)
    snapshot = next((hub_model / "snapshots").iterdir())
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "someone/other"}
    (snapshot / "adapter_config.json").write_text(json.dumps(adapter))
    refused("someone/theirs", "has an adapter")
    (snapshot / "adapter_config.json").unlink()
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"x": "/dev/zero"}})
    )
    refused("someone/theirs", "names the weights '/dev/zero'")
    (snapshot / "model.safetensors.index.json").unlink()
    with (snapshot / "added_tokens.json").open("wb") as file:
        file.truncate(2**30)
    refused("someone/theirs", r"added_tokens\.json' has 1,073,741,824 bytes")
