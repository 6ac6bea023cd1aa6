"""Copies index arrays to the device that computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 8
"""Bytes of the widest dtype; each array of an upload starts at a multiple of them."""


def upload(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device | str) -> list[Tensor]:
    """Returns the arrays as tensors on a device; those for a CPU share the arrays' memory.

    A GPU gets all of them in one copy from pinned memory, for which the host does not wait.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return list(map(torch.from_numpy, arrays))
    if kind != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = np.cumsum([0, *sizes]).tolist()
    host = np.zeros(starts[-1], dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat = torch.from_numpy(host).pin_memory().to(device, non_blocking=True)
    return [
        flat[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]
