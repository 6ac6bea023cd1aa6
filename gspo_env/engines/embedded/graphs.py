"""Decode steps on a GPU as CUDA graphs, since launching a step's kernels takes longer than they do.

A graph has fixed shapes: it computes one token for each of the first R slots, those of idle slots
too, and looks at their first L positions. Both are rounded up, so that a rollout needs few graphs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.packing import upload
from gspo_env.engines.embedded.direct import STATIC_ROPE
from gspo_env.engines.embedded.kv_attention import attend_rows, causal_mask
from gspo_env.engines.embedded.kv_cache import KVCache
from gspo_env.errors import first_line

logger = logging.getLogger(__name__)

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose pass waits for nothing; a failed capture would leave a mark on PyTorch."""
_RARE = 2
"""Steps of a shape that run without a graph, which takes as long as several to make."""
_LENGTH = 128
"""Positions that the shortest graph looks at."""


class DecodeGraphs:
    """Runs steps in which each sequence has one new token.

    Args:
        model: The causal LM.
        cache: Its keys and values. It has one slot more than the engine uses: idle slots write
            there.
        slots: How many slots the engine uses.
    """

    def __init__(self, model: Any, cache: KVCache, slots: int) -> None:
        self._model, self._cache, self._slots = model, cache, slots
        self._steps: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None
        self._places: list[int] = []
        self._captures = model.config.model_type in _DENSE
        self.check()

    def forget(self) -> None:
        """Drops the graphs; call it when the cache has moved."""
        self._graphs.clear()
        self._pool = None

    def check(self) -> None:
        """Drops the graphs if the weights have moved, such as after an adapter was added."""
        modules = list(self._model.modules())
        static = all(getattr(m, "rope_type", "default") in STATIC_ROPE for m in modules)
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in modules)
        self._usable = self._captures and static and not hooked  # a graph calls no hook
        places = [parameter.data_ptr() for parameter in self._model.parameters()]
        if places != self._places:
            self.forget()
            self._places = places

    def forward(
        self, slots: Sequence[int], starts: Sequence[int], feeds: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """Returns the logits of each sequence, (B, V), or None if this step has no graph.

        Args:
            slots: (B,) the slots of the sequences.
            starts: (B,) how many tokens each has before.
            feeds: (B,) the new tokens.
        """
        if not self._usable or any(len(feed) != 1 for feed in feeds):
            return None
        rows = min(_rounded(max(slots) + 1, 1), self._slots)
        shape = rows, min(_rounded(max(starts) + 1, _LENGTH), self._cache.capacity)
        self._steps[shape] += 1
        if self._steps[shape] <= _RARE:
            return None
        slot_B = np.asarray(slots)
        inputs = np.zeros((3, rows), dtype=np.int64)
        inputs[2] = self._slots
        inputs[:, slot_B] = [feed[0] for feed in feeds], starts, slots
        moved, index = upload([inputs, slot_B], self._cache.device)
        try:
            if shape not in self._graphs:
                self._graphs[shape] = graph = _Graph(self._model, self._cache, *shape)
                self._pool = graph.capture(self._pool)
            logits = self._graphs[shape].run(moved)
        except (RuntimeError, TypeError) as error:  # such as a module that copies to the host
            logger.info("decode steps run without CUDA graphs: %s", first_line(error))
            self._usable = self._captures = False
            self.forget()
            return None
        return logits.index_select(0, index)


class _Graph:
    """One decode step of the first R slots, which is also its `Ragged` attention."""

    def __init__(self, model: Any, cache: KVCache, rows: int, length: int) -> None:
        self._model, self._cache, self._rows, self._length = model, cache, rows, length
        self._inputs = torch.zeros(3, rows, dtype=torch.int64, device=cache.device)
        self._masks: dict[int | None, Tensor] = {}

    def capture(self, pool: Any) -> Any:
        """Captures the step; returns its memory pool."""
        self._replay, pool = captured(self._compute, pool)
        return pool

    def run(self, inputs: Tensor) -> Tensor:
        """Returns the logits of all rows, (R, V), for their ids, positions and slots, (3, R)."""
        self._inputs.copy_(inputs)
        return self._replay()

    def _compute(self) -> Tensor:
        self._masks.clear()
        ids, positions, _ = self._inputs
        output = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, ragged=self
        )
        logits: Tensor = output.logits[0]
        return logits

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `Ragged.attend`."""
        _, positions, slots = self._inputs
        tensors = self._cache.layer(layer, k)
        for cached, new in zip(tensors, (k, v), strict=True):
            cached.transpose(1, 2).index_put_((slots, positions), new.to(cached.dtype))
        keys, values = (cached[: self._rows, :, : self._length] for cached in tensors)
        if window not in self._masks:
            mask = causal_mask(positions[:, None], self._length, window)
            self._masks[window] = mask.to(q.dtype)
        return attend_rows(q[:, :, None], keys, values, scale, self._masks[window])[:, :, 0]


def captured(compute: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], Tensor], Any]:
    """Captures a computation as a CUDA graph.

    Returns:
        What runs it again and gives its result, always the same tensor; and the graph's memory,
        which those that never run at the same time share.
    """
    graph = torch.cuda.CUDAGraph()
    # other threads, such as one that updates, may use the GPU meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = compute()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay, graph.pool()


def _rounded(size: int, least: int) -> int:
    """Rounds up to `least` times 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    power = least << (-(-size // least) - 1).bit_length()
    return 3 * power // 4 if power >= 4 * least and 4 * size <= 3 * power else power
