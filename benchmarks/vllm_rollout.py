"""Rollout through the `vllm` engine against vLLM's own offline `generate`.

    python benchmarks/vllm_rollout.py

Episodes of the look-up environment are played with 64 in flight, once with environments that answer
at once and once with steps that sleep 50 ms. The floor hands vLLM every turn's prompt and length at
once: the same prompts, lengths and concurrency, no environment. All alternate in this process.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import torch
from common import ENV, alternate, make_player, seconds, show

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams

from gspo_env.engines.vllm import VLLMConfig, VLLMEngine, engine_arguments
from gspo_env.registration import make_env
from gspo_env.rollout import Collector, EnvPool, RolloutConfig
from gspo_env.types import Episode, Task
from gspo_env.weight_sync import Exporter, named_weights

LIMITS = RolloutConfig(concurrency=64)
CONFIG = VLLMConfig(enforce_eager=True)


def make_slow(pause: float):
    """The environment, with steps that take a while as those over a network do."""
    env = make_env(ENV)
    if pause:
        inner = env.unwrapped
        step = inner.step

        def sleeping(action: str):
            time.sleep(pause)
            return step(action)

        inner.step = sleeping
        inner.blocking = True
    return env


def play(engine: VLLMEngine, player, pause: float) -> list[Episode]:
    """64 tasks, 4 episodes each; nothing cached from before."""
    engine._engine.reset_prefix_cache()
    collector = Collector(engine, player.chat, EnvPool(lambda: make_slow(pause)), LIMITS)
    tasks = [Task(env_id=ENV, seed=n) for n in range(64)]
    groups = asyncio.run(collector.collect(tasks, seed=0, group_size=4))
    collector.pool.close()
    return [e for group in groups for e in group.episodes]


def make_offline(player, folder: str) -> LLM:
    """vLLM's offline entry point over the same weights."""
    exporter = Exporter(player.model, untie=not torch.cuda.is_available())
    exporter.write(named_weights(player.model), Path(folder))
    player.tokenizer.save_pretrained(folder)
    arguments = engine_arguments(CONFIG, torch.float32, LIMITS.concurrency, LIMITS.max_context)
    return LLM(model=folder, **{**arguments, "skip_tokenizer_init": False})


def main() -> None:
    """Prints the rates and the ratios."""
    player = make_player(steps=200)
    engine = VLLMEngine(
        player.model, CONFIG, max_slots=LIMITS.concurrency, max_context=LIMITS.max_context
    )
    prompts, params = [], []
    for episode in play(engine, player, 0.0):
        ids: list[int] = []
        for turn in episode.turns:
            ids += turn.prompt_ids
            prompts.append({"prompt_token_ids": list(ids)})
            size = len(turn.action_ids)
            sampling = SamplingParams(
                max_tokens=size, ignore_eos=True, seed=len(params), logprobs=0, detokenize=False
            )
            params.append(sampling)
            ids += turn.action_ids

    def ours(pause: float) -> float:
        episodes: list[Episode] = []
        taken = seconds(lambda: episodes.extend(play(engine, player, pause)))
        return sum(e.model_tokens for e in episodes) / taken

    with tempfile.TemporaryDirectory() as folder:
        llm = make_offline(player, folder)

        def floor() -> float:
            llm.reset_prefix_cache()
            taken = seconds(lambda: llm.generate(prompts, params, use_tqdm=False))
            return sum(p.max_tokens for p in params) / taken

        rates = alternate(5, lambda: ours(0.0), lambda: ours(0.05), floor)
    print(f"{len(prompts)} turns, {sum(p.max_tokens for p in params)} sampled tokens")
    base = show("vLLM offline generate", rates[2], "sampled tokens/s")
    for name, values in (("at once", rates[0]), ("after 50 ms", rates[1])):
        rate = show(f"rollout, environments answer {name}", values, "sampled tokens/s")
        print(f"    ratio {rate / base:.2f}")
    engine.close()


if __name__ == "__main__":
    main()
