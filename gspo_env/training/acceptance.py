"""Takes an update back after which the engine's copies are too far from the trainer.

Engine and trainer compute the same weights in different ways, and an update that is an improvement
in one may not be one in the other. An update is accepted if the probe after it stays within the
engine's tolerance.

Source:
    After the acceptance of candidates by a gap of the inference policy, arXiv 2606.29526.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable

from gspo_env.errors import TrainingError
from gspo_env.learner.settings import Trainer
from gspo_env.runs.run import History
from gspo_env.training.weight_check import WeightsDifferError

UNDONE = "train/undone_updates"


class Undo:
    """The state of a learner before an update.

    Args:
        learner: The learner, whose trained weights and optimiser are copied.
    """

    def __init__(self, learner: Trainer) -> None:
        state, tensors = learner.state()
        self._learner = learner
        self._state = copy.deepcopy(state)
        self._tensors = [(name, tensor.detach().clone()) for name, tensor in tensors]

    async def sync(
        self,
        send: Callable[[int], Awaitable[dict[str, float]]],
        step: int,
        history: History,
        limit: int,
    ) -> dict[str, float]:
        """Sends the weights; if they are rejected, restores the former ones and sends those.

        Args:
            send: Sends the learner's weights and probes the engine; returns metrics.
            step: The version of the weights.
            history: The metrics of earlier steps.
            limit: Updates in a row that may be undone.

        Raises:
            EngineError: The engine differs with the former weights as well.
            TrainingError: More than `limit` updates in a row were undone.
        """
        try:
            return {**await send(step), UNDONE: 0.0}
        except WeightsDifferError as error:
            rejected = error
        undone = [metrics[UNDONE] for _, metrics in history if UNDONE in metrics]
        if len(undone) >= limit and all(undone[-limit:]):
            raise TrainingError(
                f"{limit + 1} updates in a row were undone (learner.max_skipped_steps {limit}): "
                f"{rejected}"
            ) from rejected
        self._learner.restore(iter(self._tensors), self._state)
        metrics = await send(step)
        return {**metrics, UNDONE: 1.0, "train/rejected_logprob_diff": rejected.difference}
