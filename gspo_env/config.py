"""One tree of frozen, validated settings: the same in Python, TOML files and flags."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gspo_env.credit.estimate import AdvantageConfig
from gspo_env.engines.vllm.local import VLLMConfig
from gspo_env.engines.vllm.server import VLLMServerConfig
from gspo_env.errors import ConfigError
from gspo_env.learner.learner import LearnerConfig, ObjectiveConfig
from gspo_env.recipes.embedded import EmbeddedConfig
from gspo_env.rollout.collector import RolloutConfig
from gspo_env.tracking.mlflow import MLflow

T = TypeVar("T")

_FREE = ("env_kwargs", "engine_args", "args")
"""Fields that hold whatever the user says; all other dictionaries are sections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that decides a run.

    `Config()` is the recipe of the embedded tiny model, `Config.for_model` that of a given one.
    """

    env: str = "gspo/Lookup-v0"
    """Environment: a registered id, `module:id`, or `path/to/file.py:Class`."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as `hops=4`; JSON values."""
    model: str = ""
    """Model folder or hub id; empty builds the embedded tiny model and warms it up."""
    engine: Literal["transformers", "vllm", "vllm-server"] = "transformers"
    """How actions are sampled: over the learner's own weights, by vLLM here, or by its servers."""
    history: Literal["keep", "refuse"] = "keep"
    """What to do where a chat template rewrites earlier turns: keep them as sampled, or refuse."""
    seed: int = 0
    """Decides every random draw of the run."""
    steps: int = 70
    """Rollout batches to train on."""
    tasks_per_step: int = 32
    """Tasks of a rollout batch, P; each gets `group_size` episodes."""
    eval_every: int = 10
    """Steps between evaluations; 0 evaluates at the start and the end only."""
    eval_tasks: int = 256
    """Held-out tasks of an evaluation."""
    output: str = ""
    """Folder for the results; empty makes a new one under `runs`."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    objective: ObjectiveConfig = field(
        default_factory=lambda: ObjectiveConfig(clip_low=0.03, clip_high=0.05)
    )
    learner: LearnerConfig = field(
        default_factory=lambda: LearnerConfig(
            learning_rate=1e-3, warmup_steps=60, schedule="cosine"
        )
    )
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    server: VLLMServerConfig = field(default_factory=VLLMServerConfig)
    tracker: Any = field(default_factory=MLflow)

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        for name, least in (
            ("steps", 0),
            ("tasks_per_step", 1),
            ("eval_every", 0),
            ("eval_tasks", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected at least {least}")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed!r}; expected at least 0")

    @classmethod
    def for_model(cls, model: str) -> Config:
        """The defaults for a model folder or hub id: the paper's clip, room for long actions."""
        if not model:
            return cls()
        return cls(
            model=model,
            steps=100,
            tasks_per_step=16,
            rollout=RolloutConfig(max_turn_tokens=512, max_context=4096),
            objective=ObjectiveConfig(),
            learner=LearnerConfig(),
        )


def load_toml(path: str | Path) -> Config:
    """Reads a config from a TOML file; see `read_toml` and `from_dict` for what is refused."""
    return from_dict(read_toml(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Reads the tree of a TOML file.

    Raises:
        ConfigError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config file {str(path)!r}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def from_dict(tree: dict[str, Any]) -> Config:
    """Builds a config from nested dictionaries; what they leave out has the model's default.

    Raises:
        ConfigError: A field is unknown or impossible; the message names it.
    """
    model = tree.get("model", "")
    return _replace(Config.for_model(_typed("model", model, str)), tree, "")


def override(config: Config, tree: dict[str, Any]) -> Config:
    """The config with what a nested dictionary names replaced.

    Raises:
        ConfigError: A field is unknown or impossible; the message names it.
    """
    return _replace(config, tree, "")


def _replace(default: T, tree: dict[str, Any], where: str) -> T:
    hints = get_type_hints(type(default))
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=3) or sorted(hints)
            raise ConfigError(f"unknown field {where}{name!r}; expected one of: {', '.join(near)}")
        hint = hints[name]
        if dataclasses.is_dataclass(getattr(default, name)):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{name} is {value!r}; expected a table")
            values[name] = _replace(getattr(default, name), value, f"{where}{name}.")
        else:
            values[name] = _typed(f"{where}{name}", value, hint)
    return dataclasses.replace(default, **values)  # type: ignore[type-var]


def _typed(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            allowed = ", ".join(map(repr, get_args(hint)))
            raise ConfigError(f"{name} is {value!r}; expected one of {allowed}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = get_origin(hint) or hint
    if plain is tuple and isinstance(value, list):
        return tuple(value)
    if isinstance(plain, type) and (
        not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool)
    ):
        raise ConfigError(f"{name} is {value!r}; expected {plain.__name__}")
    return value


def to_toml(config: Config) -> str:
    """The resolved tree as TOML; `load_toml` reads it back."""
    return _table(dataclasses.asdict(config), "")


def _table(tree: dict[str, Any], prefix: str) -> str:
    lines, tables = [], []
    for name, value in tree.items():
        if isinstance(value, dict) and name not in _FREE:
            tables.append(f"\n[{prefix}{name}]\n{_table(value, f'{prefix}{name}.')}")
        elif isinstance(value, dict):
            inner = ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{name} = {{ {inner} }}" if inner else f"{name} = {{}}")
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n" + "".join(tables)
