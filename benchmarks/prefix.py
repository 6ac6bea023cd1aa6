"""The time of an update with and without shared prefixes, alternately, in one process.

    python benchmarks/prefix.py            # hidden 128, 4 layers
    python benchmarks/prefix.py --large    # 100 M parameters

First, groups of eight episodes with a common prefix of 512 tokens and 64 to 128 tokens after it.
Then episodes that share nothing, for which the search for shared tokens must cost nothing. Process
CPU time, one thread.
"""

from __future__ import annotations

import argparse
import copy
import functools

import numpy as np
import torch
from common import alternate, cpu_seconds, make_model, multi_turn_group, show

from gspo_env.batch import prefix
from gspo_env.learner import GSPO, Learner, LearnerConfig


def gradients(learner, samples) -> dict[str, torch.Tensor]:
    """The gradient of all samples, without an optimiser step."""
    for minibatch in learner.score(learner.prepare(samples)):
        learner.backward(minibatch)
    result = {n: p.grad.clone() for n, p in learner.policy.named_parameters()}
    learner.optimizer.zero_grad()
    return result


def unshared(work) -> None:
    """Runs `work` with sharing switched off."""
    kept, prefix._WORTH = prefix._WORTH, 2.0
    try:
        return work()
    finally:
        prefix._WORTH = kept


def compare(model, samples, rounds: int, expected: str) -> None:
    """Prints the time of both and their ratio."""
    config = LearnerConfig(minibatches=1, learning_rate=1e-9, warmup_steps=0)
    learner = Learner(copy.deepcopy(model), GSPO(), config, total_steps=10**6)
    ours = gradients(learner, samples)
    plain = unshared(lambda: gradients(learner, samples))
    errors = [(ours[n] - g).norm() / g.norm().clamp(min=1e-20) for n, g in plain.items()]
    error = float(max(errors))
    times = alternate(
        rounds,
        lambda: cpu_seconds(lambda: learner.update(samples)),
        lambda: cpu_seconds(lambda: unshared(lambda: learner.update(samples))),
    )
    shared, whole = show("shared", times[0], "s"), show("each episode alone", times[1], "s")
    print(
        f"  {whole / shared:.2f} times as fast ({expected}); float32 gradients within {error:.0e}"
    )


def main() -> None:
    """Prints the gain of sharing, and its cost if there is nothing to share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true", help="100 M parameters")
    parser.add_argument(
        "--groups", type=int, default=0, help="groups of eight (default 4, large 1)"
    )
    parser.add_argument("--rounds", type=int, default=0, help="default 7, large 3")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    large = arguments.large
    model = make_model("large" if large else "small")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    rng = np.random.default_rng(0)
    group = functools.partial(multi_turn_group, rng, vocabulary=model.config.vocab_size)
    count, rounds = arguments.groups or (1 if large else 4), arguments.rounds or (3 if large else 7)
    samples = [s for _ in range(count) for s in group(shared=512, own=(64, 128))]
    total = sum(len(s.token_ids) for s in samples)
    print(f"\n{count} groups of 8, 512 tokens shared, 64 to 128 not: {total} tokens")
    compare(model, samples, rounds, f"at least {3.3 if large else 3} expected")
    count = 4 if large else 32
    samples = [s for _ in range(count) for s in group(shared=0, own=(256, 512), size=1)]
    total = sum(len(s.token_ids) for s in samples)
    print(f"\n{count} episodes that share nothing: {total} tokens")
    compare(model, samples, max(rounds, 7), "at least 0.98 expected")  # two alike need more rounds


if __name__ == "__main__":
    main()
