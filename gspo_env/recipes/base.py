"""Base class of recipes: changes to the neutral config and, optionally, a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from gspo_env.env.base import TextEnvironment


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """No recipe: the neutral config, and a model that the config names."""

    changes: ClassVar[Mapping[str, Any]] = {}
    """Values by config field, nested as in a TOML file."""

    def build(self, env: TextEnvironment, env_id: str, seed: int) -> Any:
        """Makes a model if the config names none; see `gspo_env.recipes.embedded.build`."""
        return None
