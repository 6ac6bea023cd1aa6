"""Restores the state of a learner, when a run is resumed or several ranks begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gspo_env.errors import TrainingError
from gspo_env.learner.state import numbers, weights_and_buffers
from gspo_env.restoring import check_types

if TYPE_CHECKING:
    from gspo_env.learner.learner import Learner


@torch.no_grad()
def restore(
    learner: Learner, named: Iterable[tuple[str, Tensor]], saved: Mapping[str, Any]
) -> None:
    """Restores the state of another learner in one with the initial weights.

    Args:
        learner: A learner with the same model, loss and settings.
        named: The pairs of `state.tensors`; others are ignored.
        saved: The result of `state.numbers`.

    Raises:
        TrainingError: A tensor is missing, unknown or of another shape.
        ValueError: A tensor has a number that is NaN or infinite.
    """
    check_types(saved, numbers(learner))
    places = weights_and_buffers(learner)
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
