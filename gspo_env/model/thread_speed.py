"""The number of threads that computes a model fastest now, by a measurement of less than a second.

Two threads wait for each other at the end of each operation. If another program uses one of their
processors, all operations become as slow as its time slices, which can cost a factor of twenty.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gspo_env.model.threads import is_small

logger = logging.getLogger(__name__)

_ROUNDS, _SECONDS = 3, 0.08
"""Measurements of each number of threads, in turn, and the time of each."""
_LAYERS, _ROWS = 16, 8
_GAIN = 0.9
"""More threads have to take less than this share of the time."""
_SLOW = 0.5
"""Share of the best rate from which a slow step may be the fault of the threads."""
_AGAIN = 600.0
"""Seconds after which more threads are tried again."""
_most: list[int] = []
"""The number of threads before the first measurement."""


def measure(model: Any) -> dict[int, float]:
    """Returns the milliseconds of a pass through a few layers by the number of threads."""
    before = torch.get_num_threads()
    most = max([before, *_most])
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
    if not _most:
        _most.append(torch.get_num_threads())
    return best(measure(model))


def watch(model: Any) -> Callable[[float], None]:
    """Returns a function to call after each step with its tokens per second.

    It measures again after a step that was slow, and now and then while fewer threads are used than
    there are. It does nothing for a small model, on a GPU, or where the user has set the number.
    """
    fixed = "OMP_NUM_THREADS" in os.environ or not _most or is_small(model)
    measured, highest = time.monotonic(), 0.0

    def after_step(rate: float) -> None:
        nonlocal measured, highest
        highest, now = max(highest, rate), time.monotonic()
        before = torch.get_num_threads()
        due = before < _most[0] and now - measured >= _AGAIN if not fixed else False
        if fixed or not (rate < _SLOW * highest or due):
            return
        milliseconds = measure(model)
        count, measured = best(milliseconds), now
        if count != before:
            torch.set_num_threads(count)
            logger.warning(
                "%d threads from here on, not %d: they take %.3g ms, not %.3g, for the same layers",
                *(count, before, milliseconds[count], milliseconds.get(before, float("nan"))),
            )

    return after_step


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
