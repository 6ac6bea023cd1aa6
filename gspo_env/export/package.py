"""Writes a package that another library installs."""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import os
import re
import shutil
from pathlib import Path
from typing import Any

from gspo_env.errors import ConfigError, MissingExtraError, OutputError
from gspo_env.export.limits import left_out, look

TRIED = {"trl": "1.16", "verifiers": "0.4", "openenv": "0.10"}
"""The versions that the classes were tried with."""

_TRL = {
    "{package}/__init__.py": """\
\"\"\"{env} for TRL: {name} is the `environment_factory`, `reward` the reward function.\"\"\"

from pathlib import Path

from gspo_env.export.trl import environment_class, reward, rows, seeds

{name} = environment_class({spec}, **{kwargs})

__all__ = ["{name}", "reward", "rows", "seeds"]
""",
}
_VERIFIERS = {
    "{package}/__init__.py": """\
\"\"\"{env} for verifiers: `vf-eval {project}`.\"\"\"

from pathlib import Path

from gspo_env.export.verifiers import EnvHarness, EnvTaskset, SingleEnv

_ENV, _KWARGS = {spec}, {kwargs}


class {name}Taskset(EnvTaskset):
    env, env_kwargs = _ENV, _KWARGS


class {name}Harness(EnvHarness):
    env, env_kwargs = _ENV, _KWARGS


class {name}Env(SingleEnv):
    pass


__all__ = ["{name}Taskset", "{name}Harness", "{name}Env"]
""",
}
_OPENENV = {
    "openenv.yaml": """\
spec_version: 1
name: {package}
version: 0.1.0
type: space
runtime: fastapi
app: server.app:app
port: 8000
validation:
  reward:
    range: [-1.0e15, 1.0e15]
    oracle_tolerance: 0.0
    floor_margin: 0.1
  resources:
    cpu: 1.0
    memory_mb: 2048
    disk_mb: 4096
    episode_timeout_s: 600.0
  capabilities:
    verifier:
      kind: reward_channel
  types:
    tags: [text]
""",
    "__init__.py": """\
\"\"\"{env} for OpenEnv: the client and its records.\"\"\"

from .client import {name}Client
from .models import TextAction, TextObservation

__all__ = ["{name}Client", "TextAction", "TextObservation"]
""",
    "client.py": """\
\"\"\"The client.\"\"\"

from gspo_env.export.openenv import TextEnvClient


class {name}Client(TextEnvClient):
    \"\"\"The client of {env}.\"\"\"
""",
    "models.py": """\
\"\"\"The records.\"\"\"

from gspo_env.export.openenv import TextAction, TextObservation

__all__ = ["TextAction", "TextObservation"]
""",
    "server/__init__.py": '"""The server."""\n',
    "server/app.py": """\
\"\"\"The server: `python -m {package}.server.app --port 8000`.\"\"\"

import argparse
from pathlib import Path

import uvicorn

from gspo_env.export.openenv import environment_class, make_app

app = make_app(environment_class({spec}, **{kwargs}), "{package}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
""",
    "server/Dockerfile": """\
FROM python:3.12-slim
WORKDIR /app/env
COPY . /app/env
RUN pip install --no-cache-dir .
CMD ["python", "-m", "{package}.server.app", "--host", "0.0.0.0", "--port", "8000"]
""",
}
_FILES = {"trl": _TRL, "verifiers": _VERIFIERS, "openenv": _OPENENV}
_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{project}"
version = "0.1.0"
description = "{env} for {peer}, of gspo-env."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["gspo-env", "{needs}"]
{layout}"""
_LAYOUTS = {
    "openenv": """
[project.scripts]
server = "{package}.server.app:main"

