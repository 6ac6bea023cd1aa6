"""Registers environments and makes them by name."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import os
import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from threading import Lock
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, registry
from gymnasium.spaces import Text

from gspo_env.env.base import MAX_OBSERVATION, METHODS, UnicodeText
from gspo_env.errors import (
    ConfigError,
    EnvironmentContractError,
    GspoEnvError,
    UnknownEnvironmentError,
    raised_as,
)
from gspo_env.redaction import TerminalFormatter, find_mark, redact
from gspo_env.registry import load_function, load_module
from gspo_env.runtime.loops import make_synchronous
from gspo_env.runtime.threads import constructing

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "gspo_env.envs"
_BUILTIN = {
    "gspo/Additive-v0": "gspo_envs.diagnostic.diagnostics:AdditiveEnv",
    "gspo/AgentDojo-v0": "gspo_envs.adapters.agentdojo:AgentDojoEnv",
    "gspo/BFCL-v0": "gspo_envs.adapters.bfcl:BFCLEnv",
    "gspo/Calculator-v0": "gspo_envs.text.calculator:CalculatorEnv",
    "gspo/Dataset-v0": "gspo_envs.data.dataset:DatasetEnv",
    "gspo/Dialogue-v0": "gspo_envs.dialogue.env:DialogueEnv",
    "gspo/GuessNumber-v0": "gspo_envs.text.guess_number:GuessNumberEnv",
    "gspo/GymText-v0": "gspo_envs.adapters.gym_text:GymTextEnv",
    "gspo/Harbor-v0": "gspo_envs.harbor.env:HarborEnv",
    "gspo/KeyDoor-v0": "gspo_envs.diagnostic.diagnostics:KeyDoorEnv",
    "gspo/Lookup-v0": "gspo_envs.text.lookup:LookupEnv",
    "gspo/MCP-v0": "gspo_envs.tools.mcp.env:MCPEnv",
    "gspo/OpenEnv-v0": "gspo_envs.adapters.openenv:OpenEnvEnv",
    "gspo/Program-v0": "gspo_envs.program.env:ProgramEnv",
    "gspo/PythonTool-v0": "gspo_envs.tools.python_tool:PythonToolEnv",
    "gspo/ReasoningGym-v0": "gspo_envs.adapters.reasoning_gym:ReasoningGymEnv",
    "gspo/SQL-v0": "gspo_envs.tools.sql:SQLEnv",
    "gspo/ScienceWorld-v0": "gspo_envs.adapters.scienceworld:ScienceWorldEnv",
    "gspo/Story-v0": "gspo_envs.text.story:StoryEnv",
    "gspo/Tau2-v0": "gspo_envs.adapters.tau2:Tau2Env",
    "gspo/TextArena-v0": "gspo_envs.adapters.textarena:TextArenaEnv",
    "gspo/TextWorld-v0": "gspo_envs.adapters.textworld:TextWorldEnv",
    "gspo/TextWorldExpress-v0": "gspo_envs.adapters.textworld_express:TextWorldExpressEnv",
    "gspo/VariableLength-v0": "gspo_envs.diagnostic.diagnostics:VariableLengthEnv",
    "gspo/Verifiers-v0": "gspo_envs.adapters.verifiers:VerifiersEnv",
    "gspo/Wordle-v0": "gspo_envs.text.wordle:WordleEnv",
}
_AGENTS = {
    "frozen": "gspo_agents.frozen:FrozenAgent",
    "gspo": "gspo_agents.gspo:GSPOAgent",
    "scripted": "gspo_agents.scripted:ScriptedAgent",
}
_ENTRY = re.compile(
    r"(?:(?P<name>[\w.-]+)=)?(?P<spec>.+?)(?::(?P<weight>[+-]?(?:\d++\.?\d*+|\.\d+)(?:e[+-]?\d+)?))?",
    re.DOTALL,
)
_NAME = re.compile(r"[\w.-]+")
_RESERVED = ("forks", "option", "reward", "stop")
"""Names of metrics of ours that follow `rollout/` or `eval/`."""
_OURS: dict[str, None] = {}
_REGISTERING = Lock()


def register_builtin() -> None:
    """Registers the environments of this package and of installed plugins."""
    for env_id, entry_point in _BUILTIN.items():
        _OURS[env_id] = None
        if env_id not in registry:
            gymnasium.register(id=env_id, entry_point=entry_point)
    _load_entry_points()


def resolve_env(spec: str | type) -> str:
    """Returns the registered id of an environment specification.

    Args:
        spec: A registered id, `module:id`, `path/to/file.py:ClassName` or `module.path:ClassName`;
            or a class, which gets the id `custom/ClassName-v0` in this process. The class is one of
            environments, or one for TRL's `environment_factory`.

    Raises:
        ConfigError: It is neither text nor the class of an environment.
        UnknownEnvironmentError: Nothing has that name.
    """
    return find_spec(spec).id


def find_spec(spec: str | type) -> EnvSpec:
    """Returns Gymnasium's description of an environment specification; see `resolve_env`.

    Its id may be that of another class of the same name a moment later.
    """
    if env_class := _env_class(spec):
        registered = registry.get(_class_id(env_class))
        before = registered.entry_point if registered else env_class
        old, new = _full_name(before), _full_name(env_class)
        if old != new:  # not the same class, defined again
            logger.warning("%s is now %s, no longer %s", _class_id(env_class), new, old)
        return _register_class(env_class)
    if not isinstance(spec, str):
        raise ConfigError(
            f"env is {reprlib.repr(spec)} of type {type(spec).__name__}; expected an id, "
            "FILE.py:CLASS or a class of environments"
        )
    if registered := registry.get(spec):
        return registered
    source, separator, name = spec.rpartition(":")
    if not separator and spec.endswith(".py"):
        raise UnknownEnvironmentError(f"{spec!r} names no class; expected {spec}:ClassName.")
    if not separator:
        raise UnknownEnvironmentError(f"no environment is named {spec!r}{_near(spec)}")
    if source in registry:
        raise UnknownEnvironmentError(
            f"{name!r} behind {source!r} is not a weight; expected a number above 0, and each of "
            "several environments as an argument of its own"
        )
    what = f"{source!r} of the environment cannot be imported"
    with raised_as(UnknownEnvironmentError, what, ImportError):
        module = load_module(source)
    if name in registry:
        _OURS[name] = None
        return registry[name]
    env_class = _env_class(getattr(module, name, None))
    if env_class is None:
        names = [key for key, value in vars(module).items() if _is_own(value, module.__name__)]
        has = f"it has {', '.join(names)}" if names else "expected a subclass of gspo_env.TextEnv"
        raise UnknownEnvironmentError(f"{source} has no environment {name!r}; {has}.")
    return _register_class(env_class)


def find_builtin(env_id: str) -> str | None:
    """Returns the import string of one of this package's own environments, else None."""
    return _BUILTIN.get(env_id)


