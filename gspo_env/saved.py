"""Reads the settings of a folder as data; what needs a flag of the user says `gspo_env.trust`."""

from __future__ import annotations

import copy
import json
import logging
import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gspo_env.config import Config, from_dict
from gspo_env.env.registration import add_kwargs, read_members
from gspo_env.errors import DAMAGE, ConfigError, raised_as
from gspo_env.files import parse_toml, regular_file
from gspo_env.redaction import redact, visible
from gspo_env.registry import BUILTIN
from gspo_env.tracking.base import flatten
from gspo_env.trust import Place, untrusted_settings
from gspo_env.user_state import describe, file_names, texts_of, training_record

logger = logging.getLogger(__name__)

_FILES = ("gspo_env.json", "model/gspo_env.json", "config.toml")
_MAX_BYTES = 2**20
"""Size of a file with settings."""
_MAX_SHOWN = 160
"""Characters of a value that an error shows."""
_LEARNING = ("advantage", "branching", "curriculum", "loss", "recipe", "tracker")
"""Choices that playing does not need."""
_NO_RECORD = "no record says that you trained there with it"
_PARENTS = 3
"""How far a run's folder is above the folders of its models and checkpoints, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustProblem:
    """Why settings that may run code are not known to be the user's own."""

    reason: str
    cwd: str = ""
    """The working folder in which the user trained, if there is a record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedSettings:
    """The settings of a folder, before any of them is used."""

    folder: Path
    tree: dict[str, Any]
    """Settings that run nothing, nested as in a TOML file."""
    untrusted: dict[str, Any]
    """By dotted name, the settings that need a flag of the user."""
    problem: TrustProblem | None = None
    """Why they need one, if there are any."""

    @property
    def env(self) -> str | tuple[str, ...]:
        """The environment, or the several, that was trained on."""
        env = self.untrusted.get("env", self.tree.get("env", Config().env))
        return tuple(map(str, env)) if isinstance(env, list | tuple) else str(env)

    def settings(
        self,
        changes: Mapping[str, Any] = MappingProxyType({}),
        *,
        env: str | tuple[str, ...] = "",
        playing: bool = False,
    ) -> dict[str, Any]:
        """Returns the settings, with those of the user, for `gspo_env.config.from_dict`.

        Args:
            changes: Settings of the user by dotted name, or nested; they replace untrusted ones.
                Arguments of the environment are added to the saved ones, if these are kept.
            env: The environment, or several, if the user names one. Saved arguments and the saved
                score are kept if it is the saved one, or a class of the same name elsewhere.
            playing: Whether nothing is trained, so that estimators, losses, recipes, curricula and
                trackers that are classes of the user are left out.

        Raises:
            ConfigError: An untrusted setting is not among them; the message names the flags to add.
        """
        tree, untrusted = self._with_env(tuple(env) if isinstance(env, list) else env)
        tree = replace_choices(tree, changes)
        untrusted = _without(untrusted, [k for k, v in flatten(changes).items() if v != {}])
        for kind in _LEARNING if playing else ():
            if class_name(saved_name(tree, kind)):  # a trusted one
                del tree[kind]
            if len(rest := _without(untrusted, [kind])) < len(untrusted):
                logger.warning("%s of %s is not loaded", kind, self.folder)
                tree.pop(kind, None)
                untrusted = rest
        if untrusted:
            problem = self.problem or TrustProblem(reason=_NO_RECORD)
            values = ", ".join(f"{name} = {_as_json(value)}" for name, value in untrusted.items())
            flags = " ".join(_flag(k, v, problem.cwd) for k, v in untrusted.items())
            raise ConfigError(
                f"the settings in {str(self.folder)!r} name {values}, which may run code or reach "
                f"files and addresses, and {problem.reason}; if you trust it, add {flags}"
            )
        if kwargs := changes.get("env_kwargs"):
            env = tree.get("env") or env or self.env
            tree["env_kwargs"] = add_kwargs(tree.get("env_kwargs", {}), kwargs, env)
        return tree

    def _with_env(self, env: str | tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the tree and the untrusted settings for the environment of the user, if any."""
        tree, untrusted = dict(self.tree), dict(self.untrusted)
        if not env:
            return tree, untrusted
        untrusted.pop("env", None)
        if env != self.env:
            if _class_names(env) != _class_names(self.env):
                tree.pop("env_kwargs", None)
                untrusted = _without(untrusted, ["env_kwargs"])
            if isinstance(credit := tree.get("credit"), Mapping):
                tree["credit"] = {k: v for k, v in credit.items() if k != "score"}
        return tree | {"env": env}, untrusted


