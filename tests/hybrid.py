"""Trains tiny hybrid models on the look-up task: one sequence a row, with their own attention.

`python tests/hybrid.py` prints success before and after, and the largest difference of
log-probabilities between engine and trainer over all updates; `... NAME --steps N` for one model.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.recipes.build import build
from gspo_env.recipes.tiny import Tiny

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hybrid(Tiny):
    """The recipe `tiny` with another architecture."""

    kind: str = "lfm2"

    def build(self, envs: Any, seed: int, limits: Any, show: Any) -> Any:
        model, tokenizer, demonstrations = build(envs, self, seed, limits, show)
        shape = {
            name: getattr(model.config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
                "tie_word_embeddings",
                "eos_token_id",
                "bos_token_id",
                "head_dim",
            )
        }
        config = CONFIG_MAPPING[self.kind](**shape, **copy.deepcopy(SHAPES[self.kind]))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config).float(), tokenizer, demonstrations


def train(recipe: Hybrid, folder: str, **changes: Any) -> list[tuple[int, dict[str, float]]]:
    """Trains a model; returns the metrics of each step."""
    config = Config.from_recipe(recipe, **{"tracker": "none", "output": folder} | changes)
    return GSPOAgent(config=config).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*SHAPES])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--imitation", type=int, default=280)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for kind in arguments.kinds:
        started = time.perf_counter()
        with TemporaryDirectory() as folder:
            history = train(
                Hybrid(kind=kind, imitation_steps=arguments.imitation),
                str(Path(folder) / "run"),
                env_kwargs={"hops": 1, "entries": 12},
                learner={
                    "learning_rate": 1e-3,
                    "warmup_steps": 5,
                    "schedule": "cosine",
                    "max_grad_norm": 1.0,
                },
                steps=arguments.steps,
                tasks_per_step=16,
                eval_every=0,
                eval_tasks=256,
            )
        success = [m["eval/success"] for _, m in history if "eval/success" in m]
        worst = max(m.get("train/logprob_diff_max", 0.0) for _, m in history)
        print(
            f"{kind}: success {success[0]:.1%} -> {success[-1]:.1%} in {arguments.steps} updates, "
            f"engine against trainer at most {worst:.1e}, {time.perf_counter() - started:.0f} s"
        )


if __name__ == "__main__":
    main()
