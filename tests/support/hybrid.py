"""A recipe of tiny hybrid models: one sequence a row, with their own attention."""

from dataclasses import dataclass
from typing import Any

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.recipes.build import build
from gspo_env.recipes.tiny import Tiny
from support import architectures


@dataclass(frozen=True, kw_only=True, slots=True)
class Hybrid(Tiny):
    """The recipe `tiny` with another architecture."""

    kind: str = "LFM2"

    def build(self, envs: Any, seed: int, limits: Any, show: Any) -> Any:
        model, tokenizer, demonstrations = build(envs, self, seed, limits, show)
        names = ("vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings")
        names += ("eos_token_id", "bos_token_id")
        shape = {name: getattr(model.config, name) for name in names}
        return architectures.build(self.kind, 1.0, **shape), tokenizer, demonstrations


def train(recipe: Hybrid, folder: str, **changes: Any) -> list[tuple[int, dict[str, float]]]:
    """Trains a model; returns the metrics of each step."""
    config = Config.from_recipe(recipe, **{"tracker": "none", "output": folder} | changes)
    return GSPOAgent(config=config).train()
