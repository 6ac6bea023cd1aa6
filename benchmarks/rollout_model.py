"""Compares sampling from a real model: the embedded engine, plain loops, `generate` and vLLM.

    python benchmarks/rollout_model.py [--model smollm2] [--dtype bfloat16] [--threads 1]
        [--prompts 8 ...] [--group 8] [--length 178 ...] [--new 48] [--rounds 3]
        [--vllm PYTHON] [--modes eager compiled] [--no-loops]
    python benchmarks/rollout_model.py --table --vllm PYTHON --rounds 1
    python benchmarks/rollout_model.py --dtype float32 --delays 0 0.05 0.5
    python benchmarks/rollout_model.py --dtype float32 --profile 1 8 16 64 128

Each program samples `--group` continuations of each prompt at temperature 1. The plain loop
computes each prompt once and keeps log-probabilities; `generate` of `transformers`, which TRL uses
without vLLM, does neither. PYTHON is the interpreter of an environment that has vLLM, which returns
log-probabilities and runs in child processes, eager and compiled. All programs alternate. The model
`0.6B` has random weights and the shape of Qwen3-0.6B.

The plain loop and `generate` keep a copy of the prompt for each sample, and `generate` computes
each. Above 25,000 tokens in all copies, both are left out. With `--table`, one table has both
dtypes, one and two threads, 2, 8 and 16 prompts, of 178 and of 1,500 tokens.

With one thread, the times are seconds of the processor; with more, or a GPU, of the clock.

With `--delays`, whole episodes are played instead: `--prompts` tasks with `--group` episodes of
three turns that share `--new` tokens, whose tool takes so many seconds a call. The rates, by the
clock, are compared with that of the engine alone, which samples as many tokens from the same
prompts.

With `--profile`, it prints how long a decode step of so many sequences takes, each with its own
prompt, and what for.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import gspo_env  # noqa: F401 before torch, since it decides how threads wait

# isort: split
import torch
from common import alternate, make_model, show
from transformers import DynamicCache

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines.base import Sampling
from gspo_env.engines.embedded.compiled import CompiledRows
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.base import TextEnv
from gspo_env.model.export import Exporter, named_weights
from gspo_env.model.load import load_model
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.runtime.loops import run_alone
from gspo_env.types import Task

Ids = list[list[int]]
TURNS = 3
TABLE = ["--prompts", "2", "8", "16", "--length", "178", "1500"]
PROGRAMS = ("ours", "vLLM, compiled", "vLLM, eager", "plain loop", "generate")
LARGEST = 25_000
"""Tokens of the prompts of all samples of a loop."""


def load(name: str, dtype: str) -> tuple[Any, Any]:
    """Loads a model and its tokenizer; for `0.6B`, one with random weights, and characters."""
    if name != "0.6B":
        return load_model(name, dtype)
    return make_model(name, dtype), lambda text, **_: SimpleNamespace(input_ids=[*map(ord, text)])


def make_prompts(tokenizer: Any, count: int, length: int, first: int = 2) -> Ids:
    """Returns prompts that differ from their first words, the numbers from `first` on."""
    texts = (
        f"{n} people ask why the sky is blue, and you answer briefly, in plain words. " * length
        for n in range(first, first + count)
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
    """Samples with the embedded engine."""

    async def play() -> None:
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

    def __init__(self, folder: str, mode: str, arguments: argparse.Namespace) -> None:
        program = Path(__file__).with_name("vllm_child.py")
        context, rows = max(arguments.length) + arguments.new, max(arguments.prompts)
        options = [arguments.dtype, mode, arguments.threads, context, rows * arguments.group]
        ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # vLLM's threads wait as they always do
        own = {name: value for name, value in os.environ.items() if name not in ours}
        self._process = subprocess.Popen(
            [arguments.vllm, str(program), folder, *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=own | {"OMP_NUM_THREADS": str(arguments.threads)},
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


def part_of(event: Any, words: int) -> str:
    """Returns the part of a decode step that an operation belongs to."""
    product = "linear" in event.key or event.key in ("aten::mm", "aten::addmm")
    if any(words in shape for shape in event.input_shapes if shape):
        return "head" if product else "sampling"
    if product:
        return "products"
    attention = ("bmm", "softmax", "index", "copy", "cat", "attention")
    return "attention" if any(name in event.key for name in attention) else "rest"


def profile_steps(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    """Prints the milliseconds of a decode step and of its parts, for each number of sequences."""
    length, new = arguments.length[0], arguments.new
    prompts = make_prompts(tokenizer, max(arguments.profile), length)
    # the profiler sees only operations of PyTorch
    CompiledRows.attend = torch.profiler.record_function("attention")(CompiledRows.attend)
    for rows in arguments.profile:
        engine = TransformersEngine(model, max_slots=rows, max_context=length + new)

        async def decode(profiler: Any, engine=engine, rows=rows) -> tuple[float, float]:
            """Returns the seconds of the steps after the prompts, and how many they are."""
            await engine.update_weights([], 0)
            fed = engine.fed_tokens + rows * length
            samplings = (Sampling(max_tokens=new, seed=n) for n in range(rows))
            playing = asyncio.gather(*map(engine.generate, prompts[:rows], samplings))
            while engine.fed_tokens < fed:
                await asyncio.sleep(0)
            started, fed = clock(arguments.threads), engine.fed_tokens
            with profiler:
                await playing
            return clock(arguments.threads) - started, (engine.fed_tokens - fed) / rows

        seconds, steps = zip(
            *(asyncio.run(decode(nullcontext())) for _ in range(arguments.rounds)), strict=True
        )
        total = 1000 * median(seconds) / steps[0]
        parts: Counter[str] = Counter()
        profiler = torch.profiler.profile(record_shapes=True)
        asyncio.run(decode(profiler))
        for event in profiler.key_averages(group_by_input_shape=True):
            part = part_of(event, model.config.vocab_size)
            parts[part] += event.self_cpu_time_total / 1000 / steps[0]
        parts["rest"] += total - parts.total()
        figures = ", ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in parts.items())
        print(f"{rows} sequences: {total:.1f} ms: {figures}", flush=True)


class SlowTool(TextEnv):
    """Answers each of three actions after a time."""

    def __init__(self, delay: float, length: int) -> None:
        self._delay, self._text = delay, "you answer briefly, in plain words. " * (length // 8)

    def reset(self, *, seed=None, options=None):
        """Asks about a number."""
        super().reset(seed=seed)
        self._turn = 0
        return f"{seed} people ask why the sky is blue, and {self._text}", {}

    def step(self, action):
        """Waits, as for the answer of another service."""
        time.sleep(self._delay)
        self._turn += 1
        return "Go on.", 0.0, self._turn == TURNS, False, {}


def compare_delays(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    """Prints the rate of whole episodes as a share of the engine's own, for each delay."""
    chat, rows = ChatTokenizer(tokenizer), arguments.prompts[0] * arguments.group
    length = arguments.length[0]
    context = 2 * length + arguments.new
    engine = TransformersEngine(model, max_slots=rows, max_context=context)
    limits = RolloutConfig(
        max_turn_tokens=arguments.new // TURNS,
        max_context=context,
        concurrency=rows,
        group_size=arguments.group,
    )
    tasks = [Task(env_id="slow", seed=n) for n in range(arguments.prompts[0])]

    def play(delay: float) -> Callable[[], tuple[list[Any], float]]:
        pool = EnvPool(lambda: SlowTool(delay, length))
        collector = Collector(engine, chat, pool, limits)

        def run() -> tuple[list[Any], float]:
            asyncio.run(engine.update_weights([], 0))
            started = time.perf_counter()
            groups = run_alone(collector.collect(tasks, seed=0))
            seconds = time.perf_counter() - started
            episodes = [episode for group in groups for episode in group.episodes]
            return episodes, sum(e.model_tokens for e in episodes) / seconds

        return run

    programs = {delay: play(delay) for delay in arguments.delays}
    episodes, _ = programs[min(programs)]()
    prompts = [list(e.turns[0].prompt_ids) for e in episodes[:: arguments.group]]
    new = sum(e.model_tokens for e in episodes) // rows

    def alone() -> float:
        asyncio.run(engine.update_weights([], 0))
        started = time.perf_counter()
        sample_ours(engine, prompts, arguments.group, new)
        return rows * new / (time.perf_counter() - started)

    columns = alternate(arguments.rounds, alone, *(lambda p=p: p()[1] for p in programs.values()))
    print(
        f"{rows} episodes of {TURNS} turns and {new} sampled tokens, load {os.getloadavg()[0]:.1f}"
    )
    show("the engine alone", columns[0], "tokens/s")
    for delay, rates in zip(programs, columns[1:], strict=True):
        show(f"episodes, {1000 * delay:.0f} ms a call", rates, "tokens/s")
        share = median(rate / own for own, rate in zip(columns[0], rates, strict=True))
        print(f"    {share:.2f} of the engine's own rate (median of the pairs)")


