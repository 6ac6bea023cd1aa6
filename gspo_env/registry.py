"""Finds choices by name: built-in, from an installed plugin, or a class in a user's file.

A choice is a frozen dataclass with its own settings: an estimator (kind `advantage`), a branching,
a compaction, a curriculum, a loss, an engine, a tracker or a recipe. Configs hold
instances; files and flags name them.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from gspo_env.errors import ConfigError, MissingExtraError, raised_as

BUILTIN: dict[str, dict[str, str]] = {
    "advantage": {
        "by_agent": "gspo_env.credit.agents:ByAgent",
        "distillation": "gspo_env.training.distillation:Distillation",
        "gigpo": "gspo_env.credit.turn_estimators:GiGPO",
        "group_gae": "gspo_env.credit.turn_estimators:GroupGAE",
        "normalize_then_accumulate": "gspo_env.credit.turn_estimators:NormalizeThenAccumulate",
        "outcome": "gspo_env.credit.estimators:Outcome",
        "parts": "gspo_env.credit.parts:Parts",
        "returns_to_go": "gspo_env.credit.estimators:ReturnsToGo",
        "turn_plus_outcome": "gspo_env.credit.turn_estimators:TurnPlusOutcome",
    },
    "branching": {
        "none": "gspo_env.rollout.collector:RolloutPlugin",
    },
    "compaction": {
        "none": "gspo_env.rollout.collector:RolloutPlugin",
        "summary": "gspo_env.rollout.compaction:Summary",
    },
    "curriculum": {
        "none": "gspo_env.training.curriculum:Curriculum",
        "ladder": "gspo_env.training.pool:Ladder",
        "pool": "gspo_env.training.pool:Pool",
    },
    "engine": {
        "transformers": "gspo_env.engines.base:Transformers",
        "vllm": "gspo_env.engines.vllm.settings:VLLM",
        "vllm-server": "gspo_env.engines.vllm.settings:VLLMServer",
    },
    "loss": {
        "cispo": "gspo_env.learner.more_losses:CISPO",
        "dr_grpo": "gspo_env.learner.losses:DrGRPO",
        "grpo": "gspo_env.learner.losses:GRPO",
        "gspo": "gspo_env.learner.losses:GSPO",
        "icepop": "gspo_env.learner.more_losses:IcePop",
        "luspo": "gspo_env.learner.more_losses:LUSPO",
        "sapo": "gspo_env.learner.more_losses:SAPO",
        "vespo": "gspo_env.learner.more_losses:VESPO",
    },
    "recipe": {
        "imitate": "gspo_env.recipes.imitate:Imitate",
        "none": "gspo_env.recipes.base:Recipe",
        "smollm2": "gspo_env.recipes.imitate:SmolLM2",
        "tiny": "gspo_env.recipes.tiny:Tiny",
    },
    "tracker": {
        "mlflow": "gspo_env.tracking.mlflow:MLflow",
        "none": "gspo_env.tracking.base:NoTracker",
        "tensorboard": "gspo_env.tracking.tensorboard:TensorBoard",
        "trackio": "gspo_env.tracking.trackio:Trackio",
        "wandb": "gspo_env.tracking.wandb:WandB",
    },
}
"""Each kind's choices by name, as import strings."""

_BASES = {
    "advantage": "gspo_env.credit:Estimator",
    "branching": "gspo_env.rollout:RolloutPlugin",
    "compaction": "gspo_env.rollout:RolloutPlugin",
    "curriculum": "gspo_env.training:Curriculum",
}
"""The base class of a kind's choices."""
_METHODS = {"engine": "start", "loss": "compute", "recipe": "build", "tracker": "start"}
"""The one method of the kinds without a base class."""
_NAMES: dict[type, str] = {}
_RUNS: ContextVar[str] = ContextVar("_RUNS", default="")
"""The module or file whose code runs, to find a class in it."""
_LOADING: dict[str, RLock] = {}


def names(kind: str) -> list[str]:
    """Lists the names of a kind's choices, plugins included."""
    return sorted({*BUILTIN[kind], *_plugins(kind)})


