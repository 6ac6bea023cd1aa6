"""Keeps the weights of an imitation that succeed most often in k attempts.

Training needs a start whose attempts differ. The loss goes on falling when they no longer do, and
the success of one attempt does not show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gspo_env.recipes.imitate import LOOKS
from gspo_env.restoring import set_generator_states
from gspo_env.runs.names import IMITATION_PASS, IMITATION_PASS_LAST, IMITATION_STEP
from gspo_env.seeding import generator_states
from gspo_env.types import Group, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the weights of a step reach."""

    step: int
    """The step of the imitation, from 1; it counts on when the schedule starts again."""
    pass_at_k: float
    """Share of the tasks that one of k episodes solves."""
    success: float
    """Mean over all episodes, which decides between equal shares."""


@dataclass(kw_only=True, slots=True)
class StartChoice:
    """Plays training tasks during an imitation, and ends it with the best weights."""

    model: Any
    """The model that imitates."""
    tasks: Sequence[Task]
    """Training tasks that are played; none of them is held out."""
    samples: int
    """k, the episodes of each task."""
    play: Callable[[Sequence[Task], int], Sequence[Group]]
    """Plays k episodes of each task with the model."""
    looks: list[Look] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    """Copies of the trained weights by name."""

    @property
    def chosen(self) -> Look:
        """The look at the best weights; of equal ones the last."""
        return max(self.looks, key=lambda look: (look.pass_at_k, look.success, look.step))

    def due(self, step: int, total: int) -> bool:
        """Returns whether the weights of a step of the schedule are looked at."""
        return step in {math.ceil(total * n / LOOKS) for n in range(1, LOOKS + 1)}

    def look(self, step: int) -> str:
        """Plays the tasks, and keeps the weights if they are the best; returns a line about it.

        The global generators are as before.
        """
        states = generator_states()
        groups = self.play(self.tasks, self.samples)
        set_generator_states(states)
        wins = [[episode.success for episode in group.episodes] for group in groups]
        look = Look(
            step=step,
            pass_at_k=sum(map(any, wins)) / len(wins),
            success=sum(map(sum, wins)) / sum(map(len, wins)),
        )
        self.looks.append(look)
        if self.chosen is look:
            self.best = {name: p.detach().cpu().clone() for name, p in self._trained().items()}
        return (
            f"imitation {step}  pass@{self.samples} {look.pass_at_k:.1%}  "
            f"success {look.success:.1%}  on {len(wins)} training tasks"
        )

    @torch.no_grad()
    def finish(self) -> dict[str, float]:
        """Gives the model the best weights; returns the metrics of the choice."""
        for name, weight in self._trained().items():
            weight.copy_(self.best[name])
        return {
            IMITATION_STEP: float(self.chosen.step),
            IMITATION_PASS: self.chosen.pass_at_k,
            IMITATION_PASS_LAST: self.looks[-1].pass_at_k,
        }

    def restore(
        self, looks: Sequence[Sequence[float]], named: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Takes the place of another choice.

        Args:
            looks: The fields of its looks.
            named: The tensors of a checkpoint, of which those of `best` are `best.NAME`.

        Raises:
            ValueError: They are not those of a choice with this model.
        """
        self.looks = [
            Look(step=int(step), pass_at_k=float(rate), success=float(success))
            for step, rate, success in looks
        ]
        self.best = {n.removeprefix("best."): t.clone() for n, t in named if n.startswith("best.")}
        shapes = _shapes(self._trained()) if self.looks else {}
        if _shapes(self.best) != shapes or not all(t.isfinite().all() for t in self.best.values()):
            raise ValueError("the best weights are not those of the model")

    def _trained(self) -> dict[str, Tensor]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
