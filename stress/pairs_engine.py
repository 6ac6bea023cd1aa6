"""An engine for `pairs.py` whose copy of the weights is once not that of the learner."""

from __future__ import annotations

from typing import Any

from gspo_env.engines.base import Transformers
from gspo_env.settings import settings


@settings
class Undoing(Transformers):
    """Loads wrong weights first, as version 3, so that the update is undone."""

    def start(self, model: Any, *, max_slots: int, max_context: int) -> Any:
        """Starts the engine."""
        own = Transformers(own_weights=True)
        engine: Any = own.start(model, max_slots=max_slots, max_context=max_context)
        load, versions = engine.update_weights, set[int]()
        weights = dict(engine._model.named_parameters())
        adapter = {name: weight for name, weight in weights.items() if "lora_" in name}

        async def update_weights(named_tensors: Any, version: int) -> None:
            await load(named_tensors, version)
            if version == 3 and version not in versions:
                for weight in (adapter or weights).values():
                    weight.add_(0.1)
            versions.add(version)

        engine.undo_updates, engine.update_weights = True, update_weights
        return engine
