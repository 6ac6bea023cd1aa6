"""The number of threads that computes a model fastest, by a measurement of less than a second.

Two threads wait for each other at the end of each operation. If another program uses one of their
processors, all operations become as slow as its time slices, which can cost a factor of twenty.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_ROUNDS, _SECONDS = 3, 0.08
"""Measurements of each number of threads, in turn, and the time of each."""
_LAYERS, _ROWS = 16, 8
_GAIN = 0.9
"""More threads have to take less than this share of the time."""


def measure(model: Any) -> dict[int, float]:
    """Returns the milliseconds of a pass through a few layers by the number of threads."""
    before = most = torch.get_num_threads()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)][:_LAYERS]
    inputs = [torch.zeros(_ROWS, m.in_features, dtype=m.weight.dtype) for m in linear]
    counts = sorted({1, max(1, most // 2), most})
    seconds, passes = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0)
    try:
        with torch.inference_mode():
            for count in counts * _ROUNDS:
                torch.set_num_threads(count)
                began = time.perf_counter()
                while time.perf_counter() - began < _SECONDS:
                    for layer, rows in zip(linear, inputs, strict=True):
                        functional.linear(rows, layer.weight)
                    passes[count] += 1
                seconds[count] += time.perf_counter() - began
    finally:
        torch.set_num_threads(before)
    return {count: 1e3 * seconds[count] / passes[count] for count in counts}


def best(milliseconds: Mapping[int, float]) -> int:
    """Returns the number of threads to take: the least, unless more are clearly faster.

    Example:
        >>> best({1: 10.0, 2: 6.0}), best({1: 10.0, 2: 9.5}), best({1: 2.0, 2: 40.0})
        (2, 1, 1)
    """
    count, *others = sorted(milliseconds)
    for more in others:
        if milliseconds[more] < _GAIN * milliseconds[count]:
            count = more
    return count


def choose(model: Any) -> int:
    """Returns the number of threads for a model that is not small; torch's own on a GPU."""
    if next(model.parameters()).device.type != "cpu" or torch.get_num_threads() == 1:
        return torch.get_num_threads()
    return best(measure(model))


def describe() -> str:
    """Returns which number of threads is fastest on this machine now, for `gspo-env doctor`."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    milliseconds = measure(layers)
    count, most = best(milliseconds), max(milliseconds)
    shown = ", ".join(f"{n}: {value:.3g} ms" for n, value in milliseconds.items())
    if "OMP_NUM_THREADS" in os.environ:
        return f"OMP_NUM_THREADS is {os.environ['OMP_NUM_THREADS']} (time by threads {shown})"
    if count == most:
        return f"{count} (time by threads {shown})"
    factor = milliseconds[most] / milliseconds[count]
    return (
        f"{count} of {most} is fastest now, {most} take {factor:.2g} times as long ({shown}): "
        "other programs use the processors. A run measures this and takes the fastest"
    )
