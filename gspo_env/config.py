"""One tree of frozen, validated settings: the same in Python, TOML files and flags."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tomli_w
from annotated_types import Ge, Interval
from pydantic import TypeAdapter, ValidationError, model_validator
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import ArgsKwargs, to_jsonable_python

from gspo_env.credit.estimate import CreditConfig
from gspo_env.credit.estimators import ReturnsToGo
from gspo_env.engines.base import Transformers
from gspo_env.env.registration import Member, env_setting, read_members
from gspo_env.errors import ConfigError, raised_as
from gspo_env.learner.losses import GSPO, decide_correction
from gspo_env.learner.settings import LearnerConfig
from gspo_env.recipes.base import Recipe
from gspo_env.redaction import redact
from gspo_env.registry import BUILTIN, find, name_of
from gspo_env.rollout.settings import RolloutConfig, SupplyConfig
from gspo_env.seeding import SEEDS
from gspo_env.settings import STRICT, describe, settings
from gspo_env.tracking.base import flatten
from gspo_env.tracking.mlflow import MLflow
from gspo_env.types import Score

T = TypeVar("T")


@settings
class CheckpointConfig:
    """When a run is saved, so that `gspo-env train --resume` can continue it."""

    save_every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints; 0 saves as often as takes at most 2 % of the time."""
    keep: Annotated[int, Ge(0)] = 2
    """Newest checkpoints to keep, besides the best by `eval/success`; 0 saves none."""


@settings
class EpisodesConfig:
    """Which episodes a run keeps in its folder; see `gspo_env.episodes.read_episodes`."""

    keep_episodes: Literal["sample", "all", "eval", "none"] = "sample"
    """Those of every evaluation and, of each training step, the first groups (`sample`) or all
    groups; those of evaluations only; or none."""
    keep_groups: Annotated[int, Ge(1)] = 2
    """Training groups of each step that `sample` keeps."""
    keep_mb: Annotated[int, Ge(1)] = 256
    """Megabytes that the files may have. If they have more, steps in between are deleted, those of
    training first."""
    keep_batches: Literal["none", "all", "last"] | Annotated[int, Ge(1)] = "none"
    """Batches to keep for `gspo-env replay`: none, all, the last, or so many of the newest. Each
    has the weights and the optimiser before its update, and all of its groups."""


