"""Models and folders on disk: nothing half-written, nothing overwritten by accident."""

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
        OutputError: It cannot be made or written, or already holds something.
    """
    folder = Path(path) if path else _fresh(Path("runs"), name)
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


def _fresh(parent: Path, name: str) -> Path:
    for n in range(1, 10**6):
        folder = parent / f"{name}-{n}"
        if not folder.exists():
            return folder
    raise OutputError(f"too many runs under {str(parent)!r}")


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a model and its tokenizer in Hugging Face form, all or nothing.

    A LoRA adapter is merged into a copy, so that what is written loads without its base.
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
        ModelError: Either is missing or cannot be loaded.
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
        raise ModelError(f"cannot load the tokenizer of {name!r}: {_line(error)}") from error
    try:
        kind: Any = "auto" if torch.cuda.is_available() and dtype == "auto" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(name, dtype=kind)
    except Exception as error:
        raise ModelError(f"cannot load the model {name!r}: {_line(error)}") from error
    return model, tokenizer


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def add_adapter(model: Any, rank: int) -> Any:
    """The model with a fresh LoRA adapter on every linear layer, the only thing that trains."""
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, adapter)
