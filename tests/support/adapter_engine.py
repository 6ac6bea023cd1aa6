"""An engine whose updates are those of the adapter alone."""

from gspo_env.engines.base import Transformers
from gspo_env.errors import EngineError
from gspo_env.settings import settings


@settings
class AdapterOnly(Transformers):
    """Rejects an update that has other weights."""

    def start(self, model, *, max_slots, max_context):
        engine = super().start(model, max_slots=max_slots, max_context=max_context)
        load = engine.update_weights

        async def update_weights(named_tensors, version):
            names = [name for name, _ in named_tensors]
            if not names or not all("lora_" in name for name in names):
                raise EngineError(f"an update of {names}")
            await load(iter(()), version)

        engine.adapter_only, engine.update_weights = True, update_weights
        return engine
