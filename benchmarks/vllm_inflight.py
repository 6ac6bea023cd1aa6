"""Sends weights to engines while long completions run; checks each token against its trainer.

    python benchmarks/vllm_inflight.py --transfers folder gloo --servers 2
    python benchmarks/vllm_inflight.py --hidden 512 --layers 8   # 60 million parameters

For each transfer: the seconds and GB/s of an update of all servers while nothing runs, and while
requests run. Then the versions of the weights that sampled the tokens, and the greatest difference
between the engine's log-probability of a token and that of the trainer with the weights of that
version, after the same tokens. `process` is vLLM in this process, `copy` the engine `transformers`
with its own weights. With `--forget` the caches are not reset, which the difference must show.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_env.batch.sample import Sample
from gspo_env.engines import Completion, Sampling, Transformers, check_completion
from gspo_env.engines.vllm import VLLM, VLLMServer
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model.export import named_weights

VOCABULARY = 2048


def make_models(hidden: int, layers: int, count: int) -> list[Any]:
    """Makes models of one architecture, the weights of each version."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 2),
        num_key_value_heads=max(hidden // 128, 1),
        head_dim=64,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    models = [Qwen3ForCausalLM(config).eval()]
    for _ in range(count - 1):
        models.append(copy.deepcopy(models[-1]))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return models


def trainer_logprobs(model: Any, prompt: list[int], done: Completion) -> np.ndarray:
    """Log-probabilities of the tokens of a completion by the trainer with these weights."""
    learner = Learner(model, GSPO(), LearnerConfig(learning_rate=1e-6), total_steps=1)
    sample = Sample(
        token_ids=np.array([*prompt, *done.token_ids]),
        turn_ids=np.array([-1] * len(prompt) + [0] * len(done.token_ids)),
        advantages=np.zeros(len(done.token_ids)),
    )
    return learner.logprobs(learner.pack([sample])).double().numpy()


def check(models: list[Any], log: list[tuple[list[int], Completion]]) -> tuple[int, float]:
    """Returns how many completions have several versions, and the greatest difference."""
    differences = []
    for prompt, done in log:
        runs = done.weights_versions or ((done.weights_version, len(done.token_ids)),)
        at = 0
        for version, tokens in runs:
            expected = trainer_logprobs(models[version], prompt, done)[at : at + tokens]
            differences.append(np.abs(expected - done.logprobs[at : at + tokens]).max())
            at += tokens
    return sum(bool(done.weights_versions) for _, done in log), max(differences)


async def play(engine: Any, models: list[Any], args: argparse.Namespace) -> None:
    """Measures idle updates, then updates in flight."""
    learned = copy.deepcopy(models[0])  # the weights of each version come from this model
    if hasattr(engine, "_learned"):
        learned = engine._learned
    size = sum(t.nbytes for _, t in named_weights(learned)) * getattr(engine, "copies", 1) / 1e9

    async def send(version: int, in_flight: bool) -> float:
        learned.load_state_dict(models[version].state_dict())
        started = time.perf_counter()
        update = engine.update_in_flight if in_flight else engine.update_weights
        await update(named_weights(learned), version)
        return time.perf_counter() - started

    first = [Sampling(max_tokens=4, seed=n) for n in range(4 * getattr(engine, "copies", 1))]
    await asyncio.gather(*(engine.generate([3, 4, 5], each) for each in first))
    idle = [await send(0, False) for _ in range(args.rounds)]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCABULARY, 32).tolist() for _ in range(args.requests)]
    samplings = [Sampling(max_tokens=args.tokens, seed=n) for n in range(len(prompts))]
    started = time.perf_counter()
    jobs = [
        asyncio.create_task(engine.generate(prompt, sampling))
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    flights = []
    for version in range(1, len(models)):
        await asyncio.sleep(args.pause)
        flights.append(await send(version, True))
    log = list(zip(prompts, await asyncio.gather(*jobs), strict=True))
    taken = time.perf_counter() - started
    for (_, done), sampling in zip(log, samplings, strict=True):
        check_completion(done, sampling, VOCABULARY)
    several, difference = check(models, log)
    for name, values in (("idle", idle), ("in flight", flights)):
        middle = statistics.median(values)
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(
            f"  update, {name}: {middle:.3f} s ({spread}) for {size:.3f} GB in all copies, "
            f"{size / middle:.2f} GB/s",
            flush=True,
        )
    tokens = sum(len(done.token_ids) for _, done in log)
    print(
        f"  {len(log)} requests, {tokens} tokens in {taken:.1f} s; {several} had several versions"
    )
    for _, done in log[:2]:
        print(f"    versions {done.weights_versions or done.weights_version}")
    print(f"  greatest difference from the trainer of each token's version: {difference:.2e}")


def start(transfer: str, model: Any, args: argparse.Namespace) -> Any:
    """Starts the engine of a transfer."""
    sizes = {"max_slots": args.requests, "max_context": args.tokens + 64}
    if transfer == "copy":
        return Transformers(own_weights=True).start(model, **sizes)
    if transfer == "process":
        return VLLM(enforce_eager=True).start(model, **sizes)
    fleet = VLLMServer(replicas=args.servers, transfer=transfer, enforce_eager=True)
    return fleet.start(model, **sizes)


def forget(engine: Any) -> None:
    """Makes an engine leave out the reset of its caches."""
    from gspo_env.engines.vllm import server

    server.reset_cache = lambda client: ""
    if hasattr(engine, "_reset_cache"):
        engine._reset_cache = lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--transfers", nargs="+", default=["copy", "process", "folder", "gloo"], metavar="NAME"
    )
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two updates")
    parser.add_argument("--rounds", type=int, default=5, help="updates while nothing runs")
    parser.add_argument("--forget", action="store_true", help="leave out the reset of the caches")
    args = parser.parse_args()
    models = make_models(args.hidden, args.layers, args.versions)
    count = sum(p.numel() for p in models[0].parameters())
    print(f"{count / 1e6:.1f} million parameters in {models[0].dtype}")
    for transfer in args.transfers:
        engine = start(transfer, copy.deepcopy(models[0]), args)
        print(f"{transfer}: {getattr(engine, 'copies', 1)} copies")
        try:
            if args.forget:
                forget(engine)
            asyncio.run(play(engine, models, args))
        finally:
            engine.close()


if __name__ == "__main__":
    main()
