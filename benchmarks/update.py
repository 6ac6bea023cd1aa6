"""The update against a bare packed forward and backward over the same tokens.

    python benchmarks/update.py

The floor runs the same model over the same packed rows with the same attention, takes the mean of
the model tokens' log-probabilities and goes backward: no objective, no metrics, no gradient clip,
no optimiser. Both are run alternately in this process, for one minibatch and for the default
recipe's four.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from common import alternate, collect, make_collector, make_player, seconds, show

from gspo_env.advantages import AdvantageConfig, estimate
from gspo_env.attention import PackedAttention
from gspo_env.config import Config
from gspo_env.learner import Learner
from gspo_env.packing import microbatches, pack, to_sample
from gspo_env.rollout import RolloutConfig


def bare(model, rows) -> None:
    """Forward and backward, and nothing else."""
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


def main() -> None:
    """Prints the seconds of both and their ratio."""
    player = make_player()
    groups = collect(make_collector(player, RolloutConfig()))
    advantages, _ = estimate(groups, AdvantageConfig())
    samples = [
        to_sample(episode, values)
        for group, values_G in zip(groups, advantages, strict=True)
        for episode, values in zip(group.episodes, values_G, strict=True)
    ]
    print(f"{len(samples)} episodes, {sum(len(s.token_ids) for s in samples)} tokens")
    recipe = Config()
    for minibatches in (1, recipe.learner.minibatches):
        config = dataclasses.replace(
            recipe.learner, minibatches=minibatches, learning_rate=1e-9, warmup_steps=0
        )
        learner = Learner(copy.deepcopy(player.model), recipe.objective, config, total_steps=10**6)
        cuts = [
            row
            for chunk in learner._minibatches(samples, 0)
            for row in microbatches(chunk, config.microbatch_tokens)
        ]
        times = alternate(
            7,
            lambda learner=learner: seconds(lambda: learner.update(samples)),
            lambda learner=learner, cuts=cuts: seconds(lambda: bare(learner.policy, cuts)),
        )
        update = show(f"update, {minibatches} minibatch(es)", times[0], "s")
        floor = show("bare packed forward and backward", times[1], "s")
        print(f"ratio {update / floor:.2f}  (at most 1.30 wanted)")


if __name__ == "__main__":
    main()
