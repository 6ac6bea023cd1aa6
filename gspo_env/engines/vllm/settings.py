"""The settings of vLLM, in this process and served; importing them imports neither it nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gspo_env.engines.base import Engine
from gspo_env.errors import ConfigError
from gspo_env.registry import check_literals


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMSettings:
    """What vLLM takes, in this process and served."""

    tensor_parallel_size: int = 1
    """GPUs that share the model."""
    gpu_memory_utilization: float = 0.45
    """Share of a GPU's memory, which the learner has the rest of."""
    kv_cache_gib: float = 1.0
    """Size of the cache of keys and values on a CPU; a GPU's follows from its memory share."""
    dtype: str = "auto"
    """`auto` is the learner's."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: a slower engine that starts sooner."""
    quantization: str = ""
    """Such as `fp8`; empty for none."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Any other argument of vLLM's engine; wins over all of the above."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        self._check("tensor_parallel_size", self.tensor_parallel_size >= 1, "at least 1")
        self._check("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "a share of 1")
        self._check("kv_cache_gib", self.kv_cache_gib > 0, "a number above 0")

    def _check(self, name: str, possible: bool, expected: str) -> None:
        if not possible:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {expected}")


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLM(VLLMSettings):
    """vLLM in this process, over a copy of the learner's weights."""

    sleep_during_update: bool = True
    """Whether a GPU engine gives its memory to the learner during an update."""

    def start(self, model: Any, *, max_slots: int, max_context: int) -> Engine:
        """Starts vLLM with the weights of a model; see `Transformers.start`."""
        from gspo_env.engines.vllm.local import VLLMEngine

        return VLLMEngine(model, self, max_slots=max_slots, max_context=max_context)


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMServer(VLLMSettings):
    """A fleet of `vllm serve` processes, started here or given."""

    addresses: tuple[str, ...] = ()
    """Running servers, such as `http://node1:8000`; none starts `replicas` of our own. They need
    VLLM_SERVER_DEV_MODE=1, `--enable-scale-out` and `--logprobs-mode processed_logprobs`."""
    replicas: int = 1
    """How many servers to start."""
    transfer: Literal["auto", "folder", "gloo", "nccl", "ipc"] = "auto"
    """How weights get to the servers. Given servers need `--weight-transfer-config
    '{"backend": "nccl"}'` for all but `folder`, and `ipc` the trainer's own GPU. `auto` is `folder`
    for a model on a CPU; on a GPU `ipc` for servers of our own and `nccl` for given ones."""
    shared_folder: str = ""
    """Where weights are written for servers to read; empty is a temporary folder here."""
    server_start_timeout: float = 600.0
    """Seconds that a server may take to become healthy."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        VLLMSettings.__post_init__(self)
        check_literals(self)
        self._check("replicas", self.replicas >= 1, "at least 1")
        self._check("server_start_timeout", self.server_start_timeout > 0, "above 0")
        urls = all(address.startswith(("http://", "https://")) for address in self.addresses)
        self._check("addresses", urls, "http://HOST:PORT for each")

    def start(self, model: Any, *, max_slots: int, max_context: int) -> Engine:
        """Starts or joins the servers with the weights of a model; see `Transformers.start`."""
        from gspo_env.engines.vllm.server import VLLMServerEngine

        return VLLMServerEngine(model, self, max_slots=max_slots, max_context=max_context)
