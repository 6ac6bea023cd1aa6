"""The rows of a minibatch on two cores of a CPU.

The operations of a small model are too short for several threads each. So two threads compute
different rows. The second one has a copy of the model's modules, with the same weights and with
gradients of its own, which are added to the model's at the end:

    row 0, 2, ...    this thread       the model
    row 1, 3, ...    another thread    the copy

A process with one core computes the same sums one after another, so the numbers are the same.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import nn

from gspo_env.model.scorer import Scorer
from gspo_env.model.threads import is_small

T = TypeVar("T")
LANES = 2


class Lanes:
    """Computes the rows of a minibatch with a model and with a copy that shares its weights.

    Args:
        model: The model; see `suits`.
        scorer: Makes the scorer of the copy.
    """

    def __init__(self, model: Any, scorer: Callable[[Any], Scorer]) -> None:
        self._weights = list(model.parameters())
        twins = [nn.Parameter(p.detach(), p.requires_grad) for p in self._weights]
        known = {id(p): twin for p, twin in zip(self._weights, twins, strict=True)}
        other = copy.deepcopy(model, known | {id(b): b for b in model.buffers()})
        self._twins, self._scorer = twins, scorer(other)
        self._thread = ThreadPoolExecutor(1, "rows") if _has_cores() else None

    @property
    def at_once(self) -> bool:
        """Whether two rows are in memory at the same time."""
        return self._thread is not None

    def one_at_a_time(self) -> None:
        """Computes every row in the thread that asks for it, from now on."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    @staticmethod
    def suits(model: Any) -> bool:
        """Returns whether a model is small, in float32 and on a CPU, and keeps what it computes."""
        cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
        return cpu and is_small(model) and not getattr(model, "is_gradient_checkpointing", False)

    def run(self, count: int, work: Callable[[int, Scorer], T], scorer: Scorer) -> list[T]:
        """Computes rows and adds their gradients to those of the model.

        Args:
            count: How many rows.
            work: Computes a row, given its index and a scorer.
            scorer: That of the model.

        Raises:
            Exception: What `work` raised for a row; nothing runs any more.
        """
        results: dict[int, T] = {}
        for weight, twin in zip(self._weights, self._twins, strict=True):
            twin.data, twin.grad = weight.data, None

        def lane(first: int, scorer: Scorer) -> None:
            for n in range(first, count, LANES):
                results[n] = work(n, scorer)

        if self._thread is None:
            lane(0, scorer)
            lane(1, self._scorer)
        else:
            beside = self._thread.submit(lane, 1, self._scorer)
            try:
                lane(0, scorer)
            finally:
                wait([beside])
            beside.result()
        for weight, twin in zip(self._weights, self._twins, strict=True):
            if twin.grad is not None:
                weight.grad = twin.grad if weight.grad is None else weight.grad.add_(twin.grad)
                twin.grad = None
        return [results[n] for n in range(count)]


def _has_cores() -> bool:
    """Returns whether a second thread has a core, unless the user has chosen their number."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return cores >= LANES and "OMP_NUM_THREADS" not in os.environ