def compare(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    """Prints the rates, and ours as a ratio to each, and last all of it as rows of a table."""
    plain = copy.deepcopy(model.eval())
    plain.set_attn_implementation("sdpa")
    children: dict[str, VLLMChild] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.vllm:
            Exporter(plain, untie=False).write(named_weights(plain), Path(folder))
            tokenizer.save_pretrained(folder)
            children = {mode: VLLMChild(folder, mode, arguments) for mode in arguments.modes}
        lines = []
        for length in arguments.length:
            for count in arguments.prompts:
                rates = compare_rates(model, plain, tokenizer, children, arguments, count, length)
                lines.append(format_row(rates, arguments, count, length))
                gc.collect()  # an engine that is kept has gigabytes of keys and values
        for child in children.values():
            child.close()
    print("\n".join(lines))


def compare_rates(
    model: Any,
    plain: Any,
    tokenizer: Any,
    children: dict[str, VLLMChild],
    arguments: argparse.Namespace,
    count: int,
    length: int,
) -> dict[str, list[float]]:
    """Samples with all programs in turns; returns and prints the rates of each."""
    new, rows = arguments.new, count * arguments.group
    engine = TransformersEngine(model, max_slots=rows, max_context=length + new)
    # each round has prompts of its own, so that no cache has them
    texts = make_prompts(tokenizer, count * (arguments.rounds + 1), length)

    def rate(seconds: Callable[[Ids, int], float]) -> Callable[..., float]:
        batches = iter(range(0, len(texts), count))

        def run(new: int = new) -> float:
            first = next(batches)
            return rows * new / seconds(texts[first : first + count], new)

        return run

    def timed(program: Callable[..., None], subject: Any) -> Callable[..., float]:
        def seconds(prompts: Ids, new: int) -> float:
            started = clock(arguments.threads)
            program(subject, prompts, arguments.group, new)
            return clock(arguments.threads) - started

        return rate(seconds)

    programs = {"ours": timed(sample_ours, engine)}
    loops = {"plain loop": sample_plainly, "generate": generate}
    for name, program in loops.items():
        if arguments.loops and rows * length <= LARGEST:
            programs[name] = timed(program, plain)
    for mode, child in children.items():
        programs[f"vLLM, {mode}"] = rate(lambda p, n, c=child: c.seconds(p, arguments.group, n))
    for name in programs.keys() - loops.keys():
        programs[name](2)  # compiles kernels
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(arguments.rounds):
        for name, values in rates.items():
            values.append(programs[name]())
    print(f"{rows} samples of {count} prompts of {length} tokens, {arguments.threads} threads")
    for name, values in rates.items():
        show(name, values, "tokens/s")
        print(f"    ours is {ratio_to(values, rates):.2f} times as fast (median of the pairs)")
    sys.stdout.flush()
    return rates


def ratio_to(values: list[float], rates: dict[str, list[float]]) -> float:
    """Returns how many times as fast ours is, as the median of the pairs."""
    return median(ours / other for ours, other in zip(rates["ours"], values, strict=True))


def format_row(
    rates: dict[str, list[float]], arguments: argparse.Namespace, count: int, length: int
) -> str:
    """Returns a row of the table."""
    cells = [arguments.dtype, arguments.threads, f"{length:,}", count * arguments.group]
    for name in PROGRAMS:
        values = rates.get(name)
        ratio = f" ({ratio_to(values, rates):.2f} x)" if values and name != "ours" else ""
        cells.append(f"{median(values):.0f}{ratio}" if values else "")
    return f"| {' | '.join(map(str, cells))} |"


def make_table(arguments: list[str]) -> None:
    """Prints one table; dtypes and threads have processes of their own."""
    rows = []
    for threads in "12":
        for dtype in ("float32", "bfloat16"):
            options = ["--dtype", dtype, "--threads", threads, *TABLE, *arguments]
            command = [sys.executable, __file__, *options]
            program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            for line in program.stdout:
                print(line, end="", flush=True)
                rows += [line] if line.startswith("| ") else []
            if program.wait():
                raise SystemExit(f"{' '.join(command)} ended with {program.returncode}")
    names = ["dtype", "threads", "prompt", "samples", *PROGRAMS]
    print(f"\n| {' | '.join(names)} |\n{'|---' * len(names)}|\n{''.join(rows)}", end="")


def main() -> None:
    """Runs what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vllm", default="")
    parser.add_argument("--modes", nargs="+", default=["compiled", "eager"])
    parser.add_argument("--loops", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--profile", nargs="+", type=int, default=[])
    parser.add_argument("--delays", nargs="+", type=float, default=[])
    parser.add_argument("--prompts", nargs="+", type=int, default=[8])
    parser.add_argument("--length", nargs="+", type=int, default=[178])
    for name, size in {"threads": 1, "group": 8, "new": 48, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    if arguments.table:
        make_table([option for option in sys.argv[1:] if option != "--table"])
        return
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments.model, arguments.dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    print(f"{arguments}\n{device}, torch {torch.__version__}")
    if arguments.delays:
        compare_delays(model, tokenizer, arguments)
    elif arguments.profile:
        profile_steps(model, tokenizer, arguments)
    else:
        compare(model, tokenizer, arguments)


if __name__ == "__main__":
    main()
