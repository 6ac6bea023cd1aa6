"""Tool environments whose episode ends with an answer that is right or wrong."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from gspo_env.env.base import Options, ResetResult
from gspo_env.env.tool_env import ToolEnv


class AnswerEnv(ToolEnv):
    """A right answer gives 1.0 and ends the episode with success; a wrong one just ends it."""

    gives_outcome = True
    early_answer: float = 0.0
    """Probability that the noisy demonstrator answers before it knows."""
    _success: bool = False
    _early: bool | None = None

    @abstractmethod
    def is_right(self, text: str) -> bool:
        """Judge an action without a call."""

    @property
    @abstractmethod
    def _state_key(self) -> str:
        """What of the state decides the rest of the episode."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begin an episode."""
        result = super().reset(seed=seed, options=options)
        self._success, self._early = False, None
        return result

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """End with the answer."""
        self._success = self.is_right(text)
        return ("correct", 1.0, True) if self._success else ("wrong", 0.0, True)

    def step_info(self, terminated: bool, truncated: bool) -> dict[str, Any]:
        """Give the state, and at the end the outcome."""
        info: dict[str, Any] = {"state_key": self._state_key}
        if terminated or truncated:
            info.update(success=self._success, episodic_reward=float(self._success))
        return info

    def _is_early(self, noise: float) -> bool:
        """Whether the noisy demonstrator answers early, drawn once an episode."""
        if noise > 0.0 and self._early is None:
            self._early = bool(self.np_random.random() < self.early_answer)
        return noise > 0.0 and self._early is True
