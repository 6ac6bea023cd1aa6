"""Measures updates of vLLM's weights: whole weights, and a LoRA adapter alone.

    python benchmarks/adapter_sync.py [--model smollm2] [--rank 16] [--servers] [--rounds 3]

`small` and `0.6B` are random Qwen3 models. For each way it prints the bytes and seconds of an
update, the greatest difference of the engine's log-probabilities from the trainer's over 8
completions after it, and the tokens sampled per second; above 1e-3 it exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from typing import Any

import torch
from common import make_model

from gspo_env.engines.base import Sampling
from gspo_env.engines.vllm.local import VLLM, VLLMEngine
from gspo_env.engines.vllm.server import VLLMServer, VLLMServerEngine
from gspo_env.model.adapters import add_adapter
from gspo_env.model.export import named_weights

PROMPTS = [list(range(5 + n, 37 + n)) for n in range(8)]
TOKENS = 32
MOST_DIFFERENCE = 1e-3


def main() -> None:
    """Measures both ways."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="see `common.make_model`")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--servers", action="store_true", help="one `vllm serve` process")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = add_adapter(make_model(arguments.model), arguments.rank).eval()
    worst = max(measure(model, alone, arguments) for alone in (False, True))
    sys.exit(not worst <= MOST_DIFFERENCE)


def measure(model: Any, alone: bool, arguments: argparse.Namespace) -> float:
    """Prints what updates cost; returns the greatest difference."""
    kind, settings = (VLLMServerEngine, VLLMServer) if arguments.servers else (VLLMEngine, VLLM)
    config = settings(enforce_eager=True, adapter_only=alone)
    engine = kind(model, config, max_slots=8, max_context=256)
    try:
        times, rates, worst = [], [], 0.0
        for version in range(1, arguments.rounds + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.02 * torch.randn_like(parameter))
            started = time.perf_counter()
            weights = named_weights(model, adapter=engine.adapter_only)
            asyncio.run(engine.update_weights(weights, version))
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
            log = asyncio.run(sample(engine))
            rates.append(len(log) * TOKENS / (time.perf_counter() - started))
            worst = max(worst, *(difference(model, *each) for each in log))
    finally:
        engine.close()
    named = named_weights(model, adapter=engine.adapter_only)
    size = sum(t.numel() * t.element_size() for _, t in named)
    print(
        f"{'adapter' if engine.adapter_only else 'whole weights'}: {size / 2**20:.1f} MiB, "
        f"{statistics.median(times):.2f} s, difference {worst:.1e}, "
        f"{statistics.median(rates):.0f} tokens/s",
        flush=True,
    )
    return worst


async def sample(engine: Any) -> list[tuple[list[int], Any]]:
    """Samples a completion of each prompt."""
    jobs = (
        engine.generate(prompt, Sampling(max_tokens=TOKENS, seed=n))
        for n, prompt in enumerate(PROMPTS)
    )
    return list(zip(PROMPTS, await asyncio.gather(*jobs), strict=True))


@torch.no_grad()
def difference(model: Any, prompt: list[int], done: Any) -> float:
    """Returns the greatest difference from the trainer's log-probabilities."""
    ids = torch.tensor([[*prompt, *done.token_ids]])
    logprobs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((torch.tensor(done.logprobs) - expected).abs().max())


if __name__ == "__main__":
    main()
