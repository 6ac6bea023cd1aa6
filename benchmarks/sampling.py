"""Measures the sampling of one step on a CPU, in parts and of all rows at once.

    python benchmarks/sampling.py

Process CPU time of one thread, medians of alternating calls.
"""

from __future__ import annotations

from statistics import median

import torch
from common import alternate, cpu_seconds

from gspo_env.engines import transformers
from gspo_env.model.threads import keep_memory

SHAPES = [(256, 700), (256, 16_384), (8, 151_936), (64, 151_936)]
"""Rows and ids of the vocabulary."""


def main() -> None:
    """Prints the times of each shape."""
    torch.set_num_threads(1)
    keep_memory()
    usual = transformers._MOST_LOGITS
    for rows, vocabulary in SHAPES:
        logits = torch.randn(rows, vocabulary)
        draws = torch.rand(rows).tolist()

        def measure(most: int, logits: torch.Tensor = logits, draws: list[float] = draws) -> float:
            transformers._MOST_LOGITS = most
            return cpu_seconds(lambda: transformers.sample(logits, [1.0] * len(draws), draws))

        parts, whole = alternate(7, lambda: measure(usual), lambda: measure(1 << 62))
        a, b = 1e3 * median(parts), 1e3 * median(whole)
        print(f"{rows:4} x {vocabulary:7,}: {a:7.2f} ms in parts, {b:7.2f} ms at once: {a / b:.2f}")


if __name__ == "__main__":
    main()
