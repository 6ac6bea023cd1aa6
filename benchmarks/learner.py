"""Compares the update with a plain forward and backward pass over the same packed tokens.

    python benchmarks/learner.py

The baseline runs the same model over the same packed rows with the same attention, takes the mean
log-probability of the sampled tokens, and runs the backward pass. It has no loss function, metrics,
gradient clip or optimiser. The episodes share no prefix, so both compute every token. The program
also measures how the time grows with the tokens. Process CPU time, one thread.
"""

from __future__ import annotations

import argparse
import copy

import numpy as np
import torch
from common import alternate, cpu_seconds, make_model, multi_turn_group, show

from gspo_env.batch.packing import microbatches, pack
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model.attention import PackedAttention


def make_learner(model) -> Learner:
    """Makes a learner with one minibatch and a learning rate too small to change the model."""
    config = LearnerConfig(minibatches=1, learning_rate=1e-9, warmup_steps=0)
    return Learner(model, GSPO(), config, total_steps=10**6)


def episodes(model, count: int, own: tuple[int, int]) -> list:
    """Makes random episodes of three turns."""
    rng, vocabulary = np.random.default_rng(0), model.config.vocab_size
    return [
        s
        for _ in range(count)
        for s in multi_turn_group(rng, vocabulary=vocabulary, shared=0, own=own, size=1)
    ]


def bare(model, rows) -> None:
    """Runs only the forward and backward pass."""
    for row in rows:
        batch = pack(row)
        logits = model(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.positions_T[None],
            use_cache=False,
            logits_to_keep=batch.source_N,
            ragged=PackedAttention(batch.lengths_B),
        ).logits[0]
        torch.nn.functional.cross_entropy(logits, batch.target_N).backward()
    model.zero_grad()


def against_the_floor(size: str, count: int, rounds: int) -> None:
    """Prints the time of both and their ratio."""
    model = make_model(size)
    samples = episodes(model, count, (256, 512))
    learner = make_learner(copy.deepcopy(model))
    rows = microbatches(samples, learner.config.microbatch_tokens)
    times = alternate(
        rounds,
        lambda: cpu_seconds(lambda: learner.update(samples)),
        lambda: cpu_seconds(lambda: bare(learner.policy, rows)),
    )
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    tokens = sum(len(s.token_ids) for s in samples)
    own = sum(len(s.advantages) for s in samples)
    print(f"\n{parameters:.1f} M parameters, {count} episodes, {tokens} tokens, {own} the model's")
    update = show("update", times[0], "s")
    floor = show("bare packed forward and backward", times[1], "s")
    print(f"  ratio {update / floor:.3f}  (at most 1.05 wanted)")


def growth(rounds: int) -> None:
    """Prints the slope of log time over log tokens, with episodes of 512 tokens."""
    model = make_model("small")
    learner = make_learner(model)
    counts = (2, 8, 32, 128)
    batches = [episodes(model, count, (511, 511)) for count in counts]
    times = alternate(
        rounds, *(lambda b=batch: cpu_seconds(lambda: learner.update(b)) for batch in batches)
    )
    print("\ngrowth with tokens")
    middles = [show(f"{512 * n} tokens", row, "s") for n, row in zip(counts, times, strict=True)]
    slope = np.polyfit(np.log(counts), np.log(middles), 1)[0]
    print(f"  log-log slope {slope:.3f}  (at most 1.05 wanted)")


def main() -> None:
    """Runs the three measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-large", action="store_true", help="leave out the 100 M parameters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    against_the_floor("small", 32, arguments.rounds)
    if not arguments.no_large:
        against_the_floor("large", 4, min(3, arguments.rounds))
    growth(min(3, arguments.rounds))


if __name__ == "__main__":
    main()
