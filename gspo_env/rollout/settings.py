"""The settings of the rollout, and of the groups that training takes from it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from gspo_env.errors import ConfigError, PromptLengthError
from gspo_env.registry import require
from gspo_env.settings import settings


@settings
class RolloutConfig:
    """How episodes are collected."""

    group_size: Annotated[int, Ge(1)] = 8
    """Episodes of each task, G."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Sampling temperature in training; the trainer divides its logits by it too."""
    max_turns: Annotated[int, Ge(1)] = 16
    """Turns after which an episode is cut."""
    max_turn_tokens: Annotated[int, Ge(1)] = 512
    """Maximum tokens of one action."""
    max_context: Annotated[int, Ge(1)] = 4096
    """Maximum tokens of one prompt and its action."""
    episode_timeout: Annotated[float, Gt(0)] = 600.0
    """Maximum seconds of one episode, including time spent waiting for the engine."""
    concurrency: Annotated[int, Ge(1)] = 256
    """Maximum number of episodes in flight."""
    isolation: Literal["thread", "process"] = "thread"
    """Where environments run: in threads of this process, or each in a child process, which is
    killed if it hangs or crashes."""
    max_retries: Annotated[int, Ge(0)] = 2
    """Times that an episode is played again, in another environment, if its environment failed."""
    max_env_error_rate: Annotated[float, Interval(ge=0, le=1)] = 0.5
    """The run stops if a larger share of a rollout's episodes failed after every retry, or all."""
    workers: str = "asyncio"
    """Where episodes are played: `asyncio` in this process, or `ray:8` in 8 Ray actors, which
    sample on the servers of the engine `vllm-server`."""
    ray_address: str = ""
    """Address of a running Ray cluster of which this machine is a part, such as `10.0.0.1:6379`;
    empty starts one on this machine for the run."""
    max_worker_restarts: Annotated[int, Ge(0)] = 10
    """How often workers that died are started again, all together in a run."""

    @property
    def ray_workers(self) -> int:
        """Number of Ray actors; 0 plays in this process."""
        match = re.fullmatch(r"ray:([1-9]\d{0,3})", self.workers)
        return int(match[1]) if match else 0

    def require(self) -> None:
        """Checks that Ray is installed if workers need it.

        Raises:
            MissingExtraError: It is not.
        """
        if self.ray_workers:
            require("ray", f"rollout.workers {self.workers!r}", "'gspo-env[ray]'")

    def answer_tokens(self, prompt: int, requested: int | None, *, fills: bool) -> int:
        """Returns the most tokens of an answer.

        Args:
            prompt: Tokens of the prompt.
            requested: The limit of the request, if it has one.
            fills: Without a limit of the request, take what is left of the context.

        Raises:
            PromptLengthError: Both do not fit into the context.
        """
        most = min(self.max_turn_tokens if requested is None else requested, self.max_turn_tokens)
        room = self.max_context - prompt
        if fills and requested is None and room > 0:
            most = min(most, room)
        if most > room:
            raise PromptLengthError(self.max_context, prompt, most)
        return most

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if self.workers != "asyncio" and not self.ray_workers:
            raise ConfigError(f"workers is {self.workers!r}; expected 'asyncio', or 'ray:8'")
        if self.ray_workers > self.concurrency:
            raise ConfigError(
                f"workers is {self.workers!r} and concurrency {self.concurrency}; expected at "
                "least one episode in flight for each worker"
            )
        if self.max_turn_tokens >= self.max_context:
            raise ConfigError(
                f"max_turn_tokens is {self.max_turn_tokens}; expected less than max_context "
                f"({self.max_context})"
            )


@settings
class SupplyConfig:
    """Which groups a training step takes, and how old they may be."""

    max_staleness: Annotated[int, Ge(0)] = 0
    """Updates that a group may miss between its first action and its own update. 0 plays and
    updates in turn. Above 0 the rollout goes on while the learner updates, on a copy of the
    weights; `loss.correction` is then `truncated` unless it is set."""
    max_resamples: Annotated[int, Ge(0)] = 0
    """Times that another task is played in place of a group whose episodes have the same rewards,
    or whose success is outside of `min_success` to `max_success`; 0 trains on every group."""
    min_success: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Least share of successful episodes of a group; see `max_resamples`."""
    max_success: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Greatest share of successful episodes of a group; see `max_resamples`."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        low, high = self.min_success, self.max_success
        if low > high:
            raise ConfigError(
                f"min_success is {low!r} and max_success {high!r}; expected the first not above "
                "the second"
            )
        if (low, high) != (0.0, 1.0) and not self.max_resamples:
            raise ConfigError(
                f"min_success is {low!r} and max_success {high!r} with max_resamples 0, so they "
                "have no effect; expected max_resamples of at least 1"
            )