@settings
class Config:
    """All settings of a run. `Config()` has the same values for every model.

    The fields `recipe`, `advantage`, `branching`, `compaction`, `loss`, `engine`, `tracker` and
    `curriculum` hold choices: instances of a class that `gspo_env.registry` finds by name.
    """

    env: str | tuple[str, ...] = "gspo/Lookup-v0"
    """Environment: a registered id, `module:id`, or `path/to/file.py:Class`. Several have weights
    and, if two would have the same, names: `gspo/Lookup-v0:0.7 hard=gspo/Lookup-v0:0.3`."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as `entries=12`; JSON values. With several environments,
    `NAME.KEY=VALUE`, such as `hard.hops=4`, or in a file the table `[env_kwargs.hard]`."""
    model: str = ""
    """Model folder or hub id; empty takes the model that the recipe makes."""
    model_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of the weights, in training and in the engine; auto is the checkpoint's own on a
    GPU and float32 on a CPU. The optimiser works in float32 with every dtype."""
    rewritten_history: Literal["template", "keep", "refuse"] = "template"
    """The prompt of a later turn where a chat template rewrites earlier ones: what the template
    renders, the turns as they were sampled, or neither, with an error."""
    seed: Annotated[int, Interval(ge=0, lt=SEEDS)] = 0
    """Seed of every random draw of the run."""
    steps: Annotated[int, Ge(0)] = 100
    """Training steps; each trains on one rollout batch."""
    tasks_per_step: Annotated[int, Ge(1)] = 16
    """Tasks of a rollout batch, P; each gets `rollout.group_size` episodes."""
    eval_every: Annotated[int, Ge(0)] = 10
    """Steps between evaluations; 0 evaluates at the start and the end only."""
    eval_tasks: Annotated[int, Ge(0)] | Literal["all"] = 0
    """Held-out tasks of an evaluation; 0 takes 256, or 32 for a model of more than 5 million
    weights on a CPU, and `all` those of an environment that has a list of them."""
    stop_at_success: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """End the run after the first evaluation, that before training excepted, whose `eval/success`
    is at least this; 0 trains all steps."""
    strict: bool = False
    """Stop with an error where a run would only warn that it learns nothing so far."""
    output: str = ""
    """Folder for the results; by default a new one under `runs`, or `comparisons/comparison`."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    supply: SupplyConfig = field(default_factory=SupplyConfig)
    advantage: Any = field(default_factory=ReturnsToGo)
    credit: CreditConfig = field(default_factory=CreditConfig)
    loss: Any = field(default_factory=GSPO)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    engine: Any = field(default_factory=Transformers)
    tracker: Any = field(default_factory=MLflow)
    recipe: Any = field(default_factory=Recipe)
    branching: Any = field(default_factory=lambda: find("branching", "none")())
    compaction: Any = field(default_factory=lambda: find("compaction", "none")())
    curriculum: Any = field(default_factory=lambda: find("curriculum", "none")())

    @model_validator(mode="before")
    @classmethod
    def _read_sections(cls, arguments: ArgsKwargs) -> ArgsKwargs:
        """Takes the name or the table of a section in place of its dataclass."""
        values = dict(arguments.kwargs or {})
        if "env" in values:
            values["env"] = env_setting(values["env"])
        for each in dataclasses.fields(cls):
            is_section = each.default_factory not in (dataclasses.MISSING, dict)
            value = values.get(each.name, cls)
            if is_section and not dataclasses.is_dataclass(value):
                values[each.name] = getattr(override(Config(), {each.name: value}), each.name)
        return ArgsKwargs((), values)

    def __post_init__(self) -> None:
        """Rejects a curriculum for several environments."""
        no_curriculum = name_of("curriculum", self.curriculum) == "none"
        if len(self.environments) > 1 and not no_curriculum:
            raise ConfigError(
                f"curriculum is {name_of('curriculum', self.curriculum)!r} with several "
                "environments; expected 'none', since their resets have different options"
            )

    @property
    def environments(self) -> tuple[Member, ...]:
        """The environments that `env` and `env_kwargs` name; nearly always one."""
        return read_members(self.env, self.env_kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles nested dictionaries, so that another process finds a user's classes."""
        return from_dict, (to_dict(self),)

    @classmethod
    def from_recipe(cls, name: Any = "tiny", /, **changes: Any) -> Config:
        """Starts from a recipe.

        Args:
            name: `tiny`, a plugin's name, `path/to/file.py:Class`, or an instance.
            changes: Fields by name, as on the command line, such as `lora_rank=8`; a dictionary
                changes fields of a section, such as `learner={"lora_rank": 8}`.

        Raises:
            ConfigError: The recipe or a field is unknown, or a value is invalid.
        """
        fields = {f.name for f in dataclasses.fields(cls)}
        named = {field: value for field, value in changes.items() if field in fields}
        config = override(from_dict({"recipe": name}), named)
        others = {resolve(config, s): value for s, value in changes.items() if s not in fields}
        return override(config, nested(others))


def learner_arguments(config: Config) -> dict[str, Any]:
    """Returns the arguments of `gspo_env.learner.Learner` for a run, but for its model."""
    return {
        "loss": decide_correction(config.loss, config.supply.max_staleness),
        "config": config.learner,
        "total_steps": config.steps * config.learner.minibatches,
        "temperature": config.rollout.temperature,
    }


def with_score(config: Config, score: Score | None) -> Config:
    """Sets a score that the config leaves open, if the estimator uses one."""
    if score is None or config.credit.score != "auto" or not config.advantage.uses_score:
        return config
    return replace(config, credit=replace(config.credit, score=score))


def check_estimator(config: Config) -> None:
    """Rejects settings that do not go with the estimator, or have no effect.

    A config does not check this itself, because its fields may change one by one.

    Raises:
        ConfigError: The estimator has its own rewards, and `credit.score` is not `auto`; or it
            refuses its own settings, see `Estimator.check`.
        ModelError: Its teacher is not a model.
    """
    config.advantage.check()
    power, staleness = getattr(config.loss, "clip_staleness", 0.0), config.supply.max_staleness
    if power and not staleness:
        raise ConfigError(
            f"loss.clip_staleness is {power!r} and supply.max_staleness is {staleness!r}, so that "
            "no token is stale; expected --clip-staleness 0, or --max-staleness of at least 1"
        )
    if config.credit.score != "auto" and not config.advantage.uses_score:
        raise ConfigError(
            f"credit.score is {config.credit.score!r}, which the estimator "
            f"{name_of('advantage', config.advantage)!r} does not use; expected --score auto"
        )


def read_toml(path: str | Path, read: Callable[[Path], bytes] = Path.read_bytes) -> dict[str, Any]:
    """Reads the tree of a TOML file; `read` gives its bytes.

    Raises:
        ConfigError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(read(Path(path)).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not in UTF-8 (byte {error.start}); save it so") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def load_toml(path: str | Path) -> Config:
    """Reads a config from a TOML file; see `from_dict`."""
    return from_dict(read_toml(path))


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Builds a config from nested dictionaries.

    Missing fields take the recipe's value, or else the neutral default. The recipe is `tiny` if the
    tree names neither a recipe nor a model.

    Raises:
        ConfigError: A field is unknown or a value is invalid; the message names both.
    """
    named = tree.get("recipe", {})
    recipe = named.get("name", "") if isinstance(named, Mapping) else named
    recipe = recipe or ("none" if tree.get("model") else "tiny")
    config = override(Config(), {"recipe": recipe})
    return override(override(config, config.recipe.changes), tree)


def override(config: Config, tree: Mapping[str, Any]) -> Config:
    """Replaces the fields that a nested dictionary names.

    A choice is given as a name, or as a dictionary with an entry `name` and settings. A choice that
    differs from the config's starts from its own defaults.

    Raises:
        ConfigError: A field is unknown or a value is invalid; the message names both.
    """
    return _replace(config, tree, "")


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the resolved config as nested dictionaries; `from_dict` reads them back."""
    tree = dataclasses.asdict(config)
    for kind in BUILTIN:
        tree[kind] = {"name": name_of(kind, getattr(config, kind)), **tree[kind]}
    return tree


def to_toml(config: Config) -> str:
    """Writes the resolved config as TOML; `load_toml` reads it back.

    TOML has no null, so fields that are None are left out. An object that TOML cannot hold, such as
    a function among the arguments of an environment, is written as its `repr`. What looks
    like a secret is redacted.
    """
    tree = redact(to_jsonable_python(to_dict(config), fallback=repr))
    return tomli_w.dumps(_without_null(tree, ""))


def _without_null(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        entries = {name: item for name, item in value.items() if item is not None}
        return {name: _without_null(item, f"{where}.{name}") for name, item in entries.items()}
    if not isinstance(value, list):
        return value
    if None in value:
        raise ConfigError(
            f"{where[1:]} is {value!r}; expected a list without null, which TOML lacks"
        )
    return [_without_null(item, where) for item in value]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tree of values by dotted path."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        functools.reduce(lambda table, key: table.setdefault(key, {}), sections, tree)[name] = value
    return tree


def resolve(config: Config, name: str) -> str:
    """Finds the dotted path of a field.

    Args:
        config: The config, whose choices define which settings exist.
        name: The path, or its last part if that is unambiguous.

    Raises:
        ConfigError: No field, or more than one, has that name; the message lists the candidates.
    """
    paths = [*BUILTIN, *flatten(config, mappings=False)]
    if name in paths:
        return name
    matches = [path for path in paths if path.rpartition(".")[2] == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name!r} could be {' or '.join(matches)}; expected one of them")
    from gspo_env.renamed import hint_for_flag

    raise ConfigError(f"there is no setting {name!r}{hint_for_flag(config, name, paths)}")


def _replace(default: T, tree: Mapping[str, Any], where: str) -> T:
    """Replaces fields; the error has all faults of the tree."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    for name, value in tree.items():
        try:
            values[name] = _read_field(default, name, value, where)
        except ConfigError as error:
            faults += error.args
    if faults:
        raise ConfigError(*faults)
    return dataclasses.replace(default, **values)  # type: ignore[type-var]


def _read_field(default: Any, name: str, value: Any, where: str) -> Any:
    names = [f.name for f in dataclasses.fields(default)]
    if name not in names:
        from gspo_env.renamed import unknown_field

        raise ConfigError(unknown_field(default, name, where, flatten(Config(), mappings=False)))
    old = getattr(default, name)
    if not where and name in BUILTIN:
        return _choose(name, old, value)
    if dataclasses.is_dataclass(old):
        return _replace(old, _table(where + name, value), f"{where}{name}.")
    return convert(f"{where}{name}", value, type_hints(default.__class__)[name])


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """Returns the annotations of the fields of settings, with their bounds."""
    return get_type_hints(cls, include_extras=True)


def _choose(kind: str, old: Any, value: Any) -> Any:
    """Returns the choice that a string or a table names, or the old one with new settings."""
    if dataclasses.is_dataclass(value):
        return value
    tree = {"name": value} if isinstance(value, str) else dict(_table(kind, value))
    name = convert(f"{kind}.name", tree.pop("name", name_of(kind, old)), str)
    new = old if name == name_of(kind, old) else _default(kind, name)
    return _replace(new, tree, f"{kind}.")


def _default(kind: str, name: str) -> Any:
    with raised_as(ConfigError, f"{kind} {name!r} cannot be made with its defaults", Exception):
        return find(kind, name)()


def _table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; expected a table")
    return value


def convert(name: str, value: Any, hint: Any) -> Any:
    """Converts a value of a file or a flag to the annotated type, such as a string to a path.

    Args:
        name: What error messages call the setting.
        value: The value; `1e3` is a number, but not an integer.
        hint: The annotated type of the setting.

    Raises:
        ConfigError: The value is not of that type.
    """
    try:
        adapter = TypeAdapter(hint, config=STRICT)
    except PydanticSchemaGenerationError:  # a user's class
        return value
    with contextlib.suppress(ValidationError):
        return adapter.validate_python(value, strict=True)
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise describe(error, name) from None
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}, which TOML cannot hold: {error}") from None
