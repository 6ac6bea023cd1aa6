"""Compares sampling from a real model: the embedded engine, plain loops, `generate` and vLLM.

    python benchmarks/rollout_model.py [--model smollm2] [--dtype bfloat16] [--threads 1]
        [--prompts 8] [--group 8] [--length 178] [--new 48] [--rounds 3]
        [--vllm PYTHON] [--modes eager compiled] [--no-loops]

Each program samples `--group` continuations of each prompt at temperature 1. The plain loop
computes each prompt once and keeps log-probabilities; `generate` of `transformers`, which TRL uses
without vLLM, does neither. PYTHON is the interpreter of an environment that has vLLM, which returns
log-probabilities and runs in child processes, eager and compiled. All programs alternate.

With one thread, the times are seconds of the processor; with more, or a GPU, of the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import alternate, show
from transformers import DynamicCache

from gspo_env.engines.base import Sampling
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.model.export import Exporter, named_weights
from gspo_env.model.load import load_model

Ids = list[list[int]]


def make_prompts(tokenizer: Any, count: int, length: int) -> Ids:
    """Returns prompts that differ from their first words."""
    texts = (
        f"{n} people ask why the sky is blue, and you answer briefly, in plain words. " * length
        for n in range(2, count + 2)
    )
    return [tokenizer(text, add_special_tokens=False).input_ids[:length] for text in texts]


def clock(threads: int) -> float:
    """Returns seconds of the processor for one thread, else, or with a GPU, of the clock."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif threads == 1:
        return time.process_time()
    return time.perf_counter()


def sample_ours(engine: TransformersEngine, prompts: Ids, group: int, new: int) -> None:
    """Samples with an empty cache."""

    async def play() -> None:
        await engine.update_weights([], 0)
        rows = enumerate(prompt for prompt in prompts for _ in range(group))
        await asyncio.gather(
            *(engine.generate(prompt, Sampling(max_tokens=new, seed=n)) for n, prompt in rows)
        )

    asyncio.run(play())


def sample_plainly(model: Any, prompts: Ids, group: int, new: int) -> None:
    """Samples in a loop; each prompt is computed once."""
    cache, options = DynamicCache(), {"use_cache": True, "logits_to_keep": 1}
    with torch.inference_mode():
        ids = torch.tensor(prompts, device=model.device)
        out = model(input_ids=ids, past_key_values=cache, **options)
        cache.batch_repeat_interleave(group)
        logits = out.logits.repeat_interleave(group, 0)
        for n in range(new):
            logprobs = torch.log_softmax(logits[:, -1].float(), dim=-1)
            ids = torch.multinomial(logprobs.exp(), 1)
            logprobs.gather(-1, ids)
            if n + 1 < new:
                logits = model(input_ids=ids, past_key_values=cache, **options).logits


def generate(model: Any, prompts: Ids, group: int, new: int) -> None:
    """Samples with `generate`."""
    ids = torch.tensor(prompts, device=model.device).repeat_interleave(group, 0)
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, **lengths)


class VLLMChild:
    """vLLM in a process of another environment; see `vllm_child.py`."""

    def __init__(self, python: str, folder: str, mode: str, arguments: argparse.Namespace) -> None:
        program = Path(__file__).with_name("vllm_child.py")
        rows = arguments.prompts * arguments.group
        options = [arguments.dtype, mode, arguments.threads, arguments.length + arguments.new, rows]
        self._process = subprocess.Popen(
            [python, str(program), folder, *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(arguments.threads)},
        )

    def seconds(self, prompts: Ids, group: int, new: int) -> float:
        """Returns the seconds of one batch."""
        request = {"prompts": [p for p in prompts for _ in range(group)], "new": new}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"vLLM ended with {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Prints the rates, and ours as a ratio to each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vllm", default="")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--loops", action=argparse.BooleanOptionalAction, default=True)
    sizes = {"threads": 1, "prompts": 8, "group": 8, "length": 178, "new": 48, "rounds": 3}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_model(arguments.model, arguments.dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    plain = copy.deepcopy(model.eval())
    plain.set_attn_implementation("sdpa")
    rows = arguments.prompts * arguments.group
    context = arguments.length + arguments.new
    engine = TransformersEngine(model, max_slots=rows, max_context=context)
    batch = make_prompts(tokenizer, arguments.prompts, arguments.length), arguments.group
    tokens = rows * arguments.new

    def rate(program: Callable[..., None], subject: Any) -> Callable[[], float]:
        def run() -> float:
            started = clock(arguments.threads)
            program(subject, *batch, arguments.new)
            return tokens / (clock(arguments.threads) - started)

        return run

    programs = {"ours": rate(sample_ours, engine)}
    if arguments.loops:
        programs |= {"plain loop": rate(sample_plainly, plain), "generate": rate(generate, plain)}
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        if arguments.vllm:
            Exporter(plain, untie=False).write(named_weights(plain), Path(folder))
            tokenizer.save_pretrained(folder)
            for mode in arguments.modes:
                child = children[mode] = VLLMChild(arguments.vllm, folder, mode, arguments)
                programs[f"vLLM, {mode}"] = lambda child=child: (
                    tokens / child.seconds(*batch, arguments.new)
                )
        columns = alternate(arguments.rounds, *programs.values())
        for child in children.values():
            child.close()
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else torch.backends.cpu.get_cpu_capability()
    )
    print(f"{arguments}\n{device}, torch {torch.__version__}")
    for name, rates in zip(programs, columns, strict=True):
        show(name, rates, "tokens/s")
        ratio = median(ours / other for ours, other in zip(columns[0], rates, strict=True))
        print(f"    ours is {ratio:.2f} times as fast (median of the pairs)")


if __name__ == "__main__":
    main()