def make_env(spec: str | type, **kwargs: Any) -> gymnasium.Env[str, str]:
    """Makes a text environment from a specification; see `resolve_env`.

    Args:
        spec: The specification.
        kwargs: Arguments of the environment. Every environment takes `max_observation`, the maximum
            characters of an observation, in place of that of its `observation_space`.

    Raises:
        UnknownEnvironmentError: Nothing has that name.
        ConfigError: It is not a specification, or the environment does not take the arguments.
        EnvironmentContractError: Its observations or actions are not text.
    """
    env_spec = find_spec(spec)
    env_id = env_spec.id
    if lost := find_mark(kwargs):
        raise ConfigError(
            f"{env_id}: {lost} was redacted when it was saved; expected the value again, or, in a "
            "table env or headers, the name of an environment variable as '${NAME}'."
        )
    longest = _check_longest(kwargs.pop("max_observation", None))
    try:
        with constructing():
            env: gymnasium.Env[Any, Any] = gymnasium.make(
                env_spec, disable_env_checker=True, **kwargs
            )
    except GspoEnvError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{env_id} cannot be made{f' with {redact(kwargs)}' if kwargs else ''}: "
            f"{_reason(error)}{_near_argument(env_id, error)}"
        ) from error
    kind = type(env.unwrapped)
    make_synchronous(kind, METHODS)
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), Text):
            env.close()
            raise EnvironmentContractError(
                f"{env_id}: its {name} is {space}, expected text (UnicodeText), as TextEnv has it."
            )
    if missing := [n for n in ("reset", "step") if getattr(kind, n) is getattr(gymnasium.Env, n)]:
        env.close()
        raise EnvironmentContractError(
            f"{env_id}: {kind.__name__} has no {' and no '.join(missing)}; expected both methods"
        )
    if longest is not None:
        env.unwrapped.observation_space = UnicodeText(longest)
    return env


def _check_longest(value: Any) -> int | None:
    if value is None or (type(value) is int and 1 <= value <= MAX_OBSERVATION):
        return value
    raise ConfigError(
        f"max_observation is {value!r}; expected an integer from 1 to {MAX_OBSERVATION}"
    )


