"""Keeps the models that a warm-up has made in the user's cache folder, for the next equal run.

A warm-up follows from its seed, its settings, the environment's source, and the libraries. The name
of an entry is the digest of all of these, so an entry is never out of date. It is data: tensors in
safetensors and JSON, with a checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Bytes of all entries together; the entries that were used longest ago are deleted first."""
_MOST_SOURCE = 64 << 20
"""Bytes of files that arguments name; with more, nothing is cached."""
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "gymnasium", "safetensors", "jinja2")
_PACKAGES = ("gspo_env", "gspo_envs", "gspo_agents")
_OWN = frozenset(
    f"gspo/{name}-v0"
    for name in (
        *("Additive", "Calculator", "Dataset", "Density", "Distractor", "GuessNumber", "KeyDoor"),
        *("Lookup", "Misleading", "Recurring", "SQL", "VariableLength", "Wordle"),
    )
)
"""Environments whose tasks follow from this package and their arguments alone."""
_WEIGHTS, _FACTS = "weights.safetensors", "warm_up.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """What a warm-up has made."""

    weights: dict[str, Tensor]
    """The model's state by name."""
    tokenizer: str
    """The tokenizer's backend as JSON."""
    undemonstrated: list[str]
    """The environments without a demonstrator."""
    left_out: int
    """Demonstrations that were left out because their tasks are held out."""


class WarmUpCache:
    """Entries in a folder; several processes may use it at the same time.

    Args:
        folder: The folder; by default `$XDG_CACHE_HOME/gspo-env/warm-up`, or in `~/.cache`.
        most: Bytes of all entries together.
    """

    def __init__(self, folder: Path | None = None, most: int = MOST_BYTES) -> None:
        self.folder, self._most = folder or cache_folder(), most

    def load(self, key: str) -> WarmUp | None:
        """Returns an entry, or None if there is none; a damaged one is named and deleted."""
        place = self.folder / key
        try:
            if not self._is_own():
                return None
            facts = json.loads((place / _FACTS).read_bytes())
            data = (place / _WEIGHTS).read_bytes()
            checksum = facts.pop("checksum")
            if checksum != _checksum(facts, data):
                raise ValueError("its checksum is another one")
            entry = WarmUp(weights=load(data), **facts)
            os.utime(place)
            return entry
        except (FileNotFoundError, NotADirectoryError):
            if place.is_dir():
                self._drop(place, "a file is missing")
        except (ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
            self._drop(place, str(error))
        except OSError as error:
            logger.info("The cached warm-up %s cannot be read: %s", place, error)
        return None

    def save(self, key: str, entry: WarmUp) -> None:
        """Writes an entry all or nothing, and deletes the oldest if there are too many.

        A folder that cannot be written is no error: the run goes on without it.
        """
        facts: dict[str, Any] = {
            "tokenizer": entry.tokenizer,
            "undemonstrated": entry.undemonstrated,
            "left_out": entry.left_out,
        }
        # tied weights share memory, which a file of tensors cannot
        data = save({name: t.detach().cpu().clone() for name, t in entry.weights.items()})
        if len(data) > self._most:
            return
        facts["checksum"] = _checksum(facts, data)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._is_own():
                return
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".new-") as name:
                part = Path(name) / key
                part.mkdir(mode=0o700)
                (part / _WEIGHTS).write_bytes(data)
                (part / _FACTS).write_text(json.dumps(facts))
                with contextlib.suppress(FileExistsError, OSError):  # another process was first
                    os.rename(part, self.folder / key)
            self._prune()
        except OSError as error:
            logger.info("The warm-up cannot be cached in %s: %s", self.folder, error)

    def _is_own(self) -> bool:
        """Returns whether only this user can write to the folder; others could change entries."""
        if not hasattr(os, "getuid"):
            return True
        state = self.folder.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022:
            return True
        logger.warning(
            "the cache folder %s can be written by others: warm-ups are not cached", self.folder
        )
        return False

    def _drop(self, place: Path, reason: str) -> None:
        logger.warning("the cached warm-up %s is damaged (%s); it is made again", place, reason)
        shutil.rmtree(place, ignore_errors=True)

    def _prune(self) -> None:
        found = []
        for place in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process deletes as well
                size = sum(path.stat().st_size for path in place.iterdir())
                found.append((place.stat().st_mtime, size, place))
        left = sum(size for _, size, _ in found)
        for _, size, place in sorted(found):
            if left <= self._most:
                break
            shutil.rmtree(place, ignore_errors=True)
            left -= size


