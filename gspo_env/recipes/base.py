"""Base class of recipes: changes to the neutral config and, optionally, a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.env.base import TextEnvironment
    from gspo_env.rollout.settings import RolloutConfig
    from gspo_env.types import Episode

Show = Callable[[str, int, int], None]
"""Called with a phase and how many of how many parts of it are done."""


@settings
class Recipe:
    """No recipe: the neutral config, and a model that the config names."""

    changes: ClassVar[Mapping[str, Any]] = {}
    """Values by config field, nested as in a TOML file."""

    @property
    def demonstrates(self) -> bool:
        """Whether a model that the config names imitates demonstrations before it is trained."""
        return False

    @property
    def imitation_pass_at(self) -> int:
        """See `gspo_env.recipes.imitate.Imitate`."""
        return 0

    def build(
        self, envs: Mapping[str, TextEnvironment], seed: int, limits: RolloutConfig, show: Show
    ) -> Any:
        """Makes a model if the config names none; see `gspo_env.recipes.build.build`.

        Args:
            envs: The environments of the run, by the `env_id` of their tasks; nearly always one.
            seed: Seed of the run.
            limits: The settings of the rollout.
            show: Shows the progress.
        """
        return None

    def babble(self, envs: Mapping[str, TextEnvironment], seed: int, show: Show) -> list[Episode]:
        """Makes episodes to imitate for environments that have no demonstrator."""
        return []
