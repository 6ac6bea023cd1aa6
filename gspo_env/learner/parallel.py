"""Two rows of a minibatch at a time, on two cores of a CPU.

The operations of a small model are too short for several threads each. So two threads compute
different rows. The second one has a copy of the model's modules, with the same weights and with
separate gradients, which are added to the model's at the end:

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
AT_ONCE = 2


class ParallelRows:
    """Computes the rows of a minibatch with a model and with a copy that shares its weights.

    Args:
        model: The model; see `suits`.
        make_scorer: Makes the scorer of the copy.
    """

    def __init__(self, model: Any, make_scorer: Callable[[Any], Scorer]) -> None:
        self._weights = list(model.parameters())
        self._twins = [nn.Parameter(p.detach(), p.requires_grad) for p in self._weights]
        shared = {id(p): twin for p, twin in zip(self._weights, self._twins, strict=True)}
        self._scorer = make_scorer(
            copy.deepcopy(model, shared | {id(b): b for b in model.buffers()})
        )
        # OMP_NUM_THREADS is the user's own choice of a number of threads
        cores = 1 if "OMP_NUM_THREADS" in os.environ else os.cpu_count() or 1
        self._thread = ThreadPoolExecutor(1, "rows") if cores >= AT_ONCE else None

    @staticmethod
    def suits(model: Any) -> bool:
        """Returns whether a model is small, in float32 and on a CPU, and keeps what it computes."""
        cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
        return cpu and is_small(model) and not getattr(model, "is_gradient_checkpointing", False)

    def run(self, count: int, compute: Callable[[int, Scorer], T], scorer: Scorer) -> list[T]:
        """Computes rows and adds their gradients to those of the model.

        Args:
            count: How many rows.
            compute: Computes a row, given its index and a scorer.
            scorer: That of the model.

        Raises:
            Exception: What `compute` raised for a row; no row is being computed any more.
        """
        results: dict[int, T] = {}
        for weight, twin in zip(self._weights, self._twins, strict=True):
            twin.data, twin.grad = weight.data, None

        def every_other_row(first: int, scorer: Scorer) -> None:
            for n in range(first, count, AT_ONCE):
                results[n] = compute(n, scorer)

        if self._thread is None:
            every_other_row(0, scorer)
            every_other_row(1, self._scorer)
        else:
            odd_rows = self._thread.submit(every_other_row, 1, self._scorer)
            try:
                every_other_row(0, scorer)
            finally:
                wait([odd_rows])
            odd_rows.result()
        for weight, twin in zip(self._weights, self._twins, strict=True):
            if twin.grad is not None:
                weight.grad = twin.grad if weight.grad is None else weight.grad.add_(twin.grad)
                twin.grad = None
        return [results[n] for n in range(count)]