def _reason(error: BaseException) -> str:
    """Describes an error of an environment's own code, with the line that raised it."""
    from gspo_env.runtime.where import line_of

    reason = str(error).split(" was raised from")[0].strip() or "no message"
    if isinstance(error, TypeError) and "__init__()" in reason:
        return reason  # a wrong argument
    if type(error.__cause__) is type(error):
        error = error.__cause__  # Gymnasium raised it again
    return f"{type(error).__name__}: {' '.join(reason.split())} ({line_of(error)})"


def _near_argument(env_id: str, error: BaseException) -> str:
    """Ends the sentence; names arguments if one was given that the environment does not have."""
    match = re.search(r"__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if match is None:
        return "."
    if "Did you mean" in str(error):  # Python 3.13 and later say it
        return ""
    names = list(inspect.signature(load_creator(env_id)).parameters)
    near = difflib.get_close_matches(match[1], names, n=1)
    return f", did you mean {near[0]}?" if near else f", it has {', '.join(names) or 'none'}."


def load_creator(env_id: str) -> Any:
    """Returns what makes a registered environment, such as its class."""
    creator = registry[env_id].entry_point
    return load_env_creator(creator) if isinstance(creator, str) else creator


def load_agent(name: str) -> Any:
    """Returns the class of a built-in agent: `gspo`, `scripted`, or `frozen`, which only plays."""
    hide_progress_bars()
    return load_function(_AGENTS[name], "agent")


def hide_progress_bars() -> None:
    """Switches off the progress bars of libraries, and shows hidden characters in their log."""
    from transformers.utils.logging import disable_progress_bar

    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    for handler in logging.getLogger("transformers").handlers:  # it names tensors of any file
        handler.setFormatter(TerminalFormatter("%(levelname)s %(message)s"))


def listed_envs() -> list[str]:
    """Returns the ids of the environments of this package, of its plugins and of resolved files."""
    return [env_id for env_id in sorted(_OURS) if env_id in registry]


def _is_env_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, gymnasium.Env)


def _env_class(value: object) -> Any:
    """Returns a class of environments, or the one that plays a class for TRL, else None."""
    if _is_env_class(value) or not _is_trl_class(value):
        return value if _is_env_class(value) else None
    return load_function("gspo_envs.adapters.trl:environment_class", "env")(value)


def _is_trl_class(value: object) -> bool:
    return isinstance(value, type) and callable(getattr(value, "reset", None))


def _is_own(value: object, module: str) -> bool:
    """Returns whether a value is an environment's class that the module defines."""
    is_env = _is_env_class(value) or _is_trl_class(value)
    return is_env and getattr(value, "__module__", "") == module


def _load_entry_points() -> None:
    """Calls each plugin's entry point once and lists what it registers."""
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        before = set(registry)
        try:
            entry_point.load()()
        except Exception:  # a broken plugin must not break the import
            logger.exception("entry point %s of %s failed", entry_point.name, ENTRY_POINT_GROUP)
        _OURS.update(dict.fromkeys(set(registry) - before))


def _register_class(env_class: Any) -> EnvSpec:
    env_id = _class_id(env_class)
    with _REGISTERING:
        if env_id in registry and registry[env_id].entry_point is not env_class:
            del registry[env_id]
        if env_id not in registry:
            gymnasium.register(id=env_id, entry_point=env_class)
        _OURS[env_id] = None
        return registry[env_id]


def _class_id(env_class: Any) -> str:
    return f"custom/{env_class.__name__}-v0"


def _full_name(env_class: Any) -> str:
    if isinstance(env_class, type):
        return f"{env_class.__module__}.{env_class.__qualname__}"
    return str(env_class)


def class_of(env_id: str) -> str:
    """Returns the name of the class that has this id; empty if the id is not of that kind."""
    return "".join(re.findall(r"^custom/(\w+)-v0$", env_id))


def _near(spec: str) -> str:
    """Ends the sentence about an unknown id: what it may have meant, or where it may be found."""
    from gspo_env.renamed import ENVIRONMENTS

    if instead := ENVIRONMENTS.get(spec):
        return f": {instead}."
    if name := class_of(spec):
        return (
            f" in this process; expected the file of its class, FILE.py:{name}, or, before it, "
            f"gspo_env.resolve_env({name})."
        )
    ids = {last_part(env_id).lower(): env_id for env_id in registry}
    near = difflib.get_close_matches(last_part(spec).lower(), list(ids), n=3)
    options = " or ".join(ids[name] for name in near)
    hint = f", did you mean {options}?" if near else f", expected one of {', '.join(_OURS)}."
    if spec.startswith("gspo/") or not spec:
        return hint
    return f"{hint} A class is FILE.py:{spec}; MODULE:{spec} imports a module that registers it."


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One of the environments that a run trains on."""

    spec: str
    """See `resolve_env`."""
    name: str = ""
    """Its name in tasks, metrics and arguments; empty if it is the only one."""
    weight: float = 1.0
    """Its share of the training tasks, relative to the weights of the others."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments."""

    @property
    def env_id(self) -> str:
        """The `env_id` of its tasks: the registered id of an only environment, else the name.

        Raises:
            UnknownEnvironmentError: Nothing has the name of the specification.
        """
        registered = resolve_env(self.spec)
        return self.name or registered


