"""Reads folders of tasks in the format of Harbor, and prepares what their episodes begin with."""

from __future__ import annotations

import functools
import io
import math
import os
import re
import shlex
import tarfile
import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo_env.errors import ConfigError, raised_as
from gspo_env.sandbox import Sandbox
from gspo_env.sandbox.session import SandboxSession, pack

TESTS, LOGS, SOLUTION = "/tests", "/logs", "/solution"
_SIZES = {"": 1, "M": 1, "G": 1024}
_LONGEST = 1 << 20
"""Bytes of an instruction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborTask:
    """One folder with `task.toml`, `instruction.md`, `environment/` and `tests/test.sh`."""

    folder: Path
    instruction: str
    seconds: float
    """Time of all commands of an episode."""
    test_seconds: float
    build_seconds: float
    memory_mib: int
    disk_mib: int
    cpus: float
    image: str
    """A ready image, in place of `environment/Dockerfile`; or empty."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def solution(self) -> str | None:
        """The text of `solution/solve.sh`; None without one."""
        file = self.folder / "solution" / "solve.sh"
        return file.read_text(encoding="utf-8") if file.is_file() else None


def read_tasks(folder: str | os.PathLike[str], exclude: Sequence[str] = ()) -> list[HarborTask]:
    """Returns the tasks of a folder, or the one that it is, in the order of their names.

    Raises:
        ConfigError: There is none, or one is incomplete.
    """
    root = Path(folder)
    places = [root] if (root / "task.toml").is_file() else sorted(root.glob("*/"))
    places = [p for p in places if (p / "task.toml").is_file() and p.name not in exclude]
    if not places:
        raise ConfigError(
            f"Harbor: folder is {str(folder)!r}, expected one with tasks: NAME/task.toml, "
            "NAME/instruction.md, NAME/environment/Dockerfile, NAME/tests/test.sh"
        )
    return [_read_task(place) for place in places]


def _read_task(folder: Path) -> HarborTask:
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ConfigError(f"Harbor: the task {folder.name!r} has no {name}.")
    files = ("task.toml", "instruction.md", "solution/solve.sh", "tests/test.sh")
    for name in (*files, "environment/Dockerfile"):
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"Harbor: {name} of {folder.name!r} links to a file outside of it.")
    if (folder / "instruction.md").stat().st_size > _LONGEST:
        raise ConfigError(f"Harbor: instruction.md of {folder.name!r} is larger than 1 MiB.")
    # TOML errors are ValueErrors
    faults = (ValueError, TypeError, AttributeError)
    with raised_as(ConfigError, f"Harbor: task.toml of {folder.name!r}", *faults):
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        environment, verifier = config.get("environment", {}), config.get("verifier", {})
        if verifier.get("env") or environment.get("env"):
            raise ValueError("it asks for variables of this machine (env), which are never passed")
        image = str(environment.get("docker_image") or "")
        if not image and not (folder / "environment" / "Dockerfile").is_file():
            raise ValueError("it has neither environment/Dockerfile nor environment.docker_image")
        memory = _mib(environment, "memory", 2048)
        return HarborTask(
            folder=folder,
            instruction=(folder / "instruction.md").read_text(encoding="utf-8"),
            seconds=_seconds(config.get("agent", {}), "timeout_sec"),
            test_seconds=_seconds(verifier, "timeout_sec"),
            build_seconds=_seconds(environment, "build_timeout_sec"),
            memory_mib=memory,
            disk_mib=min(memory, _mib(environment, "storage", 10240)),
            cpus=float(environment.get("cpus") or 1),
            image=image,
        )


def _seconds(table: Mapping[str, Any], name: str) -> float:
    if not 0 < (seconds := float(table.get(name, 600.0))) < math.inf:
        raise ValueError(f"{name} is {seconds}, expected a finite number above 0")
    return seconds


