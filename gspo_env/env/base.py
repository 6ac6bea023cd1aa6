"""The environment contract: text in, text out, a reward for each turn."""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import gymnasium
import numpy as np
from gymnasium.spaces import Text
from gymnasium.vector.utils.shared_memory import create_shared_memory
from numpy.typing import NDArray

from gspo_env.errors import ConfigError, EnvironmentContractError
from gspo_env.redaction import clean as clean
from gspo_env.runtime.loops import make_synchronous
from gspo_env.types import Message, ResetInfo, StepInfo

if TYPE_CHECKING:
    from gspo_env.tools.tool import Tool

MAX_TEXT_LENGTH = 16384
MAX_OBSERVATION = 1_000_000
"""Maximum characters of any text of an environment; a longer one is a failure of its episode."""

_SAMPLE_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
_SAMPLE_LENGTH = 32

METHODS = (
    *("reset", "step", "close", "render", "expert_action"),
    *("abandon", "snapshot", "restore"),
    *("on_final", "on_tool_result", "on_tool_error", "step_info"),
)
"""The methods of an environment that may be `async def`."""

TextEnvironment = gymnasium.Env[str, str]
"""Any Gymnasium environment with text observations and actions."""
StepResult = tuple[str, float, bool, bool, dict[str, Any]]
ResetResult = tuple[str, dict[str, Any]]
Options = dict[str, Any] | None
"""The argument `options` of `reset`."""
Finish = Literal["stop", "length", "context"]
"""An action ended by itself, was cut at its limit of tokens, or its prompt did not fit at all; then
its text says why."""


class Action(str):
    """The action text that the rollout passes to `step`, with the token ids it was decoded from.

    An environment that scores or masks tokens (such as a process reward model) may return one value
    for each of `token_ids` as `token_advantages` or `token_mask`; see `gspo_env.types.StepInfo`.
    """

    token_ids: tuple[int, ...]
    message: Message | None
    """The action as a message, with its reasoning and calls; None if nothing has parsed it."""
    finish_reason: Finish
    """How the action ended; only environments with `takes_cut_actions` see others than "stop"."""
    in_reasoning: bool
    """Whether the prompt has opened the reasoning with which the action begins."""
    prompt_tokens: int
    """Tokens of the prompt that the action answers, also of one that did not fit; else 0."""
    stop_text: str | None
    """The text of `info["stop"]` that ended the action, if one did."""

    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int] = (),
        message: Message | None = None,
        finish_reason: Finish = "stop",
        prompt_tokens: int = 0,
        in_reasoning: bool = False,
        stop_text: str | None = None,
    ) -> Action:
        """Makes the text and stores the rest."""
        action = super().__new__(cls, text)
        action.token_ids, action.message = tuple(token_ids), message
        action.finish_reason, action.prompt_tokens = finish_reason, prompt_tokens
        action.in_reasoning, action.stop_text = in_reasoning, stop_text
        return action


class UnicodeText(Text):
    """Any Unicode text from `min_length` to `max_length` characters.

    `gymnasium.spaces.Text` holds only text over a listed character set. Here `characters` is the
    printable ASCII that `sample` draws from; `contains` checks only the length.

    Args:
        max_length: Maximum length in characters, inclusive.
        min_length: Minimum length in characters, inclusive.
        seed: Seed of `sample`.
    """

    def __init__(
        self, max_length: int, min_length: int = 0, *, seed: int | np.random.Generator | None = None
    ) -> None:
        """Sets the bounds."""
        super().__init__(max_length, min_length=min_length, charset=_SAMPLE_CHARACTERS, seed=seed)

    def sample(
        self,
        mask: tuple[int | None, NDArray[np.int8] | None] | None = None,
        probability: tuple[int | None, NDArray[np.float64] | None] | None = None,
    ) -> str:
        """Draws a short printable text; `mask` and `probability` work as in `Text.sample`."""
        if mask is None and probability is None:
            longest = max(self.min_length, min(self.max_length, _SAMPLE_LENGTH))
            mask = (int(self.np_random.integers(self.min_length, longest + 1)), None)
        return super().sample(mask, probability)

    def contains(self, x: Any) -> bool:
        """Returns whether `x` is text of an allowed length."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def __repr__(self) -> str:
        """Shows the bounds."""
        return f"UnicodeText({self.max_length}, min_length={self.min_length})"


@create_shared_memory.register(UnicodeText)
def _refuse_shared_memory(space: UnicodeText, n: int = 1, ctx: Any = None) -> NoReturn:
    """Refuses what would read every text as thousands of times the same letter.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        "shared_memory is True, and Gymnasium's shared memory holds no Unicode texts; expected "
        'False, as in gymnasium.make_vec(id, 8, "async", vector_kwargs={"shared_memory": False})'
    )