def env_setting(env: Any) -> str | tuple[str, ...]:
    """Returns the setting `env` for specifications or classes, which get ids; see `resolve_env`.

    Raises:
        ConfigError: One of them is neither text nor the class of an environment.
    """
    if isinstance(env, (list, tuple)):
        return tuple(one if isinstance(one, str) else resolve_env(one) for one in env)
    return env if isinstance(env, str) else resolve_env(env)


def read_members(
    env: str | Sequence[str], kwargs: Mapping[str, Any] | None = None
) -> tuple[Member, ...]:
    """Returns the environments that the settings `env` and `env_kwargs` of a run name.

    Args:
        env: A specification, or several entries `[NAME=]SPEC[:WEIGHT]`. The name of an entry
            without one is the last part of its specification; its weight is 1.
        kwargs: The arguments; those of each environment by its name if there are several.

    Raises:
        ConfigError: A weight is not above 0, a name is not unique, or arguments have another name.

    Example:
        >>> [(m.name, m.weight) for m in read_members(["gspo/Lookup-v0:0.7", "w=words.py:Words"])]
        [('Lookup-v0', 0.7), ('w', 1.0)]
    """
    kwargs = kwargs or {}
    entries = [env] if isinstance(env, str) else list(env)
    members = [_read_entry(entry) for entry in entries]
    if len(members) == 1:
        return (Member(spec=members[0].spec, kwargs=kwargs),)
    if not members:
        raise ConfigError("env is empty; expected at least one environment")
    names = [member.name for member in members]
    _check_names(names, entries)
    for name, arguments in kwargs.items():
        if name not in names or not isinstance(arguments, Mapping):
            raise ConfigError(
                f"env_kwargs has {name!r}; expected a table for one of {', '.join(names)}, as in "
                f"--env-kwargs {names[0]}.KEY=VALUE"
            )
    return tuple(replace(m, kwargs=kwargs.get(m.name, {})) for m in members)


def _check_names(names: Sequence[str], entries: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"env has two environments {name!r}; expected different names, such as "
                f"a={entries[0]} b={entries[1]}"
            )
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise ConfigError(
                f"env has the name {name!r}; expected letters, digits and '_.-', and none of "
                f"{', '.join(_RESERVED)}: write NAME={name or 'SPEC'}"
            )


def format_env(env: str | Sequence[str]) -> str:
    """Returns the environments of a run in the form of the flag `--env`."""
    return env if isinstance(env, str) else " ".join(env)


def label(env: str | Sequence[str]) -> str:
    """Returns a short name of the environments of a run, such as `Lookup-v0+Wordle-v0`."""
    names = [last_part(m.spec) if not m.name else m.name for m in read_members(env)]
    return "+".join(names) if len(names) <= 3 else f"{names[0]}+{len(names) - 1}"


def add_kwargs(
    old: Mapping[str, Any], new: Mapping[str, Any], env: str | Sequence[str]
) -> dict[str, Any]:
    """Returns arguments with others added, which replace those of the same name.

    Args:
        old: The arguments.
        new: The others; with several environments, `NAME.KEY` is the argument of one of them.
        env: The environments.
    """
    if len(read_members(env)) == 1:
        return {**old, **new}
    merged = dict(old)
    for key, value in new.items():
        name, dot, argument = key.rpartition(".")  # the name of an argument has no dot
        name, value = (name, {argument: value}) if dot else (key, value)
        previous = merged.get(name, {})
        both_are_tables = isinstance(previous, Mapping) and isinstance(value, Mapping)
        merged[name] = {**previous, **value} if both_are_tables else value
    return merged


def last_part(spec: str) -> str:
    """Returns the last part of a specification.

    Example:
        >>> last_part("gspo/Lookup-v0"), last_part("folder/shop.py:Shop")
        ('Lookup-v0', 'Shop')
    """
    return spec.rpartition(":")[2].rpartition("/")[2]


def _read_entry(entry: str) -> Member:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ConfigError(f"env is {entry!r}; expected an id, 'module:id' or 'file.py:Class'")
    weight = float(match["weight"] or 1.0)
    if not 0 < weight < math.inf:
        raise ConfigError(f"env is {entry!r}; expected a weight above 0")
    return Member(spec=match["spec"], name=match["name"] or last_part(match["spec"]), weight=weight)
