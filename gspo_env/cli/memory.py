"""How much memory an update needs, before anything of that size is allocated.

The model is built from its configuration without memory for its weights, and one microbatch of the
longest episodes goes forward and backward through the learner's own code; what that would allocate
is added up.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gspo_env.batch.packing import pack
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.config import Config
from gspo_env.env.registration import make_env, resolve_env
from gspo_env.errors import ModelError
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.load import add_adapter
from gspo_env.model.scorer import Scorer
from gspo_env.recipes.embedded import build

HEAP = {"cpu": 1.4}
"""What a device's allocator takes for activations over what they are: freed blocks of glibc's heap
stay between those that live. Measured 1.3 to 1.7."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Bytes on the learner's device, without what the libraries themselves take."""

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    """What a microbatch adds at its peak, gradients apart."""
    cache: int
    """Keys and values of every episode in flight, which the `transformers` engine keeps."""
    tokens: int
    """Tokens of the microbatch."""

    @property
    def update(self) -> int:
        """All that an update needs at its peak."""
        return self.weights + self.reference + self.gradients + self.optimizer + self.activations


def plan(config: Config) -> Plan:
    """Estimates the memory of a run's update and of its rollout.

    Raises:
        ModelError: The model's configuration cannot be read.
    """
    learner, limits = config.learner, config.rollout
    episodes = config.tasks_per_step * limits.group_size // learner.minibatches
    longest = limits.max_context
    at_once = max(1, min(learner.microbatch_tokens // longest, episodes))
    shape = _shape(config)
    batch = _longest(at_once, longest, shape.get_text_config().vocab_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = _model(shape, config)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _place(model, device)
        given = _bytes(model.parameters())
        trained = [p for p in model.parameters() if p.requires_grad]
        weights, gradients = _bytes(model.parameters()), _bytes(trained)
        numbers = sum(p.numel() for p in trained)
        peak = _peak(model, _faked(batch, fake, device), config, 2 if episodes > at_once else 1)
        kept = 2 * (numbers if learner.optimizer != "adamw" else gradients)
    return Plan(
        weights=weights,
        reference=given if config.objective.kl_coef and not learner.lora_rank else 0,
        gradients=gradients,
        optimizer=kept,
        activations=int(max(0, peak - gradients) * HEAP.get(device, 1.0)),
        cache=_cache(shape.get_text_config(), config, model.dtype.itemsize),
        tokens=at_once * longest,
    )


def _shape(config: Config) -> Any:
    """The configuration of the model."""
    if config.model:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(config.model)
        except Exception as error:
            raise ModelError(
                f"cannot read the configuration of {config.model!r}: {error}"
            ) from error
    env_id = resolve_env(config.env)
    few = dataclasses.replace(config.embedded, demonstrations=200)
    return build(make_env(env_id, **config.env_kwargs), env_id, few, config.seed)[0].config


def _model(shape: Any, config: Config) -> Any:
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    loaded = getattr(shape, "dtype", None) if torch.cuda.is_available() and config.model else None
    masters = config.learner.precision == "bfloat16" and not config.learner.lora_rank
    model = make(shape, dtype=torch.float32 if masters or loaded is None else loaded)
    if config.learner.lora_rank:
        model = add_adapter(model, config.learner.lora_rank)
    use_ragged_attention(model)
    if config.learner.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _place(model: nn.Module, device: str) -> None:
    """Moves weights from the meta device, where operations are not those of a real one."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is not None:
                    new = torch.empty(old.shape, dtype=old.dtype, device=device)
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    held[name] = moved.setdefault(id(old), new)  # type: ignore[assignment]


def _longest(count: int, length: int, vocabulary: int) -> PackedBatch:
    """Episodes of the greatest length that share nothing."""
    generator = np.random.default_rng(0)
    sample = {
        "turn_ids": np.array([-1] + [0] * (length - 1)),
        "advantages": np.zeros(length - 1),
        "engine_logprobs": np.zeros(length - 1),
    }
    return pack(
        [
            Sample(token_ids=generator.integers(0, vocabulary, length), **sample)
            for _ in range(count)
        ]
    )


def _faked(batch: PackedBatch, fake: FakeTensorMode, device: str) -> PackedBatch:
    fields: dict[str, Any] = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    tensors: dict[str, Any] = {
        k: fake.from_tensor(v).to(device) for k, v in fields.items() if isinstance(v, Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def _peak(model: Any, batch: PackedBatch, config: Config, microbatches: int) -> int:
    head = model.get_output_embeddings()
    scorer = Scorer(model, model, 1.0, config.learner.precision == "bfloat16", head)
    with _Allocations() as allocations:
        for _ in range(microbatches):
            predictions, balance = scorer(batch, routers=scorer.router_coefficient > 0)
            loss = predictions.logprobs_N.sum() + (0 if balance is None else balance.loss)
            loss.backward()  # type: ignore[no-untyped-call]
            del predictions, balance, loss
    return int(allocations.peak)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make and let go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.untyped_storage() not in self._seen:
                storage = value.untyped_storage()
                self._seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _cache(shape: Any, config: Config, itemsize: int) -> int:
    if config.engine != "transformers":
        return 0
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    each = 2 * shape.num_hidden_layers * shape.num_key_value_heads * width * itemsize
    slots = min(
        config.rollout.concurrency,
        max(config.tasks_per_step * config.rollout.group_size, config.eval_tasks),
    )
    return int(slots * config.rollout.max_context * each)
