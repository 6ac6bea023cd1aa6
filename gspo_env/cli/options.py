"""Reads the config of a run from arguments: first the file, then the choices, then other flags."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import json
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, TypeVar, get_args

import tyro

from gspo_env.config import (
    Config,
    convert,
    from_dict,
    nested,
    override,
    read_toml,
    resolve,
    type_hints,
)
from gspo_env.env.registration import add_kwargs, format_env
from gspo_env.errors import ConfigError
from gspo_env.recipes.base import Recipe
from gspo_env.registry import BUILTIN, find, name_of, names
from gspo_env.settings import settings

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MOST_BYTES, _MOST_FAULTS = 1 << 20, 20


def pair(text: str) -> tuple[str, Any]:
    """Reads KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not KEY=VALUE, such as hops=4")
    if isinstance(literal(value), str) and value[:1] in ("[", "{"):
        raise ConfigError(f"{text!r} is not a JSON value; put texts inside it into double quotes")
    return key, literal(value)


def literal(text: str) -> Any:
    """Reads a value of JSON or Python; anything else is a text."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    return text


def one_or_several(env: Sequence[str]) -> str | tuple[str, ...]:
    """Returns what the flag `--env` names, as the field `env` of a config has it."""
    return tuple(env) if len(env) > 1 else "".join(env)


def _names(kind: str) -> Any:
    return tyro.conf.arg(metavar=f"{{{','.join(names(kind))}}}|FILE.py:CLASS")


@settings
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
    branching: Annotated[str, _names("branching")] = ""
    """A plug-in of yours that plays the groups of training in another way."""
    compaction: Annotated[str, _names("compaction")] = ""
    """What the policy does with a conversation that outgrows the context."""
    curriculum: Annotated[str, _names("curriculum")] = ""
    """Chooses the options of the environment's `reset` by the results so far."""


