"""Converts verl's `DataProto`, as it is before the update of the actor.

write_batch(from_verl(batch, "grpo"), "batch.jsonl")  # in verl's own environment
"""

from __future__ import annotations

from typing import Any

from gspo_env.verify.batch import Batch, Row


def from_verl(data: Any, estimator: str = "", *, epsilon: float = 1e-6) -> Batch:
    """Returns the rows of a `DataProto` with responses, masks and rewards.

    Args:
        data: It has `batch` (tensors (B, T), of responses (B, R)) and `non_tensor_batch`.
        estimator: `algorithm.adv_estimator`, if it is one of `Batch.estimator`.
        epsilon: What verl adds to the deviation of a group.
    """
    tensors, others = data.batch, data.non_tensor_batch
    rows = []
    for n in range(len(tensors["input_ids"])):
        ids = tensors["input_ids"][n].tolist()
        attention = tensors["attention_mask"][n].tolist()
        before: list[Any] = [None] * (len(ids) - tensors["responses"].shape[1])

        def of_response(name: str, n: int = n, before: list[Any] = before) -> list[Any] | None:
            return [*before, *tensors[name][n].tolist()] if name in tensors.keys() else None  # noqa: SIM118

        mask = of_response("response_mask") or [*before, *attention[len(before) :]]
        scores = of_response("token_level_rewards") or of_response("token_level_scores")
        rows.append(
            Row(
                ids=ids,
                attention=attention,
                mask=[int(m or 0) for m in mask],
                group=str(others["uid"][n]),
                logprobs=of_response("old_log_probs"),
                advantages=of_response("advantages"),
                reward=None if scores is None else float(sum(s or 0.0 for s in scores)),
            )
        )
    return Batch(rows=rows, trainer="verl", estimator=estimator, epsilon=epsilon)
