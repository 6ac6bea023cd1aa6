"""Builds a config from arguments: first the file, then the choices, then all other flags."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import itertools
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import tyro

from gspo_env.config import Config, from_dict, override, read_toml, resolve
from gspo_env.env.registration import add_kwargs, format_env
from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, name_of, names
from gspo_env.tracking.base import flatten
from gspo_env.trust import read_saved

logger = logging.getLogger(__name__)

_TRL = {
    "beta": "loss.kl-coef",
    "bf16": "model-dtype bfloat16",
    "epsilon": "loss.clip-low",
    "epsilon_high": "loss.clip-high",
    "gradient_checkpointing": "learner.checkpointing",
    "importance_sampling_level": "loss.ratio-level",
    "max_completion_length": "rollout.max-turn-tokens",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_generations": "rollout.group-size",
    "num_iterations": "learner.minibatches",
    "output_dir": "output",
    "report_to": "tracker",
    "scale_rewards": "advantage.scale",
    "torch_dtype": "model-dtype",
    "use_vllm": "engine vllm",
    "vllm_mode": "engine",
}
"""Our names for TRL's options."""

_DROPOUT = "dropout is off, because the policy that trains has to be the one that was sampled"
_ABSENT = {"dropout": _DROPOUT, "lora_dropout": _DROPOUT}
"""What people look for that is not here, and why."""

PRIMITIVES = tyro.constructors.ConstructorRegistry()
"""How tyro reads dictionaries: pairs of a name and a JSON value."""


@PRIMITIVES.primitive_rule
def _pairs(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    if info.type != dict[str, Any]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=lambda texts: dict(map(_pair, texts)),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{k}={json.dumps(v)}" for k, v in value.items()],
    )


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not KEY=VALUE, such as hops=4")
    for read in (json.loads, ast.literal_eval):  # True and None are Python's spelling
        with contextlib.suppress(ValueError, SyntaxError):
            return key, read(value)
    if value[:1] in ("[", "{"):
        raise ConfigError(f"{text!r} is no JSON value; put texts inside it into double quotes")
    return key, value


def one_or_several(env: tuple[str, ...]) -> str | tuple[str, ...]:
    """Returns what the flag `--env` names, as the field `env` of a config has it."""
    return env if len(env) > 1 else "".join(env)