[tool.setuptools]
packages = ["{package}", "{package}.server"]
package-dir = {{ "{package}" = ".", "{package}.server" = "server" }}
"""
}
_LAYOUT = """
[tool.setuptools]
packages = ["{package}"]
"""


def write_package(env: str, peer: str, out: str | Path, **env_kwargs: Any) -> list[str]:
    """Writes the package of an environment, and returns what the library cannot carry.

    Args:
        env: A registered id, or `FILE.py:CLASS`; the file becomes a part of the package.
        peer: "trl", "verifiers" or "openenv".
        out: Folder to write, which must not exist or be empty.
        env_kwargs: Arguments of the environment: texts, numbers, and lists and dicts of them.

    Raises:
        ConfigError: The library is unknown, is a version that was not tried, or an argument cannot
            be written.
        MissingExtraError: The library is not installed.
        OutputError: The folder holds something.
    """
    check_version(peer)
    if not _is_literal(env_kwargs):
        raise ConfigError(f"env_kwargs is {env_kwargs!r}; expected texts, numbers, lists and dicts")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} exists already; expected a new or an empty folder")
    lines = left_out(peer, look(env, env_kwargs))
    source, _, name = env.rpartition(":")
    is_file = source.endswith(".py")
    short = (name if source else env.rpartition("/")[2]).rpartition("-v")
    words = re.findall(r"[A-Za-z0-9]+", short[0] or short[2])
    project = "-".join(["gspo", *words]).lower()
    package = project.replace("-", "_")
    fields = {
        "env": name if is_file else env,
        "peer": peer,
        "needs": f"{peer}~={TRIED[peer]}.0",
        "project": project,
        "package": package,
        "name": "".join(word[0].upper() + word[1:] for word in words),
        "kwargs": repr(env_kwargs),
        "spec": repr(env),
    }
    inner = "" if peer == "openenv" else f"{package}/"
    if is_file:
        up = ".parents[1]" if peer == "openenv" else ".parent"
        file = Path(source).name
        fields["spec"] = f"str(Path(__file__).resolve(){up} / {file!r}) + {f':{name}'!r}"
        lines.append(f"files that {file} imports from beside it: copy them into the package")
    if files := _files_in(env_kwargs):
        lines.append(
            f"the files that arguments name ({', '.join(files)}): they are not in the package, and "
            "relative paths are those of its working folder"
        )
    texts = {**_FILES[peer], "pyproject.toml": _PROJECT, "README.md": _README}
    fields["layout"] = _LAYOUTS.get(peer, _LAYOUT).format(**fields)
    fields["lines"] = "\n".join(f"- {line}." for line in lines)
    for place, text in texts.items():
        path = folder / place.format(**fields)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**fields), encoding="utf-8")
    if is_file:
        shutil.copyfile(source, folder / inner / Path(source).name)
    return lines


_README = """\
# {project}

{env} of gspo-env for {peer}: `pip install .`

What {peer} cannot carry, and where it goes:

{lines}
"""


def check_version(peer: str) -> None:
    """Refuses a library of which another version is installed than the classes were tried with.

    Raises:
        ConfigError: It is unknown, or is another version.
        MissingExtraError: It is not installed.
    """
    if peer not in TRIED:
        near = difflib.get_close_matches(peer, TRIED, n=1)
        hint = f"did you mean {near[0]}? There are" if near else "expected one of"
        raise ConfigError(f"to is {peer!r}; {hint}: {', '.join(TRIED)}")
    try:
        version = importlib.metadata.version(peer)
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtraError(
            f"{peer} is not installed: pip install 'gspo-env[{peer}]'"
        ) from None
    if version.split(".")[:2] != TRIED[peer].split("."):
        raise ConfigError(
            f"{peer} {version} is installed, and the export was tried with {TRIED[peer]}; expected "
            f"pip install '{peer}~={TRIED[peer]}.0'"
        )


def _files_in(value: Any) -> list[str]:
    """Returns the texts that name a file, as `rows.jsonl` and `grade.py:reward` do."""
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return list(dict.fromkeys(file for part in parts for file in _files_in(part)))
    places = (value, value.rpartition(":")[0]) if isinstance(value, str) else ()
    return [value] if any(map(os.path.exists, filter(None, places))) else []


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
