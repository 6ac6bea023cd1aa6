"""Operations of a decode step, in C, compiled at the start by the machine's own compiler.

Between the products of a decode step with a few sequences, thousands of operations of PyTorch each
take longer to call than to compute, one after another. Here, a norm, a rotation, an activation and
a layer's attention are one call each, and the keys that sequences have in common are read from the
processor's cache. Axis letters as in `gspo_env.engines.embedded.kv_attention`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.engines.embedded.direct import Fused, Linear, has_avx512
from gspo_env.model.attention import KEYS, is_half
from gspo_env.types import IntArray

logger = logging.getLogger(__name__)

_FLAGS = "-O3 -march=native -ffp-contract=off -fopenmp -shared -fPIC"
_SECONDS = 60
_ARGUMENTS = {
    "attend": [c_void_p] * 8 + [c_int] * 4 + [c_long] * 2 + [c_float, c_long, c_int, c_int],
    "norm": [c_void_p] * 3 + [c_long, c_int, c_float, c_int, c_int],
    "rotate": [c_void_p] * 4 + [c_long, c_int, c_int, c_int, c_float, c_int, c_int],
    "gated": [c_void_p] * 2 + [c_long, c_int, c_int],
}


def start_compiled(config: Any, *sizes: Any) -> Compiled | None:
    """Returns the operations, or None where they cannot be compiled, which is logged.

    Args:
        config: That of the model, whose sizes may not fit.
        sizes: The arguments of `Fused`.
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head % 32 or config.hidden_size % 16 or config.intermediate_size % 16:
        return None
    library = _library(_compiler())
    if isinstance(library, str):
        logger.info("decoding calls operations of PyTorch: %s", library)
        return None
    return Compiled(library, *sizes)


def describe() -> str:
    """Returns what computes the operations of a decode step, for `gspo-env doctor`."""
    if not has_avx512():
        return "by PyTorch, since this processor has no AVX-512"
    library = _library(_compiler())
    if isinstance(library, str):
        return f"by PyTorch; a C compiler would make real models faster, but {library}"
    return f"compiled by {_compiler()}"


def _compiler() -> str:
    return os.environ.get("CC") or "cc"


@cache
def _library(compiler: str) -> Any:
    """Returns the compiled functions, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "compiled.so"))
        source = str(Path(__file__).with_suffix(".c"))
        try:
            command = [*shlex.split(compiler), *_FLAGS.split(), source, "-o", path, "-lm"]
            subprocess.run(
                command, check=True, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
            )
            library = ctypes.CDLL(path)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            output = (getattr(error, "stderr", None) or b"").decode(errors="replace")
            return f"{compiler} fails: {next(iter(output.splitlines()), error)}"
    for name, types in _ARGUMENTS.items():
        getattr(library, name).argtypes = types
    return library


class Compiled(Fused):
    """Products of oneDNN, and compiled operations between them.

    Args:
        library: The compiled functions.
        sizes: The arguments of `Fused`.
    """

    def __init__(self, library: Any, *sizes: Any) -> None:
        super().__init__(*sizes)
        self._library = library

    def gated(self, gate_up: list[Linear], x: Tensor) -> Tensor:
        """See `_Products`."""
        if len(gate_up) == 2:
            return super().gated(gate_up, x)
        product = self.plain(gate_up[0], x)
        rows, size = len(product), product.shape[1] // 2
        out = product.new_empty(rows, size)
        self._library.gated(product.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `_Products`."""
        out = torch.empty_like(x)
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._library.norm(*pointers, *x.shape, eps, is_half(x), torch.get_num_threads())
        return out

    def rotated(
        self, x: Tensor, heads: int, weight: Tensor | None, angles: tuple[Tensor, ...], eps: float
    ) -> Tensor:
        """See `_Products`."""
        pointers = [part.data_ptr() for part in (x, *angles)]
        pointers.append(0 if weight is None else weight.data_ptr())
        rows, every, size = x.shape
        settings = eps, is_half(x), torch.get_num_threads()
        self._library.rotate(*pointers, rows, heads, every, size, *settings)
        return x[:, :heads]

    def rows(self, *args: Any) -> CompiledRows:
        """See `DirectForward.rows`."""
        return CompiledRows(self._library, *args)


class CompiledRows:
    """Those rows of one step that have one token.

    Args:
        library: The compiled functions.
        families: (B,) of each row, the family that it begins like and for how many tokens; rows
            after the last have none.
        slot_B: (B,) the slots of all rows.
        start_B: (B,) how many tokens each sequence has before these.
        first_B: (B,) the place of each row's first token in the step.
        single_B: (B,) which rows have one token.
    """

    new: tuple[Tensor, Tensor] | None = None
    """(T, Hkv, D) the keys and values of the step, if they are not in the cache yet."""

    def __init__(
        self,
        library: Any,
        families: Sequence[tuple[int, int] | None],
        slot_B: IntArray,
        start_B: IntArray,
        first_B: IntArray,
        single_B: Any,
    ) -> None:
        anchor_B, common_B = slot_B.copy(), np.zeros_like(slot_B)
        anchors: dict[tuple[int, int], int] = {}
        for row, family in enumerate(families):
            if family is not None and single_B[row]:
                anchor_B[row] = anchors.setdefault(family, slot_B[row])
                common_B[row] = family[1] // KEYS * KEYS
        self._library = library
        self.tokens = first_B[single_B]
        self.total = len(self.tokens)
        self.places_in_output = np.arange(self.total)
        columns = [x[single_B] for x in (first_B, slot_B, start_B, anchor_B, common_B)]
        table = np.stack([self.places_in_output, *columns], 1)
        self.arrays = [table[np.argsort(table[:, 4], kind="stable")]]

    def place(self, table: Tensor) -> None:
        """Takes the array back, as a tensor."""
        self._table = table

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Returns the outputs of the rows, (B, H, D); see `Queries.attend`."""
        shared, capacity, size = keys.shape[1:]
        out = query.new_empty(self.total, *query.shape[1:])
        new = self.new or ()
        strides = (c_long * 3)(query.stride(0), *(x.stride(0) for x in new))
        fresh = [x.data_ptr() for x in new] or [0, 0]
        tensors = [x.data_ptr() for x in (keys, values, out, self._table)]
        sizes = self.total, shared, query.shape[1] // shared, size, capacity, values.shape[2]
        settings = scale, window or 0, is_half(values), torch.get_num_threads()
        if self._library.attend(query.data_ptr(), *fresh, strides, *tensors, *sizes, *settings):
            raise MemoryError("attention found no memory")
        return out