def _names(kind: str) -> Any:
    return tyro.conf.arg(metavar=f"{{{','.join(names(kind))}}}|FILE.py:CLASS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A config file, and classes by name; the settings of each class are options too."""

    config: str = ""
    """TOML file with any of the settings below; flags win."""
    recipe: Annotated[str, _names("recipe")] = ""
    """Starting point; `tiny` if no model is named."""
    advantage: Annotated[str, _names("advantage")] = ""
    """Estimator of advantages."""
    loss: Annotated[str, _names("loss")] = ""
    """Policy loss."""
    engine: Annotated[str, _names("engine")] = ""
    """Engine that samples the actions."""
    tracker: Annotated[str, _names("tracker")] = ""
    """Where metrics are recorded; separate several with commas."""
    curriculum: Annotated[str, _names("curriculum")] = ""
    """Chooses the options of the environment's `reset` by the results so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start(Choices):
    """Options that determine which other options exist."""

    resume: str = ""
    model: str = ""
    env: tuple[str, ...] = ()
    env_kwargs: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The options of a command that takes the config of a run."""

    choices: Annotated[tyro.conf.OmitArgPrefixes[Choices], tyro.conf.arg(name="choices")] = field(
        default_factory=Choices
    )
    settings: Annotated[tyro.conf.FlagConversionOff[Config], tyro.conf.arg(name="")] = field(
        default_factory=Config
    )

    @property
    def resolved(self) -> Config:
        """The config of the run.

        Raises:
            ConfigError: A value is invalid.
        """
        return _sections(self.settings, _checked)

    @classmethod
    def saved(
        cls, folder: str, given: Mapping[str, Any], env: str | tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the settings of a run to go on with.

        Args:
            folder: Folder of the run.
            given: Settings of the user.
            env: The environment, or several, if the user names one.

        Raises:
            ConfigError: The command goes on with no run.
        """
        raise ConfigError(f"--resume is {folder!r}; expected it with `train` only")

    @classmethod
    def take(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Takes the command's own table out of a file's tree; returns its options."""
        return {}


def prepare(command: type[Run], arguments: Sequence[str]) -> tuple[Run, list[str]]:
    """Reads the file and the choices.

    Returns:
        The command with its defaults, and the other arguments, with the full path of every flag.

    Raises:
        ConfigError: The file, a choice or a flag is unknown or invalid.
    """
    with one_sentence():
        start, rest = tyro.cli(_Start, args=arguments, return_unknown_args=True, add_help=False)
    if start.config and start.resume:
        raise ConfigError("--config and --resume are given; expected one of them")
    tree = read_toml(start.config) if start.config else {}
    own = command.take(tree)
    if start.resume:
        pairs = dict(_pair(text) for texts in start.env_kwargs for text in texts)
        given = {k: v for k in BUILTIN if (v := getattr(start, k))} | {"env_kwargs": pairs}
        tree = command.saved(start.resume, given, one_or_several(start.env))
        own |= {"resume": start.resume}
    tree |= {key: value for key in ("model", "recipe") if (value := getattr(start, key))}
    tree |= {"env": one_or_several(start.env)} if start.env else {}
    known = {"help", *(f.name for f in dataclasses.fields(command))}
    config = from_dict(tree) if start.resume else _base(tree, start, rest, known)
    given = dict(_pair(text) for texts in start.env_kwargs for text in texts)
    config = override(config, {"env_kwargs": add_kwargs(config.env_kwargs, given, config.env)})
    for kind in BUILTIN:
        if chosen := getattr(start, kind):
            config = override(config, {kind: chosen})
    config = _with_score_of_file(config, start)
    chosen = {kind: name_of(kind, getattr(config, kind)) for kind in BUILTIN}
    choices = Choices(config=start.config, **chosen)
    match arguments[-2:]:
        case ["--help", group]:
            _print_page(config, group)
    made = command(choices=choices, settings=_sections(config, _unchecked), **own)
    return made, list(_switches([_spell_out(argument, config, known) for argument in rest], config))


_FRAME = "\u2500\u2502\u256d\u256e\u2570\u256f| "
"""Characters of the frame of a message, on both sides of its lines."""


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Turns the framed message with which tyro exits into one sentence.

    Raises:
        ConfigError: An argument is invalid.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as end:
        if not end.code:
            raise
        lines = [line.strip(_FRAME) for line in said.getvalue().splitlines()][1:]
        ruled = itertools.groupby(lines, key=lambda line: bool(line.strip("-+")))  # or no Unicode
        parts = [list(group) for text, group in ruled if text] or [[]]
        text = " ".join(parts[0]).replace("Expected 1 values", "Expected a value")
        usage = next((line for line in itertools.chain(*parts[1:]) if line.startswith("--")), "")
        hint = f" (expected {usage})" if usage else ""
        if text.startswith("Unrecognized"):
            hint += "; --help behind the command lists what it takes"
        raise ConfigError(f"{text}{hint}") from None
    if said.getvalue():
        print(said.getvalue(), end="", file=sys.stderr)


def _switches(arguments: Sequence[str], config: Config) -> Iterator[str]:
    """Yields the arguments; a switch without a value, such as `--strict`, is true."""
    leaves = flatten(config, mappings=False)
    for n, argument in enumerate(arguments):
        yield argument
        switch = isinstance(leaves.get(argument[2:].replace("-", "_")), bool)
        if switch and arguments[n + 1 : n + 2] not in (["True"], ["False"]):
            yield "True"


def _base(
    tree: dict[str, Any], start: _Start, flags: Sequence[str], known: Collection[str]
) -> Config:
    """Returns the config of a file and, if the model is a trained folder, of its settings.

    Args:
        tree: The settings of the file, with the model, the recipe and the environment of flags.
        start: The flags that were read.
        flags: The other arguments, which may replace settings of the folder.
        known: Flags that are no settings.

    Raises:
        ConfigError: The folder names something that has to be given.
    """
    model, recipe = tree.get("model"), tree.pop("recipe", None)
    saved = read_saved(model) if isinstance(model, str) and model else None
    if saved is None:
        return from_dict(tree if recipe is None else tree | {"recipe": recipe})
    pairs = dict(_pair(text) for texts in start.env_kwargs for text in texts)
    chosen = {kind: value for kind in BUILTIN if (value := getattr(start, kind))}
    # flags may be settings of a class that is named instead of the folder's
    played = {name: value for name, value in saved.tree.items() if name != "env_kwargs"}
    config = override(override(from_dict(played), tree), chosen)
    spelled = (_spell_out(flag, config, known) for flag in flags if flag.startswith("--"))
    paths = (flag[2:].partition("=")[0].replace("-", "_") for flag in spelled)
    given = tree | chosen | dict.fromkeys(paths, True)
    env = tree.get("env") or saved.env
    given["env_kwargs"] = add_kwargs(tree.get("env_kwargs", {}), pairs, env)
    config = from_dict(saved.settings(given, env=tree.get("env", "")))
    if recipe is not None:
        config = override(config, {"recipe": recipe})
        config = override(config, config.recipe.changes)
    return override(config, tree | {"env_kwargs": config.env_kwargs})


def _with_score_of_file(config: Config, start: _Start) -> Config:
    """Returns the config with the score of the file or the folder, where it still applies.

    A run writes the score that its episodes decided into its file, so the user may not know of it.
    """
    score = config.credit.score
    if score == "auto":
        return config
    if start.advantage and not getattr(config.advantage, "uses_score", True):
        return override(config, {"credit": {"score": "auto"}})
    if start.config and start.env:
        logger.warning(
            "credit.score is %r, as in %s; --score auto takes that of %s",
            *(score, start.config, format_env(start.env)),
        )
    return config


def _unchecked(section: Any) -> Any:
    """Converts a section to a class without validation, because tyro would frame its errors."""
    kind = type(section)
    free = type(kind.__name__, (kind,), {"__doc__": kind.__doc__, "__post_init__": lambda _: None})
    return free(**{f.name: getattr(section, f.name) for f in dataclasses.fields(section)})


def _checked(section: Any) -> Any:
    """Converts an unchecked section back to its own class, which validates the values."""
    kind = type(section).__bases__[0]
    return kind(**{f.name: getattr(section, f.name) for f in dataclasses.fields(section)})


def _sections(config: Config, change: Callable[[Any], Any]) -> Config:
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    changed = {k: change(v) for k, v in sections.items() if dataclasses.is_dataclass(v)}
    return dataclasses.replace(config, **changed)


def _print_page(config: Config, group: str) -> NoReturn:
    """Prints the options of one section and exits."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sections = [name for name, value in values.items() if dataclasses.is_dataclass(value)]
    if group not in sections:
        raise ConfigError(f"there is no section {group!r}; expected one of: {', '.join(sections)}")
    section: Any = values[group]
    if not dataclasses.fields(section):
        chosen = f"{group} {name_of(group, section)!r}" if group in BUILTIN else group
        others = f"; --{group} takes: {', '.join(names(group))}" if group in BUILTIN else ""
        print(f"{chosen} has no settings{others}")
        raise SystemExit(0)
    page: Any = dataclasses.make_dataclass("Page", [(group, type(section), field(default=section))])
    markers = (tyro.conf.FlagConversionOff,)
    tyro.cli(page, args=["--help"], prog="gspo-env", registry=PRIMITIVES, config=markers)
    raise SystemExit(0)


def _spell_out(argument: str, config: Config, known: Collection[str]) -> str:
    """Expands a flag to its full path, `--lam` to `--advantage.lam`; other arguments stay."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument[2:].partition("=")
    name = flag.replace("-", "_")
    if name in known:
        return argument
    if name in _TRL:
        raise ConfigError(f"--{flag} is an option of TRL; here it is --{_TRL[name]}")
    if name in _ABSENT:
        raise ConfigError(f"there is no setting {name!r}: {_ABSENT[name]}")
    return f"--{resolve(config, name).replace('_', '-')}{equals}{value}"
