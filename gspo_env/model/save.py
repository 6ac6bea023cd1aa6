"""Writes models and the folders of runs, none of them half-written or replaced by accident."""

from __future__ import annotations

import ctypes
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_env.errors import OutputError, raised_as
from gspo_env.files import check_output, clear, part_of, remove
from gspo_env.model.head import plain_model

_SHARD = 4 << 30


_AT_FDCWD, _EXCHANGE = -100, 2
"""Arguments of `renameat2`: paths of the working folder, and to exchange two of them."""


def make_output(path: str, name: str) -> Path:
    """Makes the folder for a run's results.

    Raises:
        OutputError: The folder cannot be made or written, or is not empty.
    """
    folder = Path(path or "runs")
    problem = f"cannot write to the output folder {str(folder)!r}"
    mend = "; name one that can be written with --output"
    with raised_as(OutputError, problem, OSError, ValueError, mend=mend):
        str(folder.absolute()).encode()  # for the files that name it
        folder.mkdir(parents=True, exist_ok=True)
        if not path:
            numbered = (folder / f"{name}-{n}" for n in itertools.count(1))
            folder = next(each for each in numbered if _make(each))
        tempfile.TemporaryFile(dir=folder).close()
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