def find(kind: str, name: str) -> type[Any]:
    """Finds the class of a choice.

    Args:
        kind: `advantage`, `branching`, `compaction`, `curriculum`, `engine`, `loss`, `recipe` or
            `tracker`.
        name: A built-in name, a plugin's, `module:Class` or `path/to/file.py:Class`.

    Raises:
        ConfigError: Nothing has that name, or it is not a dataclass of the kind's base class.
    """
    place = BUILTIN[kind].get(name) or (name if ":" in name else _plugins(kind).get(name))
    if kind == "tracker" and "," in name:
        cls: Any = load_function("gspo_env.tracking.combine:combine", kind)(name)
    elif place:
        cls = load_function(place, kind)
    else:
        near = difflib.get_close_matches(name, names(kind), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        if kind == "advantage" and name in BUILTIN["loss"]:
            scale = " --advantage.scale std" if name == "grpo" else ""
            hint = f"that is a loss here: --loss {name} --advantage outcome{scale}; "
        raise ConfigError(
            f"{kind} is {name!r}; {hint}expected one of: "
            f"{', '.join(names(kind))}; or module:Class, or file.py:Class"
        )
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{kind} is {name!r}; expected the name of a dataclass")
    if base := _BASES.get(kind):
        if not issubclass(cls, load_function(base, kind)):  # type: ignore[arg-type]
            raise ConfigError(
                f"{kind} is {name!r}; expected a subclass of {base.replace(':', '.')}"
            )
    elif not callable(getattr(cls, _METHODS[kind], None)):
        raise ConfigError(f"{kind} is {name!r}; expected a class with a method {_METHODS[kind]!r}")
    _NAMES[cls] = name
    return cls


def name_of(kind: str, choice: object) -> str:
    """Returns the name under which `find` finds the class of a choice."""
    cls = type(choice)
    if several := getattr(cls, "tracker_names", None):  # of `gspo_env.tracking.combine`
        return ",".join(several)
    for name, place in BUILTIN[kind].items():
        if place == f"{cls.__module__}:{cls.__qualname__}":
            return name
    return _NAMES.get(cls, f"{cls.__module__}:{cls.__qualname__}")


@cache
def _plugins(kind: str) -> dict[str, str]:
    """Returns the import string of each choice that installed plugins register."""
    group = f"gspo_env.{kind}{'es' if kind.endswith('s') else 's'}"
    return {point.name: point.value for point in entry_points(group=group)}


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Imports a function or any other callable.

    Args:
        name: `module:function` or `path/to/file.py:function`.
        what: What error messages call it, such as "estimator".

    Raises:
        ConfigError: It cannot be imported.
    """
    where, _, attribute = name.rpartition(":")
    if where == "__main__" and not hasattr(sys.modules[where], attribute):
        raise ConfigError(
            f"{what} is {name!r}, a class of another script or a notebook; expected the file that "
            f"has it: --{what} FILE.py:{attribute}"
        )
    problem = f"{what} is {name!r}; expected an importable place"
    with raised_as(ConfigError, problem, ImportError, reason=str):
        module = load_module(where)
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and key[0] != "_"
        ]
        near = ", ".join(difflib.get_close_matches(attribute, public) or sorted(public)) or "none"
        raise ConfigError(f"{what} is {name!r}; expected a name in {where}, such as: {near}")
    loaded: Callable[..., Any] = function
    return loaded


def require(package: str, user: str, install: str) -> None:
    """Checks that an optional package is installed, without importing it.

    Args:
        package: The package.
        user: What needs it.
        install: What pip installs.

    Raises:
        MissingExtraError: It is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"{user} needs {package}, which is not installed: pip install {install}"
        )


def load_module(where: str) -> ModuleType:
    """Imports a module by name, or a Python file by path, which runs again only if it changed.

    A file may import the modules beside it, and a name may be that of a module in the working
    folder.

    Raises:
        ImportError: It does not exist, or raised.
    """
    if not where.endswith(".py"):
        beside = Path(where.partition(".")[0])
        if beside.is_dir() or beside.with_suffix(".py").is_file():
            _add_path(os.getcwd())  # where the modules of a script would be
        try:
            with _runs(where):
                return importlib.import_module(where)
        except ImportError:
            raise
        except (Exception, SystemExit) as error:
            raise ImportError(f"it raised {type(error).__name__}: {error}") from error
    path = Path(os.path.expanduser(where)).resolve()
    if not path.is_file():
        raise ImportError(f"the file {where} does not exist")
    source = path.read_bytes()
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:12]
    name = f"gspo_env_file_{path.stem}_{digest}"
    with _LOADING.setdefault(name, RLock()):  # other threads wait for all of it
        if name not in sys.modules:
            _execute(name, path, source)
        return sys.modules[name]


@contextmanager
def _runs(where: str) -> Iterator[None]:
    token = _RUNS.set(where)
    try:
        yield
    finally:
        _RUNS.reset(token)


def refuse_training_script() -> None:
    """Refuses to train within a module or file that is only loaded to find a class in it.

    Raises:
        ConfigError: One is loaded in this thread.
    """
    if where := _RUNS.get():
        raise ConfigError(
            f"{where} trains whenever it is loaded; expected its training under `if __name__ == "
            '"__main__":`'
        )


def _add_path(folder: str) -> None:
    """Lets modules of a folder be imported, after all others, so that they replace none."""
    if folder not in sys.path:
        sys.path.append(folder)


def _execute(name: str, path: Path, source: bytes) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    _add_path(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are resolved through it while it runs
    try:
        # Not by the spec's loader: Python takes what it has compiled of a file for that of any
        # other with the same size and second.
        with _runs(path.name):
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ImportError(f"{path.name} raised {type(error).__name__}: {error}") from error
