"""Settings of the process that make a model on a CPU faster: threads, and memory that is kept."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch

SMALL = 5_000_000
"""Parameters below which one thread is used, since two gain less than a tenth."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of options of glibc's `mallopt`."""
_KEPT = 1 << 30
"""Bytes of freed memory that a process keeps."""
_LARGEST = 1 << 25
"""Bytes of an allocation that memory is kept for; glibc takes no more."""


def use_threads(model: Any) -> int:
    """Lets torch compute a small model with one thread; returns the number of threads.

    The user's own `OMP_NUM_THREADS` is left as it is. For a larger model, the number that is
    fastest is measured. Call this once, before the first step: sums round in another order with
    another number.
    """
    keep_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        from gspo_env.model.thread_speed import choose

        torch.set_num_threads(1 if is_small(model) else choose(model))
    return torch.get_num_threads()


def is_small(model: Any) -> bool:
    """Returns whether the operations of a model are too short for several threads."""
    return bool(sum(p.numel() for p in model.parameters()) < SMALL)


def tokens_of_pass(model: Any, device: torch.device) -> int:
    """Returns how many tokens a forward and backward pass has at most by default.

    On a CPU, a model that is not small takes as long for each token of a short pass, and a token of
    SmolLM2-135M takes almost 2 MB.
    """
    return 2048 if device.type == "cpu" and not is_small(model) else 16384


def keep_memory() -> None:
    """Lets glibc keep freed memory, so that the next tensors need no pages of the system.

    A tensor of a few hundred kB is a few pages' time to compute, and the system clears each page.
    Larger tensors cannot use it, so call `return_memory` before many of them. Does nothing without
    glibc, or where a variable of the user sets its allocator.
    """
    variables = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if not any(name in os.environ for name in variables):
        _call_glibc("mallopt", _TRIM_THRESHOLD, _KEPT)
        _call_glibc("mallopt", _MMAP_THRESHOLD, _LARGEST)


def return_memory() -> None:
    """Gives freed memory back to the system; does nothing without glibc."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)
