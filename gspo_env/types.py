"""Records of the stages from task to update; every stage returns new ones.

Axis letters: P tasks, G episodes of a group, K turns, T tokens, N model tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

LARGEST_REWARD = 1e15
"""Size of a reward, beyond which the squares of gradients overflow float32."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

Role = Literal["user", "tool"]
"""Source of an observation: the user, or a tool that the policy called."""

Fork = Literal["template", "edited", "compacted", "new"]
"""Why a turn does not continue the tokens of the turn before it: the chat template renders earlier
turns otherwise than they were sampled, the conversation was edited, it was replaced by a shorter
one, or it is another conversation."""

VersionRuns = tuple[tuple[int, int], ...]
"""Versions of the weights that sampled the tokens of an action: runs of (version, tokens), in the
order of the tokens; empty if one version sampled all."""

Score = Literal["turns", "outcome", "sum"]
"""The rewards that estimators of returns use: those of the turns, the outcome at the last turn, or
their sum; see `gspo_env.credit.turn_rewards`."""


class StopReason(StrEnum):
    """Why an episode ended; the name reaches the metrics as `rollout/stop/REASON`."""

    TERMINATED = "terminated"
    """The environment reached a terminal state."""
    TRUNCATED = "truncated"
    """The environment's own limit (such as Gymnasium's `TimeLimit`) cut the episode."""
    MAX_TURNS = "max_turns"
    """The rollout's limit on turns."""
    MAX_TURN_TOKENS = "max_turn_tokens"
    """An action did not end within the rollout's limit on sampled tokens of one turn."""
    MAX_CONTEXT = "max_context"
    """The next prompt leaves no room for an action within the context limit."""
    TIMEOUT = "timeout"
    """The rollout's limit on wall-clock time, while the policy acted."""
    ERROR = "error"
    """The environment raised an exception. This reason and those below are failures: the episode is
    neither scored nor trained on, and `Episode.error` says why."""
    INVALID = "invalid"
    """The environment returned what the contract does not allow, such as a reward that is NaN."""
    ENV_TIMEOUT = "env_timeout"
    """The environment did not return within the rollout's limit on wall-clock time."""
    CRASH = "crash"
    """The process of the environment ended."""
    UNSCORED = "unscored"
    """No reward function and no judge gave the episode a reward; it is not played again."""


ENDED = frozenset({StopReason.TERMINATED, StopReason.TRUNCATED})
"""The reasons for which the environment itself ends an episode; every other reason cuts it."""

