"""Compares a rollout with the `vllm` engine with the offline `generate` of vLLM.

    python benchmarks/vllm_rollout.py [--model smollm2] [--rounds 3]
    python benchmarks/vllm_rollout.py --cache 96

64 episodes run at the same time. Environments answer at once, or their steps sleep 50 ms. There are
two workloads: actions of about 64 tokens from a model with random weights, and actions of about 4
tokens in the look-up environment, where a turn ends before a batch has formed. The baseline gives
vLLM the prompts and lengths of all turns at once: the same prompts, lengths and concurrency, but no
environment and no waiting for earlier turns. All measurements alternate in this process. A model of
`--model` takes four turns of at most 48 tokens.

`--cache` gives vLLM a cache of so many blocks of 32 tokens, and compares fixed concurrencies with
`--engine.follow-cache True`, by tokens per second of the processor. A pass takes about half a
minute of a core, and says when it ends. It exits with 1 if the latter preempts a request, or if it
is more than 5 % slower than the fastest fixed number without preemptions (median of the pairs).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from common import ENV, LIMITS, Player, alternate, device_seconds, make_player, seconds, show

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import gymnasium
from vllm import LLM, SamplingParams

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines.vllm.local import VLLM, VLLMEngine, engine_arguments
from gspo_env.env.base import TextEnv
from gspo_env.env.registration import make_env
from gspo_env.model.export import Exporter, named_weights
from gspo_env.model.load import load_model
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import Episode, Task

FLIGHT = 64
FIXED = (3, 5, 8, 11, 16)
"""Concurrencies that are compared with the rule."""
CONFIG = VLLM(enforce_eager=True)
PAUSE = 0.05


class FourTurns(TextEnv):
    """Answers every action; an episode has four turns."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return f"Follow {seed} links.", {}

    def step(self, action):
        self.turn += 1
        return "river stone", 0.0, self.turn == 4, False, {}