def _mib(environment: Mapping[str, Any], name: str, default: int) -> int:
    """Reads `memory_mb = 512`, or `memory = "2G"` of older tasks."""
    if (number := environment.get(f"{name}_mb")) is not None:
        return int(number)
    match = re.fullmatch(r"(\d+)([MG]?)B?", str(environment.get(name, default)).upper())
    if match is None:
        raise ValueError(f"{name} is {environment[name]!r}, expected such as '512M' or '2G'")
    return int(match[1]) * _SIZES[match[2]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the sandbox of a task begins with."""

    box: Any
    """`Sandbox` or `Containers`."""
    folder: str
    """The folder in which commands begin."""
    files: Mapping[str, bytes]
    """Archives of what is in the writable folders."""
    variables: Mapping[str, str]

    def open(self) -> SandboxSession:
        """Starts a sandbox with the files of the task."""
        session: SandboxSession = self.box.open((*self.files, TESTS, LOGS, SOLUTION))
        try:
            for folder, archive in self.files.items():
                session.put(folder, archive)
        except BaseException:
            session.stop()
            raise
        return session


_BUILDING = threading.Lock()


@functools.lru_cache(maxsize=4096)
def prepare(
    task: HarborTask, program: str, writable: tuple[str, ...], limits: tuple[tuple[str, Any], ...]
) -> Place:
    """Builds the image of a task, or reads its Dockerfile for the jail.

    Raises:
        ConfigError: The Dockerfile does what the jail can't, or a limit is unknown.
        SandboxUnavailableError: The image can't be had.
    """
    if program == "jail":
        return _prepare_jail(task, writable, dict(limits))
    from gspo_env.sandbox.containers import build, image_files, image_folder, read_containers

    folder = task.folder / "environment"
    with _BUILDING:
        image = task.image or build(program, folder, task.name, task.build_seconds)
    settings = {"memory_mib": task.memory_mib, "disk_mib": task.disk_mib, "cpus": task.cpus}
    value = {**settings, **dict(limits), "program": program, "image": image}
    box = read_containers(value, "Harbor: limits")
    box.check("bash", "base64", "head", "tail", "tar", "wc")
    start = image_folder(program, image)
    start = "/app" if start == "/" else start
    files = {path: image_files(program, image, path) for path in (start, *writable)}
    return Place(box=box, folder=start, files=files, variables={})


def _prepare_jail(task: HarborTask, writable: tuple[str, ...], limits: Mapping[str, Any]) -> Place:
    """Reads a Dockerfile that only copies files."""
    start, variables = "/app", dict[str, str]()
    root = task.folder / "environment"
    buffer = io.BytesIO()
    text = (root / "Dockerfile").read_text(encoding="utf-8") if not task.image else ""
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for line in re.sub(r"\\\n", " ", text).splitlines():
            word, _, rest = line.strip().partition(" ")
            if not word or word.startswith("#"):
                continue
            match word.upper():
                case "FROM" | "LABEL" | "CMD" | "ENTRYPOINT" | "EXPOSE":
                    pass
                case "WORKDIR" if not archive.getmembers():
                    start = rest.strip()
                case "ENV" if "=" in rest:
                    variables |= dict(part.split("=", 1) for part in shlex.split(rest))
                case "COPY" if _copy(archive, root, start, shlex.split(rest)):
                    pass
                case _:
                    raise ConfigError(
                        f"Harbor: the Dockerfile of {task.name!r} has {line.strip()!r}, which the "
                        'jail does not do; expected sandbox="podman" or "docker"'
                    )
    box = replace(JAIL, **{"disk_mib": min(task.disk_mib, JAIL.disk_mib), **limits})
    box.check_commands()
    files = {start: buffer.getvalue(), **dict.fromkeys(writable, pack_nothing())}
    return Place(box=box, folder=start, files=files, variables=variables)


JAIL = Sandbox(
    cpu_seconds=600, memory_mib=1024, processes=64, disk_mib=64, file_mib=32, output_kib=256
)
"""Limits of the jail."""


def pack_nothing() -> bytes:
    """Returns an empty archive."""
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w").close()
    return buffer.getvalue()


def _copy(archive: tarfile.TarFile, root: Path, start: str, words: list[str]) -> bool:
    """Adds what `COPY` names; returns whether it copies into the working folder."""
    if len(words) < 2 or any(word.startswith("--") for word in words):
        return False
    target = os.path.relpath(os.path.join(start, words[-1]), start)
    if target.startswith(".."):
        return False
    into_folder = target == "." or words[-1].endswith("/")
    for word in words[:-1]:
        source = root / word
        if not source.resolve().is_relative_to(root.resolve()) or not source.exists():
            return False
        paths = sorted(source.iterdir()) if source.is_dir() else [source]
        for path in paths:
            inner = os.path.join(target, path.name) if source.is_dir() or into_folder else target
            archive.add(path, arcname=os.path.normpath(inner))
    return True


def archive_of(folder: Path) -> bytes:
    """Returns a folder of a task as an archive; an empty one without it."""
    return pack(folder) if folder.is_dir() else pack_nothing()
