"""Loading and saving models; no folder is half-written or overwritten by accident."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from gspo_env.errors import ModelError, OutputError


def make_output(path: str, name: str) -> Path:
    """Makes the folder for a run's results.

    Raises:
        OutputError: The folder cannot be made or written, or is not empty.
    """
    folder = Path(path) if path else _unused_folder(Path("runs"), name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"the output folder {str(folder)!r} is not empty; name a new one")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write to the output folder {str(folder)!r}: {error.strerror}; "
            "name one that can be written with --output"
        ) from error
    return folder


def _unused_folder(parent: Path, name: str) -> Path:
    for n in range(1, 10**6):
        folder = parent / f"{name}-{n}"
        if not folder.exists():
            return folder
    raise OutputError(f"too many runs under {str(parent)!r}")


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a model and its tokenizer in Hugging Face form, all or nothing.

    A LoRA adapter is merged into a copy of the model, so that the folder loads without its base.
    """
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        part = Path(name) / "model"
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(part, folder)


def load_model(name: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Loads a causal LM and its tokenizer from a folder or the hub.

    Raises:
        ModelError: The model or the tokenizer is missing or cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        if (folder / "model" / "config.json").exists():
            return load_model(str(folder / "model"), dtype)
        raise ModelError(f"{name!r} is a folder without config.json; expected a saved model")
    if folder.is_dir() and not any(
        (folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ModelError(
            f"the model folder {name!r} has no tokenizer; save one into it with "
            "`tokenizer.save_pretrained`"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer of {name!r}: {_first_line(error)}") from error
    try:
        kind: Any = "auto" if torch.cuda.is_available() and dtype == "auto" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(name, dtype=kind)
    except Exception as error:
        raise ModelError(f"cannot load the model {name!r}: {_first_line(error)}") from error
    return model, tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def add_adapter(model: Any, rank: int, seed: int = 0) -> Any:
    """Adds a LoRA adapter to every linear layer; only the adapter trains.

    Args:
        model: A `transformers` causal LM.
        rank: Of the adapter.
        seed: Decides the adapter's first weights.
    """
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU, whatever the model's device
        torch.default_generator.manual_seed(seed)
        return get_peft_model(model, adapter)
