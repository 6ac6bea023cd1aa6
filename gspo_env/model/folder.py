"""Checks a model folder that may be untrusted; loaded with the first `--model`."""

from __future__ import annotations

import itertools
import json
import math
import re
import stat
from pathlib import Path
from typing import Any

from gspo_env.errors import ModelError, first_line, raised_as
from gspo_env.model.weights import find_weights
from gspo_env.redaction import visible

ADAPTER = "adapter_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_GROWTH = 64
"""Times as long that the normalizer or the decoder of a tokenizer may make a text."""
_LONGEST_TOKEN = 2**14
"""Characters of a token."""
_LARGEST_TEXT, _LARGEST_CONFIG = 2**26, 2**22
"""Bytes of a JSON file or a template in a model folder, and of one that describes the model."""
_HUB_TIMEOUT = 5.0
"""Seconds that the hub has to answer; the cache is used if it does not."""
_CONFIGS = re.compile(
    r"(generation_|tokenizer_|processor_)?config\.json|(special_tokens_map|added_tokens)\.json"
    r"|chat_template\.(json|jinja)"
)
"""Names of files that describe the model."""
_HUB_FILES = [
    *("config.json", "*_config.json", "tokenizer.*", "tokenizer_*.json", "vocab.*", "merges.txt"),
    *("*.tiktoken", "*_tokens*.json", "*.index.json", "chat_template.*", "*chat_templates/*"),
]
"""Patterns of the files of a hub id without its weights."""
_MOST_PARTS = 10_000
"""Layers or labels of a model, for each of which its config gets an item."""


def _locate(name: str) -> tuple[str, bool, str]:
    """Returns the model's folder or hub id, whether to ask the hub for nothing, and why.

    Raises:
        ModelError: There is no such folder, or no model in it.
    """
    name = find_weights(name).folder
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        adapter = ", but it has an adapter" if (folder / ADAPTER).exists() else ""
        file = next((f", or one file: {str(f)!r}" for f in sorted(folder.glob("*.gguf"))), "")
        raise ModelError(
            f"{name!r} is a folder without config.json{adapter}; expected a saved model{file}"
        )
    check_place(name)
    offline = "" if folder.is_dir() else _hub_problem()
    return name, folder.is_dir() or bool(offline), offline


def _hub_problem() -> str:
    """Asks the hub once, since libraries try for a minute; empty if it answers."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT)
    except Exception as error:  # each version has another HTTP library
        return first_line(error)
    return ""


def locate_tokenizer(name: str) -> tuple[str, dict[str, Any], Any]:
    """Returns a model's folder or hub id, what `from_pretrained` needs to read it, its tokenizer.

    The files of a hub id that describe the model are loaded and checked first, and all others are
    of the same commit.

    Raises:
        ModelError: There is no such model, or its tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    name, local, offline = _locate(name)
    where: dict[str, Any] = {"local_files_only": local}
    if not Path(name).is_dir():
        files = _download(name, local, offline)
        _check_files(name, files)
        where["revision"] = files.name
    problem = f"cannot load the tokenizer of {name!r}"
    with raised_as(ModelError, problem, Exception, reason=first_line):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
        check_tokenizer(tokenizer)
    return name, where, tokenizer


def _download(name: str, local: bool, offline: str) -> Path:
    """Returns the folder in the hub's cache with the files that describe a model.

    Args:
        name: Hub id.
        local: Whether to ask the hub for nothing.
        offline: Why the hub does not answer; empty if it does.

    Raises:
        ModelError: There is no such model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=local))
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {name!r}, or you have no access to it; expected a model folder, "
            "or a hub id"
        ) from error
    except Exception as error:
        if offline:
            raise ModelError(
                f"there is no folder {name!r}, no model of that name in the cache of Hugging Face, "
                f"and its hub does not answer ({offline}); expected a model folder, or a hub id"
            ) from error
        raise ModelError(f"cannot load {name!r} from the hub: {first_line(error)}") from error


def check_place(name: str) -> None:
    """Checks a model's name, and the files of a folder; what can be no hub id has to be a folder.

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
    _check_files(name, folder)


