"""Chooses the number of CPU threads for a model."""

from __future__ import annotations

import os
from typing import Any

import torch

SMALL = 5_000_000
"""Parameters below which one thread is used: where two gain less than a tenth, see
`benchmarks/threads.py`."""


def use_threads(model: Any) -> int:
    """Lets torch compute a small model with one thread; returns the number of threads.

    The user's own `OMP_NUM_THREADS` is left as it is, and so is torch's number for larger models.
    """
    small = sum(p.numel() for p in model.parameters()) < SMALL
    if small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.get_num_threads()