FAILURES = frozenset(
    {
        *(StopReason.ERROR, StopReason.INVALID, StopReason.ENV_TIMEOUT, StopReason.CRASH),
        StopReason.UNSCORED,
    }
)
"""The reasons for which an episode is neither scored nor trained on: its environment failed, or
nothing scored it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """How an environment failed.

    Example:
        >>> Fault(reason=StopReason.CRASH, message="its process ended", where="exit code 1").reason
        <StopReason.CRASH: 'crash'>
    """

    reason: StopReason
    """One of `FAILURES`."""
    message: str
    """What it did, in one sentence, with the file and the line that raised."""
    where: str
    """The file and the line that raised, or what was wrong; equal for failures of one cause."""
    traceback: str = ""
    """The traceback of an exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How an episode ended; `gspo_env.rollout.play.conclude` makes it.

    Example:
        >>> ending = Ending(reason=StopReason.MAX_TURNS, outcome=-1.0, success=False)
        >>> ending.ended, ending.terminated, ending.truncated, ending.failed
        (False, False, True, False)
    """

    reason: StopReason
    """Why it ended."""
    outcome: float | None = None
    """The outcome that the environment gave or declares; None if the outcome is the sum of the
    turns' rewards."""
    success: bool | None = None
    """Whether the episode succeeded; None if an outcome above 0 is a success."""
    fault: Fault | None = None
    """How the environment failed, if it did."""

    @property
    def ended(self) -> bool:
        """Whether the environment itself ended the episode."""
        return self.reason in ENDED

    @property
    def terminated(self) -> bool:
        """Whether the environment reached a terminal state."""
        return self.reason is StopReason.TERMINATED

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut, by the environment or the rollout."""
        return not self.terminated and not self.failed

    @property
    def failed(self) -> bool:
        """Whether the environment failed: the episode is neither scored nor trained on."""
        return self.reason in FAILURES


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One environment instance, which all episodes of a group share.

    Example:
        >>> Task(env_id="gspo/Lookup-v0", seed=3, options={"hops": 2})
        Task(env_id='gspo/Lookup-v0', seed=3, options={'hops': 2})
    """

    env_id: str
    """The registered id of the environment, or its name among several."""
    seed: int
    """The `seed` of `reset`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The `options` of `reset`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A well-formed call of a tool: a name and JSON arguments, not yet validated.

    Example:
        >>> ToolCall(name="lookup", arguments={"key": "amber"})
        ToolCall(name='lookup', arguments={'key': 'amber'}, id='')
    """

    name: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """The arguments by name."""
    id: str = ""
    """Name of the call in a conversation, to which the message with its result refers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation.

    Example:
        >>> message = Message(role="tool", content="cedar", name="lookup")
        >>> message.role, message.tool_calls
        ('tool', ())
    """

    role: Literal["system", "user", "assistant", "tool"]
    """Who speaks."""
    content: str
    """The text."""
    reasoning: str | None = None
    """What the assistant thought before its answer, where a template keeps it apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of an assistant's message."""
    tool_call_id: str | None = None
    """The call whose result a message of the role `tool` gives."""
    name: str | None = None
    """Name of the tool, or of the speaker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What the policy reads before the first observation of an episode.

    Example:
        >>> Prompt(system="Answer in one word.").system
        'Answer in one word.'
    """

    system: str | None = None
    """The system prompt."""
    tools: tuple[Any, ...] = ()
    """The `gspo_env.env.Tool`s that the chat template announces."""
    messages: tuple[Message, ...] = ()
    """Earlier messages of the conversation: user and assistant in turn, assistant last. A user's or
    a tool's message is last if they are the whole conversation, the first observation included."""

    @property
    def is_whole(self) -> bool:
        """Whether `messages` are the whole first conversation."""
        return bool(self.messages) and self.messages[-1].role != "assistant"

    def first_messages(self, observation: str) -> tuple[Message, ...]:
        """Returns the first conversation: this prompt and, unless it is whole, the observation."""
        system = () if self.system is None else (Message(role="system", content=self.system),)
        last = () if self.is_whole else (Message(role="user", content=observation),)
        return (*system, *self.messages, *last)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetInfo:
    """The `info` of `reset`. A key that is absent or None has the default.

    Example:
        >>> info = ResetInfo(task_key="amber-2", max_tokens=32)  # of {"task_key": "amber-2", ...}
        >>> info.task_key, info.messages
        ('amber-2', ())
    """

    state_key: str | None = None
    """Name of the first state; equal keys mean equal states."""
    task_key: str | None = None
    """Name of the drawn task; equal keys mean equal tasks. Training does not play tasks whose key
    the evaluation has. A first observation is a key only if it contains the whole task."""
    messages: tuple[Message, ...] = ()
    """Messages (`role`, `content`) before the first observation: user and assistant in turn. A
    system message may come first and replaces the environment's `system_prompt`. Messages that do
    not end with the assistant's are the whole conversation, the first observation included."""
    tools: tuple[Any, ...] | None = None
    """Tools of this episode; they replace the environment's `tools`."""
    max_tokens: int | None = None
    """Most tokens of the next action, if fewer than the rollout's limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the next action."""
    agent: str | None = None
    """Name of the agent that acts first, where an environment has several."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other keys, unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """The `info` of `step`. A key that is absent or None has the default.

    Example:
        >>> last = StepInfo(episodic_reward=1.0, success=True, reward_parts={"format": 0.1})
        >>> last.success, last.observation_role
        (True, 'user')
    """

    episodic_reward: float | None = None
    """On the last step: the outcome of the episode. Default: the sum of the turns' rewards."""
    success: bool | None = None
    """On the last step: whether the episode succeeded. Default: the outcome is above 0."""
    scored: bool | None = None
    """False if nothing scored the step, whose reward then means nothing: an episode that no step
    scores is lost and never counts as 0. Default: the environment scores every step."""
    state_key: str | None = None
    """Name of the state after the step; equal keys mean equal states."""
    observation_role: Role = "user"
    """`"tool"` if the observation is the answer of a tool, else `"user"`."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers by name; their means are logged as `rollout/reward/NAME`."""
    malformed_calls: int = 0
    """Tool calls of the action that could not be read; logged as `rollout/malformed_calls`."""
    token_advantages: tuple[float, ...] | None = None
    """The advantage of each sampled token of the action, in place of the estimator's."""
    token_mask: tuple[bool, ...] | None = None
    """False for the sampled tokens of the action that are not trained on."""
    messages: tuple[Message, ...] | None = None
    """The whole conversation as it stands now, which the policy answers next. Default: the messages
    so far, the action and the observation."""
    tools: tuple[Any, ...] | None = None
    """Tools of the next action. Default: those of the action before it."""
    max_tokens: int | None = None
    """Most tokens of the next action, if fewer than the rollout's limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the next action."""
    agent: str | None = None
    """Name of the agent that acts next, where an environment has several."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other keys, unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Wall-clock seconds of one turn.

    Example:
        >>> Timing(generate=0.8, step=0.01).generate
        0.8
    """

    generate: float = 0.0
    """Time in which the action was sampled."""
    step: float = 0.0
    """Time of the environment's `step`."""
    began: float = 0.0
    """When the turn began, in seconds since 1970; 0 if that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyAction:
    """What a policy did in one turn, with the token ids of its prompt and its action."""

    parent: int | None = -1
    """Index of the turn whose tokens this turn's prompt continues; None where a new sequence
    begins. The default -1 is the turn before this one."""
    fork: Fork | None = None
    """Why this turn adds a sequence to the episode; None if it does not, or is the first."""
    prompt_ids: tuple[int, ...] = ()
    """The environment's tokens that follow those of the parent, template glue included."""
    action_ids: tuple[int, ...] = ()
    """Exactly the ids that the engine sampled, the end-of-turn id included."""
    logprobs: tuple[float, ...] = ()
    """The engine's log-probability of each id of `action_ids` (natural log)."""
    text: str
    """The action as the environment received it."""
    in_reasoning: bool = False
    """Whether the prompt has opened the reasoning with which the action begins."""
    message: Message | None = None
    """The action as the tokenizer's response template has parsed it, if it has one."""
    weights_version: int = 0
    """The lowest version of the weights that sampled a token of the action."""
    weights_versions: VersionRuns = ()
    """The version of each token, where the weights changed while the action was sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn(PolicyAction):
    """One turn: the observation, the action and the environment's response.

    The turns of a text-only policy have no ids and no log-probabilities.

    Example:
        >>> turn = Turn(
        ...     observation="2 + 2?", text="4", reward=1.0,
        ...     prompt_ids=(1, 17, 18), action_ids=(9, 2), logprobs=(-0.1, -0.3),
        ... )
        >>> len(turn.prompt_ids), len(turn.action_ids)
        (3, 2)
    """

    kind: Literal["action", "summary"] = "action"
    """Whether the environment was to see it: it does not see a summary of the conversation."""
    observation: str
    """The observation before the action; before a summary, the request for it."""
    reward: float
    """The reward of the step; 0 for a summary."""
    info: StepInfo = field(default_factory=StepInfo)
    """The `info` of `step`; empty if the environment did not see the action."""
    timing: Timing = field(default_factory=Timing)
    state_key: str | None = None
    """The state in which the policy acted; None for a summary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """Tokens of an episode that stood in one context.

    Example:
        >>> ids, turns = np.array([1, 17, 9, 2]), np.array([-1, -1, 0, 0])
        >>> TokenSequence(token_ids=ids, turn_ids=turns).turn_ids
        array([-1, -1,  0,  0])
    """

    token_ids: IntArray
    """(T,)"""
    turn_ids: IntArray
    """(T,) the turn of each model token that is trained here; -1 on all other tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One episode: turns in order of time, whose tokens form one or more sequences.

    Example:
        >>> episode = bare_episode(Task(env_id="x", seed=0), lengths=[2, 1], rewards=[0.0, 1.0])
        >>> episode.rewards, episode.model_tokens, episode.weights_versions
        (array([0., 1.]), 3, (0, 0))
        >>> [sequence.turn_ids.tolist() for sequence in episode.sequences]
        [[0, 0, 1]]
    """

    task: Task
    """The task that was played."""
    prompt: Prompt = field(default_factory=Prompt)
    """What the policy read before the first observation."""
    turns: tuple[Turn, ...]
    """The turns in order of time."""
    ending: Ending
    """How it ended."""
    retried: tuple[Fault, ...] = ()
    """How the environment failed in earlier attempts, each of which was played again."""
    final_observation: str = ""
    """The observation after the last action."""
    reset: ResetInfo = field(default_factory=ResetInfo)
    """The `info` of `reset`."""

    @property
    def total_reward(self) -> float:
        """The sum of the turns' rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def outcome(self) -> float:
        """The episodic reward: the environment's own, else the sum of the turns' rewards."""
        return self.total_reward if self.ending.outcome is None else self.ending.outcome

    @property
    def success(self) -> bool:
        """`success` of the last step, else `outcome > 0`; False if the rollout cut the episode."""
        return self.outcome > 0 if self.ending.success is None else self.ending.success

    @property
    def stop_reason(self) -> StopReason:
        """Why it ended."""
        return self.ending.reason

    @property
    def terminated(self) -> bool:
        """See `Ending.terminated`."""
        return self.ending.terminated

    @property
    def truncated(self) -> bool:
        """See `Ending.truncated`."""
        return self.ending.truncated

    @property
    def failed(self) -> bool:
        """See `Ending.failed`."""
        return self.ending.failed

    @property
    def error(self) -> str | None:
        """How the environment failed, if it did."""
        return self.ending.fault.message if self.ending.fault else None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The failures of its environments: those that were retried, and the last one, if any."""
        return (*self.retried, self.ending.fault) if self.ending.fault else self.retried

    @property
    def rewards(self) -> FloatArray:
        """The per-turn rewards as emitted, shape (K,)."""
        return np.array([turn.reward for turn in self.turns], dtype=np.float64)

    @property
    def roles(self) -> tuple[Role, ...]:
        """(K,) the source of each turn's observation."""
        roles: list[Role] = ["user", *(turn.info.observation_role for turn in self.turns)]
        pairs = zip(self.turns, roles, strict=False)
        return tuple("user" if turn.kind == "summary" else role for turn, role in pairs)

    @property
    def action_turns(self) -> tuple[int, ...]:
        """The indices of the turns that the environment saw: all but summaries."""
        return tuple(k for k, turn in enumerate(self.turns) if turn.kind == "action")

    def played_messages(self, last: int | None = None) -> list[Message]:
        """Returns the messages from the first action, as text, to that of a turn, by default all.

        They follow `Prompt.first_messages` of the first turn's observation. Summaries are left out,
        which the environment does not see.
        """
        messages: list[Message] = []
        for k in self.action_turns:
            if last is not None and k > last:
                break
            turn = self.turns[k]
            if messages:
                messages.append(Message(role=self.roles[k], content=turn.observation))
            messages.append(Message(role="assistant", content=turn.text))
        return messages

    @property
    def parents(self) -> tuple[int | None, ...]:
        """(K,) the turn that each turn continues; None where a sequence begins.

        Raises:
            ValueError: A parent is not an earlier turn.
        """
        parents: list[int | None] = []
        for k, turn in enumerate(self.turns):
            parent = (k - 1 if k else None) if turn.parent == -1 else turn.parent
            if parent is not None and not 0 <= parent < k:
                raise ValueError(f"the parent of turn {k} is {parent}; expected an earlier turn")
            parents.append(parent)
        return tuple(parents)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The training sequences: one for each turn that no other turn continues.

        A turn that several sequences contain is trained in the first of them and is context in the
        others, so each sampled token is trained once, in the context in which it was sampled.
        """
        parents = self.parents
        trained: set[int] = set()
        sequences = []
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            path: list[int] = []
            at: int | None = leaf
            while at is not None:
                path.append(at)
                at = parents[at]
            ids: list[int] = []
            turn_ids: list[int] = []
            for k in reversed(path):
                turn = self.turns[k]
                ids += [*turn.prompt_ids, *turn.action_ids]
                turn_ids += [-1] * len(turn.prompt_ids)
                turn_ids += [-1 if k in trained else k] * len(turn.action_ids)
            trained.update(path)
            sequences.append(TokenSequence(token_ids=np.array(ids), turn_ids=np.array(turn_ids)))
        return tuple(sequences)

    @property
    def engine_logprobs(self) -> FloatArray:
        """The engine's log-probabilities of the sampled tokens by turn, shape (N,)."""
        return np.array([p for turn in self.turns for p in turn.logprobs], dtype=np.float64)

    @property
    def token_versions(self) -> IntArray:
        """The version of the weights that sampled each token by turn, shape (N,)."""
        runs = [
            run
            for turn in self.turns
            for run in turn.weights_versions or ((turn.weights_version, len(turn.action_ids)),)
        ]
        versions, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
        return np.repeat(versions, counts)

    @property
    def model_tokens(self) -> int:
        """Number of sampled tokens, |y|."""
        return sum(len(turn.action_ids) for turn in self.turns)

    @property
    def weights_versions(self) -> tuple[int, int]:
        """The lowest and the highest weights version that sampled a token."""
        versions = [turn.weights_version for turn in self.turns] or [0]
        versions += [version for turn in self.turns for version, _ in turn.weights_versions]
        return min(versions), max(versions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The episodes of one task, which an advantage estimator compares.

    Example:
        >>> task = Task(env_id="x", seed=0)
        >>> group = Group(task=task, episodes=(bare_episode(task, [1], [0.0]),) * 8)
        >>> len(group.episodes), group.score
        (8, 'turns')
    """

    task: Task
    """The task that all episodes play."""
    episodes: tuple[Episode, ...]
    """(G,) the episodes."""
    score: Score = "turns"
    """The rewards to learn from, for `gspo_env.credit.turn_rewards`; `estimate` sets it."""
    redrawn: int | None = None
    """Tasks drawn before this one that are held out; None if no tasks are held out by key."""
    seconds: float = 0.0
    """Seconds that its episodes were in flight, added up."""