def cache_folder() -> Path:
    """Returns the user's folder of cached warm-ups."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = home if home.is_absolute() else Path.home() / ".cache"
    return base / "gspo-env" / "warm-up"


def make_key(
    env: str, arguments: Mapping[str, Any], settings: Mapping[str, Any], files: str = ""
) -> str | None:
    """Returns the name of the entry of a warm-up; None if it must not be cached.

    Args:
        env: The environment: one of this package that needs no other, or `file.py:Class`. Others
            may change without a change of what is read here.
        arguments: Its arguments. Files that they name are part of the key; a folder is not cached.
        settings: Everything else that the warm-up depends on, as JSON values.
        files: A file of the recipe, or nothing.
    """
    source = env.rpartition(":")[0]
    if not (env in _OWN or source.endswith(".py")):
        return None
    data = arguments.get("data", "")
    try:
        if env == "gspo/Dataset-v0" and isinstance(data, str) and not _digests([data]):
            return None  # a data set of a hub
        named = _digests([source, files, *_texts(arguments)])
        facts = json.dumps(
            {
                "env": env,
                "arguments": arguments,
                "settings": settings,
                "files": named,
                "place": _place(),
            },
            sort_keys=True,
        )
    except (OSError, TypeError, ValueError, _Uncacheable) as error:
        logger.info("The warm-up is not cached: %s", error)
        return None
    return hashlib.sha256(facts.encode(errors="surrogateescape")).hexdigest()


class _Uncacheable(Exception):
    """What a warm-up depends on cannot be read."""


def _place() -> dict[str, Any]:
    """Returns what its numbers depend on besides the settings."""
    devices = range(torch.cuda.device_count())
    return {
        "python": platform.python_version(),
        "machine": (platform.system(), platform.machine(), _processor(), os.cpu_count()),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "devices": [torch.cuda.get_device_name(n) for n in devices],
        "libraries": {name: version(name) for name in _LIBRARIES},
        "sources": _sources(),
    }


@cache
def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        names = [line for line in lines if line.startswith(("model name", "model\t", "flags"))]
        return "".join(names[:3])
    return platform.processor()


@cache
def _sources() -> str:
    """Returns the digest of every source file of this package."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(folder)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _digests(texts: list[str]) -> dict[str, str]:
    """Returns the digest of each file that is named, as `FILE` or `FILE.py:NAME`.

    A Python file may import those beside it, so they are read too.
    """
    found: dict[str, str] = {}
    size = 0
    for name in dict.fromkeys(n for text in texts for n in (text, text.rpartition(":")[0]) if n):
        try:
            path = Path(name).expanduser()
            is_file, is_folder = path.is_file(), path.is_dir()
        except (OSError, ValueError, RuntimeError):  # it cannot be the name of a file
            continue
        if is_folder and name in texts:
            raise _Uncacheable(f"{name!r} is a folder")
        if not is_file:
            continue
        beside = sorted(path.resolve().parent.glob("*.py")) if path.suffix == ".py" else []
        for each in dict.fromkeys([path.resolve(), *beside]):
            size += each.stat().st_size
            if size > _MOST_SOURCE:
                raise _Uncacheable(f"the files beside {name!r} are large")
            found[str(each)] = hashlib.sha256(each.read_bytes()).hexdigest()
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _checksum(facts: Mapping[str, Any], data: bytes) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(data)
    return digest.hexdigest()
