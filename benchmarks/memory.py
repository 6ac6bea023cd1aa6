"""Measures the extra peak memory of an update with a large vocabulary instead of a small one.

    python benchmarks/memory.py

Each size runs in a separate process, whose peak resident memory the kernel counts. Weights,
gradients and the two optimiser moments of the head and the embeddings are subtracted. The baseline
is the same update with full logits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource

MIB = 2**20


def _update(vocabulary: int, arguments: argparse.Namespace, full: bool, answer) -> None:
    import numpy as np
    import torch
    from common import random_qwen3

    from gspo_env.batch.sample import Sample
    from gspo_env.learner import GSPO, Learner, LearnerConfig

    torch.set_num_threads(1)
    config = LearnerConfig(minibatches=1, warmup_steps=0)
    model = random_qwen3(arguments.hidden, 4, vocabulary, tie_word_embeddings=False)
    learner = Learner(model, GSPO(), config, total_steps=10)
    learner._parallel = None  # the small model has one row at a time too, as the large one
    if full:
        learner.scorer.head = None
    rng = np.random.default_rng(0)
    length = 513  # 512 of them sampled
    count = arguments.tokens // (length - 1)
    samples = [
        Sample(
            token_ids=rng.integers(0, vocabulary, length),
            turn_ids=np.array([-1] + [0] * (length - 1)),
            advantages=np.ones(length - 1) * (-1) ** n,
        )
        for n in range(count)
    ]
    for seed in range(2):  # in the second update the moments of the optimiser exist already
        learner.update(samples, seed)
    answer.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def peak(vocabulary: int, arguments: argparse.Namespace, full: bool = False) -> int:
    """Measures the peak bytes of two updates."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=_update, args=(vocabulary, arguments, full, answer))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"the process with a vocabulary of {vocabulary} ended {child.exitcode}")
    return answer.get()


def main() -> None:
    """Prints the cost of the larger vocabulary, with chunked and with full logits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="also with full logits (8 GiB)")
    arguments = parser.parse_args()
    small = peak(1000, arguments)
    # embeddings and head, each with its gradient and two moments, in float32
    apart = (arguments.vocabulary - 1000) * arguments.hidden * 2 * 4 * 4
    print(f"vocabulary 1000: peak {small / MIB:.0f} MiB, {arguments.tokens} model tokens")
    for full in (False, True) if arguments.full else (False,):
        large = peak(arguments.vocabulary, arguments, full)
        name = "full logits" if full else "chunked head"
        print(
            f"vocabulary {arguments.vocabulary}, {name}: peak {large / MIB:.0f} MiB, "
            f"{apart / MIB:.0f} MiB of it weights, gradients and optimiser state"
        )
        over = large - small - apart
        wanted = "" if full else f"; at most 400 MB wanted: {'met' if over <= 4e8 else 'NOT met'}"
        print(f"  above the small vocabulary: {over / 1e6:.0f} MB{wanted}")


if __name__ == "__main__":
    main()
