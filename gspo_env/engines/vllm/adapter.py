"""A LoRA adapter that vLLM applies itself: the base model stays where it is."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

from gspo_env.engines.base import NamedTensors
from gspo_env.model.export import Exporter
from gspo_env.model.save import replaced_folder

logger = logging.getLogger(__name__)

NAME = "gspo-env-adapter"
"""The adapter's name in vLLM. Each update replaces it in place, so that requests in flight go on
with the new one; the version of the weights says which one sampled a token."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's `max_lora_rank` may have."""


class Adapter:
    """The folder through which vLLM gets the adapter of a model, in PEFT's form.

    Args:
        model: A PEFT model that `obstacle` finds nothing against.
        folder: Where each update is written.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.folder = folder
        self._config = copy.copy(model.active_peft_config)
        self._config.inference_mode = True

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that vLLM's engine needs."""
        rank = next(rank for rank in _RANKS if rank >= self._config.r)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}

    def write(self, named_tensors: NamedTensors) -> None:
        """Writes the adapter's tensors, under the names of `named_weights`, all or nothing."""
        from safetensors.torch import save_file

        with replaced_folder(self.folder) as part:
            self._config.save_pretrained(str(part))
            tensors = {name: tensor.cpu().contiguous() for name, tensor in named_tensors}
            save_file(tensors, part / "adapter_model.safetensors")

    def request(self, *, update: bool = False) -> Any:
        """Returns what vLLM needs to sample with the adapter, or to load it anew."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(NAME, 1, str(self.folder), load_inplace=update)


def make_adapter(model: Any, exporter: Exporter, folder: Path) -> Adapter | None:
    """Returns the adapter of a model, or logs why vLLM gets whole weights."""
    if reason := obstacle(model, exporter):
        warn_whole(reason)
        return None
    return Adapter(model, folder)


def warn_whole(reason: str) -> None:
    """Logs why vLLM gets whole weights although only the adapter should travel."""
    logger.warning("adapter_only is not possible, so whole weights are sent: %s", reason)


def obstacle(model: Any, exporter: Exporter) -> str:
    """Returns why vLLM cannot apply the adapter of a model, or an empty string."""
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "peft_type", None) != "LORA":
        return "the model has no LoRA adapter; expected learner.lora_rank above 0"
    if config.r > _RANKS[-1]:
        return f"lora_rank is {config.r}; vLLM takes at most {_RANKS[-1]}"
    if exporter.is_padded:
        return "the model has ids that its tokenizer lacks"
    if unknown := [name for name in _UNKNOWN if getattr(config, name, None)]:
        return f"vLLM has no adapter with {' and '.join(unknown)}"
    if config.bias != "none":
        return "the adapter trains biases"
    if any("lm_head" in name for name in config.target_modules or ()):
        return "the output head has an adapter"
    return ""


_UNKNOWN = (
    *("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("use_dora", "lora_bias", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
)
"""Settings of PEFT's LoRA that vLLM does not have."""
