"""Saves and restores the state of a learner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gspo_env.errors import TrainingError
from gspo_env.files import check_types

if TYPE_CHECKING:
    from gspo_env.learner.learner import Learner


def tensors(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Yields the float32 masters, the buffers and the moments of the optimiser.

    Half-precision weights follow from the masters, and weights that do not train from the model.
    """
    yield from _places(learner).items()
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


@torch.no_grad()
def restore(
    learner: Learner, named: Iterable[tuple[str, Tensor]], saved: Mapping[str, Any]
) -> None:
    """Restores the state of another learner in one with the initial weights.

    Args:
        learner: A learner with the same model, loss and settings.
        named: The pairs of `tensors`; others are ignored.
        saved: The result of `numbers`.

    Raises:
        TrainingError: A tensor is missing, unknown or of another shape.
        ValueError: A tensor has a number that is NaN or infinite.
    """
    check_types(saved, numbers(learner))
    places = _places(learner)
    state: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in saved["optimizer"]["values"].items()
    }
    for name, tensor in named:
        kind, _, rest = name.partition(".")
        if kind != "buffers" and not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite")
        if kind == "optimizer":
            index, _, key = rest.partition(".")
            state.setdefault(int(index), {})[key] = tensor.clone()  # `tensor` may be a mapped file
        elif kind in ("weights", "buffers"):
            place = places.pop(name, None)
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                raise TrainingError(
                    f"the checkpoint has {name} with shape {tuple(tensor.shape)}, and the model "
                    f"has {'none' if place is None else tuple(place.shape)}; expected the model "
                    "that the run began with"
                )
            place.copy_(tensor)
    if places:
        raise TrainingError(f"the checkpoint lacks {', '.join(sorted(places)[:3])}")
    groups = [
        {key: tuple(v) if isinstance(v, list) and key != "params" else v for key, v in g.items()}
        for g in saved["optimizer"]["groups"]
    ]
    learner.optimizer.load_state_dict({"state": state, "param_groups": groups})
    scheduler = learner.scheduler
    scheduler.load_state_dict(saved["scheduler"])
    # those of the checkpoint are of another schedule if the run has more steps now
    factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    scheduler._last_lr = [base * factor for base in scheduler.base_lrs]
    for group, rate in zip(learner.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate
    learner.masters.round_weights()
    learner.masters.loss_scale = saved["loss_scale"]
    learner.masters.steps = saved["steps_since_overflow"]
    learner._skipped_in_a_row = saved["skipped_in_a_row"]
    learner._policy_is_reference = saved["policy_is_reference"]
    if learner.entropy and "entropy" in saved:
        learner.entropy.coefficient, learner.entropy.applies = saved["entropy"]


def _places(learner: Learner) -> dict[str, Tensor]:
    masters = {f"weights.{name}": master for name, master in learner.masters.tensors.items()}
    buffers = {f"buffers.{name}": buffer for name, buffer in learner.policy.named_buffers()}
    return masters | buffers