class ManyEnds(ChatTokenizer):
    """About one id in 64 ends an action; random weights give all ids the same probability."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(range(300, 300 + len(self.tokenizer) // 64))


gymnasium.register("bench/FourTurns-v0", FourTurns)


def make_waiting(env_id: str, pause: float):
    """The environment with slow steps, such as those over a network."""
    env = make_env(env_id)
    if pause:
        inner = env.unwrapped
        step = inner.step

        def sleeping(action: str):
            time.sleep(pause)
            return step(action)

        inner.step = sleeping
        inner.blocking = True
    return env


def play(engine: VLLMEngine, chat, env_id: str, limits: RolloutConfig, episodes: int, pause: float):
    """Plays groups of 4 with an empty cache."""
    engine._engine.reset_prefix_cache()
    collector = Collector(engine, chat, EnvPool(lambda: make_waiting(env_id, pause)), limits)
    tasks = [Task(env_id=env_id, seed=n) for n in range(episodes // 4)]
    groups = asyncio.run(collector.collect(tasks, seed=0, group_size=4))
    collector.pool.close()
    return [e for group in groups for e in group.episodes]


def make_offline(player, folder: str, limits: RolloutConfig) -> LLM:
    """The offline entry point of vLLM with the same weights."""
    exporter = Exporter(player.model, untie=not torch.cuda.is_available())
    exporter.write(named_weights(player.model), Path(folder))
    player.tokenizer.save_pretrained(folder)
    arguments = engine_arguments(CONFIG, torch.float32, FLIGHT, limits.max_context)
    return LLM(model=folder, **{**arguments, "skip_tokenizer_init": False})


def requests_of(episodes: list[Episode]):
    """The prompt and length of every turn, in the form of the offline entry point."""
    prompts, params = [], []
    for episode in episodes:
        ids: list[int] = []
        for turn in episode.turns:
            ids += turn.prompt_ids
            prompts.append({"prompt_token_ids": list(ids)})
            sampling = SamplingParams(
                max_tokens=len(turn.action_ids),
                ignore_eos=True,
                seed=len(params),
                logprobs=0,
                detokenize=False,
            )
            params.append(sampling)
            ids += turn.action_ids
    return prompts, params


def measure(
    name: str, player, env_id: str, limits: RolloutConfig, episodes: int, rounds: int
) -> None:
    """Prints the rates and the ratios of one workload."""
    engine = VLLMEngine(player.model, CONFIG, max_slots=FLIGHT, max_context=limits.max_context)
    played = play(engine, player.chat, env_id, limits, episodes, 0.0)
    prompts, params = requests_of(played)
    total = sum(p.max_tokens for p in params)

    def ours(pause: float) -> Callable[[], float]:
        def run() -> float:
            kept: list[Episode] = []
            taken = seconds(
                lambda: kept.extend(play(engine, player.chat, env_id, limits, episodes, pause))
            )
            return sum(e.model_tokens for e in kept) / taken

        return run

    with tempfile.TemporaryDirectory() as folder:
        llm = make_offline(player, folder, limits)

        def floor() -> float:
            llm.reset_prefix_cache()
            return total / seconds(lambda: llm.generate(prompts, params, use_tqdm=False))

        rates = alternate(rounds, ours(0.0), ours(PAUSE), floor)
    print(f"{name}: {episodes} episodes, {len(prompts)} turns, {total} sampled tokens")
    base = show("vLLM offline generate", rates[2], "sampled tokens/s")
    for answer, values in (("at once", rates[0]), ("after 50 ms", rates[1])):
        rate = show(f"rollout, environments answer {answer}", values, "sampled tokens/s")
        print(f"    ratio {rate / base:.2f}")
    engine.close()


def measure_cache(
    player, limits: RolloutConfig, blocks: int, episodes: int, rounds: int, fixed: Sequence[int]
) -> bool:
    """Prints the rates and preemptions with a small cache; returns whether the rule is good."""
    config = dataclasses.replace(
        CONFIG, follow_cache=True, engine_args={"num_gpu_blocks_override": blocks}
    )
    engine = VLLMEngine(player.model, config, max_slots=FLIGHT, max_context=limits.max_context)
    rule, names = engine._cache_limit, {n: f"{n} at once" for n in fixed} | {0: "follows the cache"}
    kinds, preemptions = ("preemptions", "steps", "computed tokens"), Counter()
    scheduler = engine._engine.engine_core.engine_core.scheduler
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def run(flight: int) -> float:
        pass_counts = Counter()

        def stepped(*args, **options):
            output = schedule(*args, **options)
            pass_counts["steps"] += 1
            pass_counts["computed tokens"] += output.total_num_scheduled_tokens
            return output

        def counted(*args, **options):
            pass_counts["preemptions"] += 1
            return preempt(*args, **options)

        scheduler.schedule, scheduler._preempt_request = stepped, counted
        engine._cache_limit = None if flight else rule
        at_once = dataclasses.replace(limits, concurrency=flight or FLIGHT)
        kept: list[Episode] = []
        taken = device_seconds(
            lambda: kept.extend(
                play(engine, player.chat, "bench/FourTurns-v0", at_once, episodes, 0.0)
            )
        )
        tokens = sum(e.model_tokens for e in kept)
        described = ", ".join(f"{pass_counts[name]} {name}" for name in kinds)
        print(f"{names[flight]}: {tokens} tokens in {taken:.1f} s, {described}", flush=True)
        preemptions[flight] += pass_counts["preemptions"]
        return tokens / taken

    run(0)  # the rule's first pass, which knows no lengths, and the start of everything
    columns = [[run(n) for n in names] for _ in range(rounds)]
    rates = dict(zip(names, map(list, zip(*columns, strict=True)), strict=True))
    engine.close()
    print(f"{episodes} episodes, {blocks} blocks of 32 tokens")
    for flight, name in names.items():
        show(f"{name}, {preemptions[flight]} preemptions", rates[flight], "sampled tokens/s")
    ratios = {}
    for which, numbers in (
        ("without preemptions", [n for n in fixed if not preemptions[n]]),
        ("of all", fixed),
    ):
        if not numbers:
            print(f"    no fixed number {which}")
            continue
        best = max(numbers, key=lambda n: median(rates[n]))
        ratios[which] = median(
            own / other for own, other in zip(rates[0], rates[best], strict=True)
        )
        print(f"    {ratios[which]:.2f} of the fastest fixed number {which}, {best}")
    return ratios.get("without preemptions", 0.0) >= 0.95 and not preemptions[0]


def main() -> None:
    """Runs the workloads of the default model, or that of a real one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=int, default=0, metavar="BLOCKS")
    parser.add_argument("--episodes", type=int, default=96, help="with --cache")
    parser.add_argument("--fixed", type=int, nargs="+", default=FIXED, help="with --cache")
    arguments = parser.parse_args()
    four, rounds = "bench/FourTurns-v0", arguments.rounds
    cache = arguments.cache, arguments.episodes, rounds, arguments.fixed
    if arguments.model:
        model, tokenizer = load_model(arguments.model)
        player = Player(model=model, tokenizer=tokenizer, chat=ChatTokenizer(tokenizer))
        limits = RolloutConfig(concurrency=FLIGHT, max_turn_tokens=48, max_context=1024)
        if arguments.cache:
            sys.exit(not measure_cache(player, limits, *cache))
        measure(arguments.model, player, four, limits, FLIGHT, rounds)
        return
    fresh = make_player(steps=0)
    fresh = dataclasses.replace(fresh, chat=ManyEnds(fresh.tokenizer))
    long = RolloutConfig(concurrency=FLIGHT, max_turn_tokens=400, max_context=2048)
    if arguments.cache:
        sys.exit(not measure_cache(fresh, long, *cache))
    measure("actions of about 64 tokens", fresh, four, long, 512, rounds)
    limits = RolloutConfig(concurrency=FLIGHT, **LIMITS)
    measure("look-up", make_player(steps=200), ENV, limits, 256, rounds)


if __name__ == "__main__":
    main()
