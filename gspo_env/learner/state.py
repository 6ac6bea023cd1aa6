"""The state of a learner, as a checkpoint has it; `restore` reads it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from gspo_env.learner.learner import Learner


def tensors(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Yields the float32 masters, the buffers and the moments of the optimiser.

    Half-precision weights follow from the masters, and weights that do not train from the model.
    """
    yield from weights_and_buffers(learner).items()
    for index, values in learner.optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                yield f"optimizer.{index}.{name}", value


def numbers(learner: Learner) -> dict[str, Any]:
    """Returns everything else that the next step depends on, as JSON."""
    optimizer = learner.optimizer.state_dict()
    plain = {
        str(index): {k: v for k, v in values.items() if not isinstance(v, Tensor)}
        for index, values in optimizer["state"].items()
    }
    entropy = learner.entropy
    adapts = entropy is not None and entropy.target
    return {
        **({"entropy": [entropy.coefficient, entropy.applies]} if entropy and adapts else {}),
        "optimizer": {"values": plain, "groups": optimizer["param_groups"]},
        "scheduler": learner.scheduler.state_dict(),
        "loss_scale": learner.masters.loss_scale,
        "steps_since_overflow": learner.masters.steps,
        "skipped_in_a_row": learner._skipped_in_a_row,
        "policy_is_reference": learner._policy_is_reference,
    }


def weights_and_buffers(learner: Learner) -> dict[str, Tensor]:
    """Returns what the optimiser changes, and the buffers, by name."""
    masters = {f"weights.{name}": master for name, master in learner.masters.tensors.items()}
    buffers = {f"buffers.{name}": buffer for name, buffer in learner.policy.named_buffers()}
    return masters | buffers