class TextEnv(gymnasium.Env[str, str]):
    """A Gymnasium environment whose observations and actions are text.

    `step` returns the reward of the turn. `gspo_env.types.ResetInfo` and `StepInfo` list the keys
    of `info` that training reads, such as `episodic_reward` and `success` on the last step.

    Args:
        max_turns: Turns after which `end_turn` truncates the episode; the class's value by default.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    observation_space = UnicodeText(MAX_TEXT_LENGTH)
    action_space = UnicodeText(MAX_TEXT_LENGTH)
    system_prompt: str | None = None
    """The system prompt, before the first observation; `reset` may change it."""
    tools: Sequence[Tool] = ()
    """The tools that the chat template lists; `reset` may change them."""
    blocking: bool | None = None
    """False if `reset` and `step` never block. All other environments run in threads, where the
    order of episodes, and so the rounding of a batch, is not reproducible. `abandon` and `close`
    run in a thread in any case."""
    limits_steps: bool = False
    """With `blocking = False`: whether `step` or `reset` calls functions that may hang, such as
    rewards. They then run in a thread for which the event loop waits, and have the time of an
    episode. Otherwise nothing can end a call on the event loop, and the log names its line."""
    max_copies: int | None = None
    """Copies that one process plays at once, such as those that have a container each; episodes
    wait for one, without losing time of their own. By default `rollout.concurrency`."""
    gives_outcome: bool = False
    """Whether finished episodes have an `episodic_reward`. Then an episode that the rollout cut has
    `outcome_if_cut`, else the sum of its rewards."""
    gives_reward: bool | None = None
    """False if no step ever has a reward and no episode an outcome: nothing can be learned."""
    outcome_if_cut: float = 0.0
    """Outcome of an episode that the rollout cut, with `gives_outcome`. It must not exceed the
    worst outcome of a finished episode, or the policy learns to be cut."""
    credit_score: Literal["turns", "outcome", "sum"] | None = None
    """Rewards that estimators of returns learn from: those of the turns, the outcome at the last
    turn, or the sum of both; None infers it from the first episodes of a run."""
    rewards_by_agent: bool = False
    """Whether each agent has a reward of its own, under its name in the last `reward_parts`, as
    opponents have. Only an estimator with `credits_agents = True` then trains a run."""
    expert_solves: bool = False
    """Whether `expert_action` solves every task, so that `gspo-env audit` reports those that it
    doesn't as broken."""
    group_reward: Callable[[Any], Awaitable[Any] | Any] | None = None
    """Adds rewards that see all finished episodes of a group: takes and returns a
    `gspo_env.types.Group`; see `gspo_env.rewards.score_group`. An `async def` must wait with
    `await`; a plain `def` runs in a thread. It has the time of an episode."""
    takes_cut_actions: bool = False
    """Whether `step` also takes actions that were cut at their limit of tokens or whose prompt did
    not fit (`Action.finish_reason`), and the episode goes on; otherwise such an episode ends."""
    count_tokens: Callable[[ResetInfo | StepInfo], int] | None = None
    """Counts the tokens of the prompt that follows an `info`. With `takes_cut_actions` the rollout
    sets it before `reset`; an environment in a child process has none."""
    max_turns: int | None = None
    """Turns after which `end_turn` truncates the episode."""
    num_tasks: int | None = None
    """Number of different tasks that `reset` can draw, if they are few; None if it is unknown."""
    num_eval_tasks: int | None = None
    """Number of tasks for evaluation, if it is known (`--eval-tasks all`): as many successive seeds
    from `gspo_env.seeding.HELD_OUT` on must draw each of them once, as `draw_index` does."""

    turns_played: int = 0
    """Turns that `end_turn` has counted in this episode, such as for the steps that remain in a
    `state_key`."""
    _ended: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes `async def` methods synchronous, so that every caller can use them."""
        super().__init_subclass__(**kwargs)
        make_synchronous(cls, METHODS)

    def __init__(self, max_turns: int | None = None) -> None:
        """Sets the limit on turns; a subclass without one need not call this."""
        if max_turns is not None:
            if not isinstance(max_turns, int) or max_turns < 1:
                name = type(self).__name__
                raise ConfigError(f"{name}: max_turns is {max_turns!r}, expected at least 1.")
            self.max_turns = max_turns

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Seeds `np_random` and begins an episode."""
        super().reset(seed=seed, options=options)
        self.turns_played, self._ended = 0, False
        return "", {}

    def blocks(self, action: str) -> bool:
        """Returns whether `step` may take long for this action although `blocking` is False.

        The rollout runs such a step in a thread. The answer must depend on the action alone, so
        that the same actions run in the same order.
        """
        return False

    def require_episode(self) -> None:
        """Raises an error if no episode is running; `step` calls it first.

        Raises:
            EnvironmentContractError: The episode has ended or has not begun.
        """
        if self._ended:
            raise EnvironmentContractError(
                f"{type(self).__name__}: step() was called outside an episode; call reset() first, "
                "which must call super().reset(seed=seed)."
            )

    def end_turn(self, terminated: bool, truncated: bool = False) -> tuple[bool, bool]:
        """Counts the turn and applies `max_turns`; returns both flags, never both true."""
        if "turns_played" not in vars(self):
            raise EnvironmentContractError(
                f"{type(self).__name__}: end_turn() counts the turns of an episode, which only "
                "TextEnv.reset begins; reset() must call super().reset(seed=seed)."
            )
        self.turns_played += 1
        late = self.max_turns is not None and self.turns_played >= self.max_turns
        truncated = not terminated and bool(truncated or late)
        self._ended = bool(terminated or truncated)
        return bool(terminated), truncated

    def abandon(self) -> None:
        """Frees what the running episode holds, because the rollout has cut it.

        The next call is `reset` or `close`. An environment that does not return within the time of
        an episode is not used again.
        """

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the next action of a scripted demonstrator.

        Args:
            noise: Probability of a wrong action, drawn from `np_random`.

        Raises:
            NotImplementedError: The environment has no demonstrator.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scripted demonstrator")


def attribute(env: TextEnvironment, name: str, default: Any) -> Any:
    """Returns an attribute of an environment, looked up through its wrappers, or the default."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def num_eval_tasks(env_id: str, env: TextEnvironment) -> int:
    """Returns the number of all tasks for evaluation of an environment.

    Raises:
        ConfigError: It does not declare the number.
    """
    number = attribute(env, "num_eval_tasks", None)
    if not number:
        raise ConfigError(
            f"the tasks of an evaluation are 'all', and {env_id} has no num_eval_tasks, because "
            "its seeds draw the tasks; expected a number of tasks"
        )
    return int(number)


def overrides(env: TextEnvironment, name: str) -> bool:
    """Returns whether an environment has a method or value of its own in place of `TextEnv`'s."""
    value = attribute(env, name, None)
    default = getattr(TextEnv, name, None)
    return value is not None and getattr(value, "__func__", value) is not default


def extract_tag(text: str, tag: str) -> str | None:
    """Returns the stripped content of the last `<tag>...</tag>`, or None if there is none.

    Example:
        >>> extract_tag("so <answer> 12 </answer>", "answer")
        '12'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None
