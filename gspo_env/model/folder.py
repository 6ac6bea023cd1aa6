"""Checks a model folder that may be a stranger's; loaded with the first `--model`."""

from __future__ import annotations

import itertools
import json
import math
import re
import stat
from pathlib import Path
from typing import Any

from gspo_env.errors import ModelError
from gspo_env.model.load import first_line
from gspo_env.redaction import visible

ADAPTER = "adapter_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_GROWTH = 64
"""Times as long that the normalizer or the decoder of a tokenizer may make a text."""
_LONGEST_TOKEN = 2**14
"""Characters of a token."""
_LARGEST_TEXT, _LARGEST_CONFIG = 2**26, 2**22
"""Bytes of a JSON file or a template in a model folder, and of one that describes the model."""
_CONFIGS = re.compile(
    r"(generation_|tokenizer_|processor_)?config\.json|(special_tokens_map|added_tokens)\.json"
    r"|chat_template\.(json|jinja)"
)
"""Names of files that describe the model."""
_MOST_PARTS = 10_000
"""Layers or labels of a model, for each of which its config gets an item."""


def check_place(name: str) -> None:
    """Checks the files of a model folder; a name that can be no hub id has to be a folder.

    Raises:
        ModelError: There is no such folder, or it has no tokenizer, an adapter, or files that no
            model has.
    """
    folder = Path(name)
    if not folder.is_dir():
        if folder.exists():
            raise ModelError(f"the model {name!r} is a file; expected a folder or a hub id")
        inside = folder.parent != Path() and folder.parent.exists()
        if inside or not _HUB_ID.fullmatch(name):
            raise ModelError(f"there is no folder {name!r}; expected a model folder or a hub id")
        return
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(
            f"the model folder {name!r} has no tokenizer; save one into it with "
            "`tokenizer.save_pretrained`"
        )
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"the model folder {name!r} has an adapter ({ADAPTER}), which may name another model; "
            "expected the whole model, such as what merge_and_unload() of PEFT returns"
        )
    for file in folder.rglob("*"):
        _check_file(file)
    for file in folder.glob("*.index.json"):
        _check_index(file)
    file = folder / "config.json"
    try:
        _check_counts(name, json.loads(file.read_bytes()))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{str(file)!r} is no JSON: {first_line(error)}") from error


def _check_file(file: Path) -> None:
    kind = file.stat() if file.exists() else None
    folder = kind is not None and stat.S_ISDIR(kind.st_mode) and not file.is_symlink()
    if kind is None or not (stat.S_ISREG(kind.st_mode) or folder):
        raise ModelError(f"{visible(str(file))!r} is no regular file; expected a file of a model")
    most = _LARGEST_CONFIG if _CONFIGS.fullmatch(file.name) else _LARGEST_TEXT
    if file.suffix in (".json", ".jinja") and kind.st_size > most:
        raise ModelError(
            f"{visible(str(file))!r} has {kind.st_size:,} bytes; expected at most {most:,}"
        )


def _check_index(file: Path) -> None:
    """Refuses an index of weights that names anything but files beside it.

    Raises:
        ModelError: It is no index, or it names another place.
    """
    try:
        index = json.loads(file.read_bytes())
        shards, _ = set(index["weight_map"].values()), dict(index["metadata"])
    except Exception as error:
        raise ModelError(
            f"{str(file)!r} is no index of weights; expected `metadata` and `weight_map`"
        ) from error
    for shard in shards:
        _check_beside(str(file), shard)


def _check_beside(place: str, name: Any) -> None:
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise ModelError(
            f"{place!r} names the weights {visible(repr(name)[:80])}; expected a file beside it"
        )


def _check_counts(name: str, config: Any) -> None:
    """Refuses a config for which transformers would make a huge list before any weight is read."""
    for key, value in config.items() if isinstance(config, dict) else ():
        _check_counts(name, value)
        counts = key == "num_labels" or re.search("layers?$", key)
        if counts and isinstance(value, (int, float)) and value > _MOST_PARTS:
            raise ModelError(
                f"the config of {name!r} has {visible(key)} {value:,}; expected at most "
                f"{_MOST_PARTS:,}"
            )


def check_config(name: str, config: Any) -> None:
    """Rejects a config that names code: transformers would fetch an attention kernel and run it.

    Raises:
        ModelError: It names a kernel, or weights elsewhere.
    """
    if (weights := getattr(config, "transformers_weights", None)) is not None:
        _check_beside(name, weights)
    text = config.get_text_config()
    for part, key in itertools.product((config, text), ("attn", "experts")):
        value = getattr(part, f"_{key}_implementation", None)
        if value is not None and "/" in str(value):
            raise ModelError(
                f"the config of {name!r} names a kernel to run, {visible(str(value))!r}; expected "
                "an implementation of transformers"
            )


def check_tokenizer(tokenizer: Any) -> None:
    """Refuses a tokenizer whose texts could take all memory.

    Raises:
        ModelError: Its normalizer or decoder multiplies texts, or a token is huge.
    """
    if max(map(len, tokenizer.get_vocab())) > _LONGEST_TOKEN:
        raise ModelError(f"a token has more than {_LONGEST_TOKEN:,} characters")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {} if backend is None else json.loads(backend.to_str())
    for part in ("normalizer", "decoder"):
        if _growth(state.get(part)) > _GROWTH:
            raise ModelError(f"its {part} makes texts more than {_GROWTH} times as long")


def _growth(part: Any) -> float:
    """Returns how many times as long a text may become by the replacements of a tokenizer."""
    if not isinstance(part, dict):
        return 1.0
    pattern = part.get("pattern") or {}
    ratio = len(part.get("content") or "") / max(1, len(pattern.get("String") or ""))
    ratio = max(1.0, ratio, len(part.get("prepend") or ""))
    parts = (part.get("normalizers") or ()), (part.get("decoders") or ())
    return ratio * math.prod(map(_growth, itertools.chain(*parts)))
