"""The checkpoint of an imitation, until that of step 0 takes its place; see `checkpoints`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gspo_env.batch.sample import Sample
from gspo_env.recipes.build import Imitation
from gspo_env.restoring import check_types, set_generator_states
from gspo_env.seeding import generator_states
from gspo_env.training.checkpoints import CheckpointWriter

if TYPE_CHECKING:
    from gspo_env.training.resume import Checkpoint
    from gspo_env.training.start_choice import StartChoice

logger = logging.getLogger(__name__)


def save(imitation: Imitation, writer: CheckpointWriter, choice: StartChoice | None = None) -> None:
    """Writes all that the next step depends on.

    Raises:
        KeyboardInterrupt: A signal has asked the run to stop.
    """
    place = {
        "losses": imitation.losses,
        "began": imitation.began,
        "demonstrations": _digest(imitation.samples),
    }
    best: Mapping[str, Tensor] = {}
    if choice is not None:
        place["looks"], best = [[*asdict(look).values()] for look in choice.looks], choice.best
    numbers = {"step": 0, "score": {}, "imitation": place, "generators": generator_states()}

    def state() -> tuple[Mapping[str, Any], Iterable[tuple[str, Tensor]]]:
        values, tensors = imitation.learner.state()
        return values, (*tensors, *((f"best.{name}", weight) for name, weight in best.items()))

    writer.save(numbers, state, best=False)
    if writer.interrupt.requested:
        raise KeyboardInterrupt


def restore(
    imitation: Imitation, checkpoint: Checkpoint, choice: StartChoice | None = None
) -> None:
    """Restores the state in an imitation that has not begun.

    Raises:
        OutputError: It is not the state of an imitation.
    """
    with checkpoint.reading() as numbers:
        saved = numbers["imitation"]
        check_types(saved, {"losses": [], "began": 0, "demonstrations": ""})
        if saved["demonstrations"] != _digest(imitation.samples):
            logger.warning("the demonstrations are not those that the run has imitated so far")
        imitation.skip([float(loss) for loss in saved["losses"]], int(saved["began"]))
        if not 0 <= imitation.steps <= imitation.total:
            raise ValueError(f"imitation.began is {imitation.began}")
        imitation.learner.restore(checkpoint.tensors(), numbers["learner"])
        if choice is not None:
            choice.restore(saved["looks"], checkpoint.tensors())
        set_generator_states(numbers["generators"])


def _digest(samples: Sequence[Sample]) -> str:
    """Returns a checksum of the tokens of samples, and of which of them are the model's."""
    summed = hashlib.sha256()
    for sample in samples:
        summed.update(sample.token_ids.tobytes() + sample.turn_ids.tobytes())
    return summed.hexdigest()
