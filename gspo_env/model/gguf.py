"""Loads GGUF files as ordinary models: quantised weights become floats, which are trained."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from gspo_env.errors import MissingExtraError, ModelError, first_line, raised_as
from gspo_env.model.load import PACKAGED

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures whose logits `transformers` gives as the model had them; others are refused."""
_SPLITS = (
    *("default", "gpt-2", "smollm", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3"),
    *("tekken", "qwen2", "deepseek-r1-qwen", "megrez"),
)
"""Ways to split a text before its bytes are merged, of which `transformers` reads these right."""
_IGNORED = ("rope.scaling.type", "rope.scaling.factor")
"""Ends of the names of metadata that `transformers` does not read, and that change the logits."""


def load_gguf(name: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Loads the causal LM and the tokenizer of a GGUF file.

    Args:
        name: The file, or the name of a model that a package contains.
        dtype: The dtype of the weights; `auto` is float32.

    Raises:
        MissingExtraError: The package gguf, or the one that contains the model, is not installed.
        ModelError: The file cannot be read, or would be read wrongly.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers import modeling_gguf_pytorch_utils as reader

    # no setting of transformers hides this bar, which would break up our lines
    vars(reader)["tqdm"] = partial(vars(reader)["tqdm"], disable=True)
    path = _packaged_file(name) if name in PACKAGED else Path(name)
    if not path.is_file():
        raise ModelError(f"there is no file {name!r}; expected a GGUF file")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(
            f"the model {name!r} is a GGUF file, and gguf is not installed: "
            "pip install -e '.[gguf]'"
        )
    dtype = "float32" if dtype == "auto" else dtype
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    problem = f"cannot load the GGUF file {name!r}"
    # a damaged file raises anything
    with raised_as(ModelError, problem, Exception, reason=first_line), _read_once():
        head_dim = _check_file(name, path)
        config = AutoConfig.from_pretrained(path.parent, trust_remote_code=False, **where)
        if head_dim is not None:  # which transformers does not read for every architecture
            config.head_dim = head_dim
        tokenizer = AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False, **where)
        load: Any = AutoModelForCausalLM
        model, report = load.from_pretrained(
            path.parent,
            config=config,
            dtype=torch.float32,  # as it is dequantised; else transformers warns of its kernels
            output_loading_info=True,
            trust_remote_code=False,
            **where,
        )
    with torch.device("meta"):
        shapes = {key: weight.shape for key, weight in type(model)(config).state_dict().items()}
    other = {key for key, weight in model.state_dict().items() if weight.shape != shapes.get(key)}
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"], *other}):
        raise ModelError(
            f"the GGUF file {name!r} does not have exactly the weights of a "
            f"{type(model).__name__}: {', '.join(wrong[:4])}; expected a whole model"
        )
    for parameter in model.parameters():  # not buffers: positions need float32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    # save_pretrained refuses a model that says that it is quantised
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.config.name_or_path = name
    logger.info(
        "%s: %s weights as %s, trained and saved as an ordinary model", name, path.name, dtype
    )
    return model, tokenizer


@contextmanager
def _read_once() -> Iterator[None]:
    """Lets `transformers` parse the file once, and its map of names once, not for each module.

    Each does so again otherwise, which is more than half of the time to load a small model.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    try:
        for name, original in originals.items():
            setattr(gguf, name, cache(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


def _packaged_file(name: str) -> Path:
    """Finds the GGUF file of a package without importing the package."""
    module, install = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise MissingExtraError(
            f"the model {name!r} is in a package that is not installed: pip install -e '.[gguf]' "
            f"&& {install}"
        )
    return files[0]


def _check_file(name: str, path: Path) -> int | None:
    """Refuses a file that `transformers` would read wrongly; returns the size of a head, if known.

    Raises:
        ModelError: It is damaged, or one of those.
    """
    from gguf import GGUFReader

    damage = f"the GGUF file {name!r} is damaged or not complete"
    with raised_as(ModelError, damage, Exception, mend="; expected a whole file"):
        reader = GGUFReader(path)

    def read(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        return default if field is None else field.contents()

    architecture = read("general.architecture")
    ignored = [key for key in reader.fields if key.endswith(_IGNORED)]
    ignored += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    tokens, split = len(read("tokenizer.ggml.tokens", [])), read("tokenizer.ggml.pre", "default")
    ids = [read(k) for k in reader.fields if k.startswith("tokenizer.") and k.endswith("_token_id")]
    rows = {int(t.shape[-1]) for t in reader.tensors if t.name == "token_embd.weight"}
    problems = {
        "has big-endian numbers; expected a little-endian file": reader.byte_order == "S",
        f"has the architecture {architecture!r}; expected one of {', '.join(ARCHITECTURES)}, which "
        "are tested, or the model in Hugging Face format": architecture not in ARCHITECTURES,
        f"is one of {read('split.count', 0)} parts of a model; expected a whole model, such as "
        "`llama-gguf-split --merge` writes": read("split.count", 0) > 1,
        f"scales its position encoding ({', '.join(ignored)}), which transformers does not read; "
        "expected the model in Hugging Face format": ignored,
        "has no tokenizer; expected a whole model": not tokens,
        f"has {tokens} tokens and {max(rows, default=0)} embeddings; expected one for each token": (
            rows and tokens > max(rows)
        ),
        f"names a token {max(ids, default=0)} of {tokens}; expected a token that it has": (
            max(ids, default=0) >= tokens
        ),
        f"splits texts as {split!r}, which transformers does not read; expected the model in "
        "Hugging Face format": (read("tokenizer.ggml.model") == "gpt2" and split not in _SPLITS),
    }
    if problem := next((text for text, holds in problems.items() if holds), None):
        raise ModelError(f"the GGUF file {name!r} {problem}")
    head_dim = read(f"{architecture}.attention.key_length")
    return None if head_dim is None else int(head_dim)