def _check_files(name: str, folder: Path) -> None:
    """Checks the files of a model in a folder, which may be a snapshot of the hub.

    Raises:
        ModelError: It has no tokenizer, an adapter, or files that no model has.
    """
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
    causes = ValueError, OSError, RecursionError
    with raised_as(ModelError, f"{str(file)!r} is not a JSON object", *causes, reason=first_line):
        config = json.loads(file.read_bytes())
        _check_counts(name, config)
    if not isinstance(config, dict):
        raise ModelError(f"{str(file)!r} is not a JSON object: it is a {type(config).__name__}")


def _check_file(file: Path) -> None:
    kind = file.stat() if file.exists() else None
    folder = kind is not None and stat.S_ISDIR(kind.st_mode) and not file.is_symlink()
    if kind is None or not (stat.S_ISREG(kind.st_mode) or folder):
        raise ModelError(
            f"{visible(str(file))!r} is not a regular file; expected a file of a model"
        )
    most = _LARGEST_CONFIG if _CONFIGS.fullmatch(file.name) else _LARGEST_TEXT
    if file.suffix in (".json", ".jinja") and kind.st_size > most:
        raise ModelError(
            f"{visible(str(file))!r} has {kind.st_size:,} bytes; expected at most {most:,}"
        )


def _check_index(file: Path) -> None:
    """Refuses an index of weights that names anything but files beside it.

    Raises:
        ModelError: It is not an index, or it names another place.
    """
    problem = f"{str(file)!r} is not an index of weights"
    expected = "; expected `metadata` and `weight_map`"
    with raised_as(ModelError, problem, Exception, mend=expected):
        index = json.loads(file.read_bytes())
        shards, _ = set(index["weight_map"].values()), dict(index["metadata"])
    for shard in shards:
        _check_beside(str(file), shard)


def _check_beside(place: str, name: Any) -> None:
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise ModelError(
            f"{place!r} names the weights {visible(repr(name)[:80])}; expected a file beside it"
        )


def _check_counts(name: str, config: Any) -> None:
    """Refuses a config for which transformers would make a huge list before any weight is read.

    Sizes have 64 bits, since a cache takes no others.
    """
    for key, value in config.items() if isinstance(config, dict) else ():
        _check_counts(name, value)
        counts = re.search("^num_labels$|layers?$|(size|window)$", key)
        most = 2**62 if counts and counts[1] else _MOST_PARTS
        if counts and isinstance(value, (int, float)) and value > most:
            raise ModelError(
                f"the config of {name!r} has {visible(key)} {value:,}; expected at most {most:,}"
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
        ValueError: Its normalizer or decoder multiplies texts, or a token is huge.
    """
    if max(map(len, tokenizer.get_vocab())) > _LONGEST_TOKEN:
        raise ValueError(f"a token has more than {_LONGEST_TOKEN:,} characters")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {} if backend is None else json.loads(backend.to_str())
    for part in ("normalizer", "decoder"):
        if _growth(state.get(part)) > _GROWTH:
            raise ValueError(f"its {part} makes texts more than {_GROWTH} times as long")


def _growth(part: Any) -> float:
    """Returns how many times as long a text may become by the replacements of a tokenizer."""
    if not isinstance(part, dict):
        return 1.0
    pattern = part.get("pattern") or {}
    ratio = len(part.get("content") or "") / max(1, len(pattern.get("String") or ""))
    ratio = max(1.0, ratio, len(part.get("prepend") or ""))
    parts = (part.get("normalizers") or ()), (part.get("decoders") or ())
    return ratio * math.prod(map(_growth, itertools.chain(*parts)))


def check_weights(name: str, model: Any, info: dict[str, Any]) -> None:
    """Refuses a model without all of its weights, or with some that are not finite.

    Args:
        name: The model.
        model: It, loaded.
        info: What `transformers` says of its weights.

    Raises:
        ModelError: A weight is missing, of another shape, NaN or infinite.
    """
    if wrong := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        raise ModelError(
            f"the model {name!r} has no {', '.join(wrong[:3])} of the shape in its config "
            f"({len(wrong)} weights missing)"
        )
    for key, weight in model.named_parameters():
        if weight.is_floating_point() and weight.itemsize > 1 and weight.numel():  # not 8 bits
            low, high = weight.detach().aminmax()
            if not math.isfinite(low) or not math.isfinite(high):
                dtype = str(weight.dtype).removeprefix("torch.")
                raise ModelError(
                    f"the weights {visible(key)} of {name!r} are not finite in {dtype}: they are "
                    f"from {float(low):.3g} to {float(high):.3g}; expected finite weights"
                )
