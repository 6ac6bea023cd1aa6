"""How busy the machine is: processors, memory and GPUs, under MLflow's names of system metrics."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, Self

import psutil

_INTERVAL = 5.0
"""Seconds between two readings."""

Reading = dict[str, float]


class SystemMetrics:
    """Reads the machine in a thread; `take` returns the means since the last call."""

    def __init__(self, interval: float = _INTERVAL) -> None:
        """Reads nothing yet; see `__enter__`."""
        self._readings: defaultdict[str, list[float]] = defaultdict(list)
        self._last: Reading = {}
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._interval, self._read = interval, reader()
        self._thread = threading.Thread(target=self._work, name="gspo-system", daemon=True)

    def __enter__(self) -> Self:
        """Begins to read."""
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stops."""
        self._stopped.set()

    def take(self) -> Reading:
        """Returns the mean of each metric since the last call, or the last one that is known."""
        with self._lock:
            readings, self._readings = self._readings, defaultdict(list)
        if readings:
            self._last = {name: sum(values) / len(values) for name, values in readings.items()}
        return self._last or self._read()

    def _work(self) -> None:
        while not self._stopped.wait(self._interval):
            reading = self._read()
            with self._lock:
                for name, value in reading.items():
                    self._readings[name].append(value)


def reader() -> Callable[[], Reading]:
    """Returns a function that reads the machine; its first call begins to count the processors."""
    process = psutil.Process()
    psutil.cpu_percent()

    def read() -> Reading:
        memory = psutil.virtual_memory()
        return {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / 1e6,
            "system/system_memory_usage_percentage": memory.percent,
            "system/process_memory_megabytes": process.memory_info().rss / 1e6,
            **_read_gpus(),
        }

    return read


def memory() -> str:
    """Returns the memory of this process and of the GPUs, for people.

    Example:
        >>> memory()  # doctest: +SKIP
        '1.2 GB, GPU 12 of 141 GB'
    """
    size = psutil.Process().memory_info().rss
    used = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
    reading = _read_gpus()
    sizes = [v for name, v in reading.items() if name.endswith("_memory_usage_megabytes")]
    shares = [v for name, v in reading.items() if name.endswith("_memory_usage_percentage")]
    if not sizes or not all(shares):
        return used
    total = sum(100 * size / share for size, share in zip(sizes, shares, strict=True))
    return f"{used}, GPU {sum(sizes) / 1e3:.0f} of {total / 1e3:.0f} GB"


def _read_gpus() -> Reading:
    return _gpus()()


@cache
def _gpus() -> Callable[[], Reading]:
    """Returns a function that reads the GPUs, with NVIDIA's library if that is installed."""
    try:
        pynvml: Any = import_module("pynvml")
        pynvml.nvmlInit()
        handles = list(map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())))
    except Exception:  # the library is not installed, or finds no driver and no GPU
        return _torch_gpus

    def read() -> Reading:
        found: Reading = {}
        for i, handle in enumerate(handles):
            name = f"system/gpu_{i}"
            with suppress(pynvml.NVMLError):  # one that a GPU does not have
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found[f"{name}_memory_usage_megabytes"] = memory.used / 1e6
                found[f"{name}_memory_usage_percentage"] = 100 * memory.used / memory.total
            with suppress(pynvml.NVMLError):
                rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
                found[f"{name}_utilization_percentage"] = float(rates.gpu)
            with suppress(pynvml.NVMLError):
                found[f"{name}_power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        return found

    return read


def _torch_gpus() -> Reading:
    """Reads the memory of the GPUs that this process uses."""
    torch: Any = sys.modules.get("torch")
    found: Reading = {}
    if torch is None or not torch.cuda.is_initialized():
        return found
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        found[f"system/gpu_{i}_memory_usage_megabytes"] = (total - free) / 1e6
        found[f"system/gpu_{i}_memory_usage_percentage"] = 100 * (total - free) / total
    return found
