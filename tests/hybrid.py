"""A recipe of tiny hybrid models: one sequence a row, with their own attention."""

from __future__ import annotations

import copy
from dataclasses import dataclass
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