def saved_name(tree: Mapping[str, Any], kind: str) -> str:
    """Returns the name of a saved choice; empty if there is none."""
    value = tree.get(kind)
    return str(value.get("name", "")) if isinstance(value, Mapping) else str(value or "")


def class_name(name: str) -> str:
    """Returns the class that the name of a choice ends with; empty for a name of the registry."""
    return name.rpartition(":")[2] if ":" in name else ""


def replace_choices(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns saved settings with the places where the user says that their classes are now.

    The settings of a class are kept if its name is the same.

    Args:
        tree: The settings.
        changes: Names of choices by kind, among other settings.
    """
    changed = dict(tree)
    for kind in BUILTIN:
        new, old = changes.get(kind), class_name(saved_name(tree, kind))
        if not old or not isinstance(new, str):
            continue
        if class_name(new) != old:
            del changed[kind]
        elif isinstance(tree[kind], Mapping):
            changed[kind] = {**tree[kind], "name": new}
        else:
            changed[kind] = new
    return changed


def find_saved(folder: str | Path) -> Path | None:
    """Returns the file with the settings of a trained folder, or None if it has none."""
    paths = (Path(folder, name) for name in _FILES)
    return next((path for path in paths if path.exists() or path.is_symlink()), None)


def read_saved(folder: str | Path) -> SavedSettings | None:
    """Reads the settings of a run's folder, or of a model in it, as untrusted data.

    Where they say a run reads and writes (`model`, `output`, another tracker) is not taken.

    Args:
        folder: What `GSPOAgent.save` or a training run wrote.

    Returns:
        The settings; None if the folder has none, such as one with a model alone.

    Raises:
        ConfigError: The settings are damaged, too large, or no settings.
    """
    path = find_saved(folder)
    if path is None:
        return None
    saved = read_settings(path)
    left_out = ["model", "output"]
    untrusted = _without(saved.untrusted, ["tracker"])
    if untrusted != saved.untrusted:
        logger.warning("the tracker that %s names is not used", path)
        left_out.append("tracker")
    tree = {name: value for name, value in saved.tree.items() if name not in left_out}
    return SavedSettings(folder=Path(folder), tree=tree, untrusted=untrusted, problem=saved.problem)


def read_settings(path: Path) -> SavedSettings:
    """Reads a file of settings as untrusted data; see `parse`.

    Raises:
        ConfigError: It is damaged, too large, or has no settings.
    """
    name, mend = repr(str(path)), "; expected settings that a training run wrote"
    with (
        raised_as(ConfigError, f"cannot read {name}", OSError, mend=mend),
        raised_as(ConfigError, f"{name} is damaged", *DAMAGE, mend=mend),
    ):
        text = regular_file(path.parent, path.name, _MAX_BYTES, links=True).read_text("utf-8")
        return parse(path, json.loads(text)["config"] if path.suffix == ".json" else text)


def parse(path: Path, text: str) -> SavedSettings:
    """Parses settings as untrusted data.

    Args:
        path: The file that they are from; the record is that of its folder, or of one above it.
        text: The settings as TOML.

    Raises:
        ConfigError: A setting that needs no flag is not valid.
        ValueError: They are not TOML.
    """
    tree = parse_toml(text)
    untrusted = dict(untrusted_settings(tree))
    by_name = {".".join(place): value for place, value in untrusted.items()}
    problem = _find_problem(path.parent, by_name) if by_name else None
    plain = copy.deepcopy(tree)
    for place in untrusted:
        _drop(plain, place)
    with raised_as(ConfigError, f"the settings in {str(path)!r} are not valid", ConfigError):
        from_dict(plain)  # what is trusted is loaded where it is needed
    if problem is None:
        return SavedSettings(folder=path.parent, tree=tree, untrusted={})
    return SavedSettings(folder=path.parent, tree=plain, untrusted=by_name, problem=problem)


def check_model(folder: Path, model: str, named: str = "") -> None:
    """Refuses to load a model that only the folder of a run names; resuming would fetch it.

    Args:
        folder: Folder of the run.
        model: Name or folder of the model; empty if the run has it.
        named: The one that the user names.

    Raises:
        ConfigError: No record says that the user trained it there.
    """
    if model not in ("", named, training_record(folder).get("model")):
        raise ConfigError(
            f"the run {str(folder)!r} begins with the model {_as_json(model)}, and {_NO_RECORD}; "
            f"if you trust it, add {_flag('model', model, '')}"
        )


def _without(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns settings by dotted name without those of some names, and without their parts."""
    ends = tuple(f"{name}." for name in names)
    return {name: value for name, value in settings.items() if not f"{name}.".startswith(ends)}


def _drop(tree: dict[str, Any], place: Place) -> None:
    """Removes a setting; of a choice that is not ours, also its settings."""
    if place[0] in BUILTIN and place[-1] == "name":
        place = place[:1]
    for part in place[:-1]:
        tree = tree[part]
    tree.pop(place[-1], None)


def _class_names(env: str | tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns names of environments and of their classes, wherever these are defined."""
    return [(member.name, member.spec.rpartition(":")[2]) for member in read_members(env)]


def _find_problem(folder: Path, settings: Mapping[str, Any]) -> TrustProblem | None:
    """Returns why settings are not known to be those that the user trained with in a folder."""
    folder = folder.resolve()
    places = (folder, *folder.parents[:_PARENTS])
    records = list(filter(None, map(training_record, places)))
    if not records:  # and no file that an untrusted folder names is opened
        return TrustProblem(reason=_NO_RECORD)
    now = describe(settings)
    texts = [set(file_names(text)) for text in texts_of(settings)]
    only_files = bool(now["files"]) and all(names & now["files"].keys() for names in texts)
    compared = ("settings", "files") if only_files else ("settings", "files", "working folder")
    if any(all(entry.get(key) == now[key] for key in compared) for entry in records):
        return None
    cwd = str(records[0].get("working folder", ""))
    changed = next(key for key in compared if records[0].get(key) != now[key])
    gone = sorted(set(records[0].get("files", ())) - now["files"].keys())
    if changed == "files" and gone:
        reason = f"{', '.join(gone)} cannot be found from here, and you trained in {cwd!r}"
    else:
        reason = f"the {changed} changed since you trained there, in {cwd!r}"
    return TrustProblem(reason=reason, cwd=cwd)


def _flag(name: str, value: Any, cwd: str) -> str:
    """Returns the flag that sets an untrusted setting."""
    section, _, rest = name.partition(".")
    if section == "env_kwargs" and rest:
        return f"--env-kwargs {shlex.quote(f'{rest}={_as_text(value)}')}"
    if name == "env":
        entries = value if isinstance(value, list) else [value]
        value = [_with_path(entry, cwd) for entry in entries]
    values = value if name == "env" else [value]
    if rest == "name":  # of a script or a notebook, which no other program can import
        values = [str(value).replace("__main__:", "FILE.py:")]
    flag = section if rest == "name" else name
    return f"--{flag.replace('_', '-')} {' '.join(shlex.quote(_as_text(v)) for v in values)}"


def _with_path(env: Any, cwd: str) -> Any:
    """Returns an environment with the full path of its file, if that is in another folder."""
    label, equals, spec = str(env).rpartition("=")
    file, _, cls = spec.partition(".py:")
    path = Path(cwd, f"{file}.py")
    moved = cls and cwd not in ("", os.getcwd()) and path.is_file()
    return f"{label}{equals}{path}:{cls}" if moved else env


def _as_json(value: Any) -> str:
    text = visible(json.dumps(redact(value), ensure_ascii=False, default=str))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _as_text(value: Any) -> str:
    """Returns a value as a flag has it, in one line; only a mark for one that is too long."""
    text = visible(str(redact(value))) if isinstance(value, str) else _as_json(value)
    return text.replace("\n", "\\n") if len(text) <= _MAX_SHOWN else "…"
