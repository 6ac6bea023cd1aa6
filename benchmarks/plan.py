"""The memory that `gspo-env doctor --plan` foretells against the memory that an update then takes.

    python benchmarks/plan.py

Each configuration trains in a process of its own on episodes of the greatest length. What the
libraries take is measured there first, by an update of a tiny model, and taken off the peak.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
from pathlib import Path

MIB = 2**20
CASES = {
    "20 M, every weight": (
        {"hidden_size": 384, "layers": 8, "vocab_size": 16_384},
        {"context": 512, "microbatch_tokens": 4096},
        {},
    ),
    "28 M, checkpointing, KL to a frozen copy": (
        {"hidden_size": 512, "layers": 6, "vocab_size": 16_384},
        {"context": 1024, "microbatch_tokens": 2048},
        {"checkpointing": True, "kl_coef": 0.01},
    ),
    "28 M, LoRA of rank 8": (
        {"hidden_size": 512, "layers": 6, "vocab_size": 16_384},
        {"context": 512, "microbatch_tokens": 2048},
        {"lora_rank": 8},
    ),
    "13 M, longer episodes": (
        {"hidden_size": 256, "layers": 6, "vocab_size": 32_768},
        {"context": 768, "microbatch_tokens": 6144},
        {},
    ),
}


def make_config(folder: str, case: str):
    """A run over a model of the case's shape, whose configuration is written to the folder."""
    from transformers import Qwen3Config

    from gspo_env.config import Config
    from gspo_env.learner import GSPO, LearnerConfig
    from gspo_env.rollout.collector import RolloutConfig

    shape, sizes, options = CASES[case]
    options = dict(options)
    Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=3 * shape["hidden_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["hidden_size"] // 64,
        num_key_value_heads=shape["hidden_size"] // 128,
        head_dim=64,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return Config(
        model=folder,
        tasks_per_step=2,
        rollout=RolloutConfig(max_context=sizes["context"], max_turn_tokens=64, group_size=8),
        objective=GSPO(kl_coef=options.pop("kl_coef", 0.0)),
        learner=LearnerConfig(
            minibatches=1,
            warmup_steps=0,
            microbatch_tokens=sizes["microbatch_tokens"],
            **options,
        ),
    )


def _measure(folder: str, case: str, answer) -> None:
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from gspo_env.batch.sample import Sample
    from gspo_env.learner.learner import Learner

    torch.set_num_threads(1)
    config = make_config(folder, case)

    def train(shape, length, count):
        model = AutoModelForCausalLM.from_config(shape).float()
        if config.learner.lora_rank:
            from peft import LoraConfig, get_peft_model

            rank = config.learner.lora_rank
            model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        learner = Learner(model, config.objective, config.learner, total_steps=4)
        rng = np.random.default_rng(0)
        samples = [
            Sample(
                token_ids=rng.integers(0, shape.vocab_size, length),
                turn_ids=np.array([-1] + [0] * (length - 1)),
                advantages=np.ones(length - 1) * (-1) ** n,
            )
            for n in range(count)
        ]
        for seed in range(2):
            learner.update(samples, seed)

    shape = AutoConfig.from_pretrained(folder)
    tiny = AutoConfig.from_pretrained(
        folder, num_hidden_layers=1, vocab_size=64, hidden_size=64, intermediate_size=64
    )
    train(tiny, 8, 2)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    longest = config.rollout.max_context
    train(shape, longest, 2 * config.learner.microbatch_tokens // longest)
    answer.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def measured(folder: str, case: str) -> int:
    """Bytes above what the libraries take."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=_measure, args=(folder, case, answer))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"the process of {case!r} ended with {child.exitcode}")
    return answer.get()


def main() -> None:
    """Prints both for every configuration."""
    from gspo_env.cli.memory import plan

    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this one")
    chosen = parser.parse_args().case
    for case in CASES if chosen is None else [list(CASES)[chosen]]:
        with tempfile.TemporaryDirectory() as folder:
            said = plan(make_config(folder, case)).update
            found = measured(folder, case)
        off = said / found - 1
        verdict = "met" if abs(off) <= 0.2 else "NOT met"
        print(
            f"{case:44} planned {said / MIB:7.0f} MiB, measured {found / MIB:7.0f} MiB, "
            f"{off:+.0%} (within 20 % wanted: {verdict})",
            flush=True,
        )


if __name__ == "__main__":
    main()
