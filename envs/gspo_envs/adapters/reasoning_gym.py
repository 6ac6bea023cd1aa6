"""reasoning-gym's tasks: `gym.make("gspo/ReasoningGym-v0", task="chain_sum", attempts=3)`."""

from __future__ import annotations

import logging
import math
from typing import Any

from gspo_env.env.base import ResetResult, StepResult, extract_tag
from gspo_env.errors import ConfigError
from gspo_env.seeding import fingerprint
from gspo_envs.adapters.foreign import ForeignEnv, check_name, load, making

logger = logging.getLogger(__name__)

_RIGHT = 0.99
"""The package scores right answers with 1, up to rounding."""


class ReasoningGymEnv(ForeignEnv):
    """A task of reasoning-gym, answered in one turn or in several attempts with feedback.

    The reward of an attempt is its gain over the best score so far, so an episode's return is its
    best score. An answer on which the package's scorer raises scores 0.

    Args:
        task: Name of the data set, such as "chain_sum".
        attempts: Maximum number of answers.
        feedback: Whether the reply to a wrong answer contains its score.
        kwargs: The data set's own configuration, such as `min_terms=2`.

    Raises:
        ConfigError: The task is unknown or does not accept the configuration.
        MissingExtraError: reasoning-gym is not installed.
    """

    system_prompt = "Solve the task. Write your answer as <answer>answer</answer>."

    def __init__(
        self, task: str = "chain_sum", *, attempts: int = 1, feedback: bool = True, **kwargs: Any
    ) -> None:
        """Tries out the task."""
        super().__init__()
        package = load("reasoning_gym", "reasoning-gym", "reasoning-gym")
        factory = load("reasoning_gym.factory", "reasoning-gym", "reasoning-gym")
        check_name("reasoning-gym", task, factory.DATASETS)
        if attempts < 1:
            raise ConfigError(f"ReasoningGym: attempts is {attempts}, expected at least 1.")
        self.task, self.attempts, self.feedback = task, attempts, feedback
        self._create, self._kwargs = package.create_dataset, kwargs
        with making(task, f"made with {kwargs}", TypeError, ValueError, AssertionError):
            self.begin(0, {})

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Draws a data set of one entry."""
        self._data = self._create(self.task, seed=seed, size=1, **self._kwargs)
        self._entry = self._data[0]
        self._remaining, self._best = self.attempts, 0.0
        question = str(self._entry["question"])
        return question, {"task_key": fingerprint(question, str(self._entry["answer"]))}

    def act(self, action: str) -> StepResult:
        """Scores an answer."""
        self._remaining -= 1
        answer = extract_tag(action, "answer")
        info: dict[str, Any] = {}
        score = 0.0 if answer is None else self._score(answer, info)
        reward = max(0.0, score - self._best)
        self._best = max(self._best, score)
        right = score >= _RIGHT
        if right or self._remaining == 0:
            info["success"] = right
            return ("correct" if right else "wrong"), reward, True, False, info
        return self._hint(answer, score), reward, False, False, info

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the answer, or with probability `noise` a digit or word of the question."""
        answer = str(self._entry["answer"])
        if noise > 0.0 and self.np_random.random() < noise:
            words = str(self._entry["question"]).split()
            answer = words[int(self.np_random.integers(len(words)))]
        return f"<answer>{answer}</answer>"

    def _score(self, answer: str, info: dict[str, Any]) -> float:
        try:
            score = float(self._data.score_answer(answer, self._entry))
        except Exception as error:  # scorers parse answers in many ways, not all of them careful
            logger.info("the scorer of %s raised: %r", self.task, error)
            info["scorer_error"] = f"{type(error).__name__}: {error}"
            return 0.0
        return score if math.isfinite(score) else 0.0

    def _hint(self, answer: str | None, score: float) -> str:
        remaining = f"{self._remaining} {'attempt' if self._remaining == 1 else 'attempts'} left."
        if answer is None:
            return f"Write your answer as <answer>answer</answer>. {remaining}"
        score_note = f" (score {score:.2f})" if self.feedback else ""
        return f"That is not right{score_note}. {remaining}"