@settings
class Run:
    """The options of a command that takes the config of a run."""

    choices: Annotated[tyro.conf.OmitArgPrefixes[Choices], tyro.conf.arg(name="choices")] = field(
        default_factory=Choices
    )
    settings: Annotated[tyro.conf.FlagConversionOff[Config], tyro.conf.arg(name="")] = field(
        default_factory=Config
    )

    @classmethod
    def saved(
        cls, folder: str, flags: Mapping[str, Any], env: str | tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the settings of a run to resume.

        Args:
            folder: Folder of the run.
            flags: Settings of the user.
            env: The environment, or several, if the user names one.

        Raises:
            ConfigError: The command resumes no run.
        """
        raise ConfigError(f"--resume is {folder!r}; expected it with `train` only")

    @classmethod
    def folder_of(cls, options: Sequence[str]) -> str:
        """Returns the folder whose settings the command starts from; empty by default.

        Args:
            options: The arguments that are options of the command itself.
        """
        return ""

    @classmethod
    def take(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Takes the command's own table out of a file's tree; returns its options."""
        return {}

    @property
    def resolved(self) -> Config:
        """The config of the run."""
        return self.settings


def prepare(command: type[Run], arguments: Sequence[str]) -> tuple[Run, list[str]]:
    """Reads the config of a run.

    Returns:
        The command with its config, and the arguments that are options of the command itself.

    Raises:
        ConfigError: The file, a choice, a flag or its value is unknown or invalid.
    """
    flags, options = _split(command, arguments)
    if flags.get("env") == []:
        raise ConfigError("--env has no value")
    env = one_or_several(flags.pop("env", []))
    env_kwargs = dict(map(pair, flags.pop("env_kwargs", [])))
    sources = ("config", "resume", "model")
    choices = {n: _text(n, flags.pop(n)) for n in (*sources, *BUILTIN) if n in flags}
    file, resume, model = (choices.pop(name, "") for name in sources)
    for kind in BUILTIN & choices.keys():  # before the file, which is not to blame for a flag
        find(kind, choices[kind])
    folder = resume or command.folder_of(options)
    if file and folder:
        raise ConfigError("--config and the folder of a run are given; expected one of them")
    named = {name: value for name, value in (("env", env), ("model", model)) if value}

    def read(tree: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
        table = command.take(tree)
        return _base(tree | named, choices, env_kwargs, flags), table

    if folder:
        tree = command.saved(folder, choices | {"env_kwargs": env_kwargs, "model": model}, env)
        config, table = from_dict(tree | named), {"resume": resume} if resume else {}
    elif file:
        config, table = _read_file(file, read)
    else:
        config, table = read({})
    env_kwargs = add_kwargs(config.env_kwargs, env_kwargs, config.env)
    config = override(config, {"env_kwargs": env_kwargs, **choices})
    config = _with_score_of_file(config, file, "advantage" in choices, env)
    paths = {resolve(config, flag): texts for flag, texts in flags.items()}
    if "--help" in options and (group := options[-1]) not in ("--help", "all"):
        from gspo_env.cli.help import print_options

        print_options(command.__name__.lower(), config, group)
    config = override(config, nested({p: _value(config, p, t) for p, t in paths.items()}))
    shown = {kind: name_of(kind, getattr(config, kind)) for kind in BUILTIN}
    return command(choices=Choices(config=file, **shown), settings=config, **table), options


def _read_file(file: str, read: Callable[[dict[str, Any]], T]) -> T:
    """Reads a config file; the error lists all of its faults."""
    from gspo_env.given_file import read_given

    tree = read_toml(file, functools.partial(read_given, max_bytes=_MOST_BYTES))
    try:
        return read(tree)
    except ConfigError as error:
        if len(faults := error.args) == 1:
            raise ConfigError(f"{file}: {error}") from None
        listed = "".join(f"\n  {fault}" for fault in faults[:_MOST_FAULTS])
        raise ConfigError(f"{file} has {len(faults)} faults:{listed}") from None


def _split(command: type[Run], arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Separates settings of the run, by flag, from the options of the command itself."""
    own_names = {f.name for f in dataclasses.fields(command)} - {"resume"} | {"help"}
    flags, options = defaultdict[str, list[str]](list), list[str]()
    values = options
    for argument in arguments:
        flag, equals, value = argument.removeprefix("--").partition("=")
        name = flag.replace("-", "_")
        if not argument.startswith("--"):
            values.append(argument)
        elif name in own_names:
            options.append(argument)
            values = options
        else:
            if name != "env_kwargs":  # the last one wins; arguments are added
                flags.pop(name, None)
            values = flags[name]
            values += [value] if equals else []
    return flags, options


def _text(name: str, texts: Sequence[str]) -> str:
    if len(texts) != 1:
        values = f"is {' '.join(texts)}; expected one value" if texts else "has no value"
        raise ConfigError(f"--{name.replace('_', '-')} {values}")
    return texts[0]


def _base(
    tree: dict[str, Any],
    choices: Mapping[str, str],
    env_kwargs: Mapping[str, Any],
    flags: Mapping[str, list[str]],
) -> Config:
    """Returns the config of a file and, if the model is a trained folder, of its settings.

    Raises:
        ConfigError: The folder names something that needs a flag.
    """
    if "recipe" in choices:
        tree["recipe"] = choices["recipe"]
    model, flag = tree.get("model"), choices.get("recipe")
    if model and flag and find("recipe", flag).build is not Recipe.build:
        raise ConfigError(
            f"recipe is {flag!r}, which builds a model, and model is {model!r}; expected one of "
            "them, or --recipe imitate, which lets the model imitate demonstrations"
        )
    if not isinstance(model, str) or not model:
        return from_dict(tree)
    from gspo_env.cli.trained import config_of_model

    return config_of_model(tree, choices, env_kwargs, flags)


def read_options(name: str, command: T, arguments: Sequence[str]) -> T:
    """Sets the options of a command.

    Args:
        name: Its name.
        command: It, with the default of each option.
        arguments: Flags with their values, and the words that need no flag.

    Raises:
        ConfigError: An option is unknown or its value is invalid.
    """
    defaults = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}  # type: ignore[arg-type]
    marks = {option: get_args(type_hints(type(command))[option]) for option in defaults}  # type: ignore[arg-type]
    place = next((option for option in marks if tyro.conf.Positional in marks[option]), "")
    several = {option for option, value in defaults.items() if isinstance(value, tuple | dict)}
    texts = defaultdict[str, list[str]](list)
    words = deque(arguments)
    while words:
        flag, equals, value = (word := words.popleft()).partition("=")
        option = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        default = defaults.get(option.removeprefix("no_"))
        if not word.startswith("-") and (place in several or (place and place not in texts)):
            texts[place].append(word)
        elif isinstance(default, bool) and (option in defaults or not equals):
            off = ["false"] * (option not in defaults)
            texts[option.removeprefix("no_")] = [value] if equals else off
        elif option in defaults and option != place and tyro.conf.Suppress not in marks[option]:
            # a flag that is repeated for more leaves the word behind its value to the place
            repeated = place and tyro.conf.UseAppendAction in marks[option]
            more = option in several and not repeated
            values = [value] if equals else _take(words, several=more)
            texts[option] = (texts[option] if option in several else []) + values
        else:
            raise ConfigError(_unknown(name, word, place, defaults))
    changes = {option: _value(command, option, words) for option, words in texts.items()}
    return dataclasses.replace(command, **changes)  # type: ignore[type-var]


def _take(words: deque[str], *, several: bool) -> list[str]:
    """Removes the values of a flag from the words behind it."""
    values: list[str] = []
    while words and not words[0].startswith("--") and (several or not values):
        values.append(words.popleft())
    return values


def _unknown(name: str, word: str, place: str, options: Iterable[str]) -> str:
    """Returns the sentence about a word that is neither an option nor the value of one."""
    flags = [f"--{option.replace('_', '-')}" for option in options]
    flag = word.partition("=")[0]
    near = difflib.get_close_matches(flag, flags, n=1)
    hint = f"perhaps you mean {near[0]}" if near else f"`gspo-env {name} --help` lists all"
    if flag == f"--{place}":
        hint = f"expected `gspo-env {name} {place.upper()}`"
    if word.startswith("-"):
        return f"there is no option {word}; {hint}"
    hint = f"expected `gspo-env envs --check {word}`" if name == "envs" else hint
    return f"{word!r} belongs to no option; {hint}"


def _value(settings: Any, path: str, texts: list[str]) -> Any:
    """Converts the values of a flag to the type of its setting."""
    *sections, name = path.split(".")
    section = functools.reduce(getattr, sections, settings)
    hint, default = type_hints(section.__class__)[name], getattr(section, name)
    if isinstance(default, bool) and not texts:
        return True
    if isinstance(default, dict):
        return dict(map(pair, texts))
    flag = f"--{path.replace('_', '-')}"
    value: Any = texts if isinstance(default, tuple) else _text(path, texts)
    try:
        return convert(flag, list(map(literal, texts)) if value is texts else literal(value), hint)
    except ConfigError:
        with contextlib.suppress(ConfigError):
            return convert(flag, value, hint)  # a text that reads like a number
        raise


def _with_score_of_file(
    config: Config, file: str, is_estimator_chosen: bool, env: str | tuple[str, ...]
) -> Config:
    """Returns the config with the score of the file or the folder, where it still applies.

    A run writes the score that its episodes decided into its file, so the user may not know of it.
    """
    score = config.credit.score
    if score == "auto":
        return config
    if is_estimator_chosen and not config.advantage.uses_score:
        return override(config, {"credit": {"score": "auto"}})
    if file and env:
        logger.warning(
            "credit.score is %r, as in %s; --score auto takes that of %s",
            *(score, file, format_env(env)),
        )
    return config
