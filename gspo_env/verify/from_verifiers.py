"""Converts episodes of verifiers (and so of prime-rl), whose traces have the tokens of each branch.

write_batch(from_verifiers(episodes), "batch.jsonl")  # of `traces.jsonl`, or in the trainer
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gspo_env.verify.batch import Batch, Row


def from_verifiers(episodes: Iterable[Any], estimator: str = "") -> Batch:
    """Returns a row for each branch of each trace; the episodes of a task are a group.

    Args:
        episodes: `vf.Episode`s that a `TrainClient` played, so that nodes have token ids.
        estimator: One of `Batch.estimator`, if the trainer uses one of them.
    """
    rows = []
    for episode in episodes:
        for trace in episode.traces:
            for branch in trace.branches:
                mask = [int(is_sampled) for is_sampled in branch.sampled_mask]
                pairs = zip(branch.logprobs, mask, strict=True)
                rows.append(
                    Row(
                        ids=list(branch.token_ids),
                        mask=mask,
                        group=trace.task.key,
                        logprobs=[p if m else None for p, m in pairs],
                        advantages=branch.advantages,
                        reward=trace.reward if trace.ok else None,
                        episode=trace.id,
                        failed=not trace.ok,
                    )
                )
    return Batch(rows=rows, trainer="verifiers", estimator=estimator)
