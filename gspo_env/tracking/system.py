"""What a run runs on: versions, the commit, and the use of processors, memory and GPUs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import psutil

_INTERVAL = 5.0
"""Seconds between two readings."""


class SystemMetrics:
    """Reads the machine in a thread; `take` returns the means since the last call."""

    def __init__(self) -> None:
        """Reads nothing yet; see `__enter__`."""
        self._readings = defaultdict[str, list[float]](list)
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        """Begins to read."""
        read_machine()  # the use of the processors counts from here on
        self._stopped.clear()
        threading.Thread(target=self._work, name="gspo-system", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stops."""
        self._stopped.set()

    def take(self) -> dict[str, float]:
        """Returns the mean of each metric since the last call, or the present value."""
        with self._lock:
            readings, self._readings = self._readings, defaultdict(list)
        if not readings:
            return read_machine()
        return {name: sum(values) / len(values) for name, values in readings.items()}

    def _work(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            reading = read_machine()
            with self._lock:
                for name, value in reading.items():
                    self._readings[name].append(value)


def read_machine() -> dict[str, float]:
    """Returns the present values; the use of the processors is that since the last call."""
    try:
        memory = psutil.virtual_memory()
        return {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / 1e6,
            "system/system_memory_usage_percentage": memory.percent,
            "system/process_memory_megabytes": psutil.Process().memory_info().rss / 1e6,
            **_read_gpus(),
        }
    except (OSError, psutil.Error):  # no descriptor is free, or the system shows no processes
        return {}


def _read_gpus() -> dict[str, float]:
    """Reads the GPUs of this process; utilization and power need the package nvidia-ml-py."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    metrics: dict[str, float] = {}
    if cuda is None or not cuda.is_initialized():
        return metrics
    for i in range(cuda.device_count()):
        free, total = cuda.mem_get_info(i)
        metrics[f"system/gpu_{i}_memory_usage_megabytes"] = (total - free) / 1e6
        metrics[f"system/gpu_{i}_memory_usage_percentage"] = 100 * (total - free) / total
        with suppress(Exception):  # the package is missing, or the GPU does not measure it
            metrics[f"system/gpu_{i}_utilization_percentage"] = float(cuda.utilization(i))
            metrics[f"system/gpu_{i}_power_usage_watts"] = cuda.power_draw(i) / 1e3
    return metrics


_PACKAGES = ("gspo-env", "torch", "transformers", "vllm", "mlflow", "numpy", "gymnasium", "peft")
_TIMEOUT = 5.0
"""Seconds that git has to answer."""


def versions() -> dict[str, str]:
    """Returns the versions of the packages that influence a run's numbers, as tags."""
    tags = {"version.python": platform.python_version()}
    for name in _PACKAGES:
        try:
            tags[f"version.{name.replace('-', '_')}"] = version(name)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        tags["version.cuda"] = str(torch.version.cuda)
    return tags


def commit(folder: Path | None = None) -> dict[str, str]:
    """Returns the commit of the working tree around a folder, as tags; nothing if there is none.

    Args:
        folder: The working folder by default.
    """
    lines = _git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").splitlines()
    if len(lines) != 2:
        return {}
    sha, branch = lines
    tags = {"git.commit": sha, "git.branch": branch, "mlflow.source.git.commit": sha}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", failed="?")
    if changed != "?":
        tags["git.changed"] = str(bool(changed)).lower()
    return tags


def _git(folder: Path | None, *command: str, failed: str = "") -> str:
    """Returns what git prints, without running programs that the repository configures."""
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        process = subprocess.run(
            ["git", *safe, *command],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return failed
    return process.stdout.strip()
