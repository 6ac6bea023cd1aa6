"""Tasks from the rows of a dataset, scored by reward functions."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

from gspo_env.env.base import Action, Options, ResetResult, StepResult
from gspo_env.env.tool_env import ToolEnv
from gspo_env.errors import ConfigError
from gspo_env.registry import load_function
from gspo_env.tools.tool import Tool, as_tool, tool
from gspo_envs.data.rescore import rescore
from gspo_envs.data.rewards import Attempt, Rewards, check_success, settle
from gspo_envs.data.rows import (
    COLUMNS,
    Message,
    TaskRows,
    as_chat,
    as_list,
    begin_chat,
    has_calls,
    is_text,
    prompt_column,
    read_chat,
    speaker_and_text,
)

logger = logging.getLogger(__name__)

_UNREAD = {"tools": "tools", "system": "system_prompt", "system_prompt": "system_prompt"}
"""Columns that a prompt may be meant to have, and the setting that stands for them."""


class DatasetEnv(ToolEnv):
    """Answer the prompts of a dataset, scored by reward functions or a reward model.

    The seed picks the row. Evaluation seeds, from 10**9 on, pick held-out rows.

    Args:
        data: Rows as a sequence of dictionaries or a table of pandas, Polars or Arrow; a `.jsonl`,
            `.json`, `.csv`, `.tsv` or `.parquet` file, or a list of them; a folder that
            `save_to_disk` wrote, or the name of a Hugging Face dataset.
        rewards: One or several reward specifications; see `gspo_envs.data.rewards.load_reward`.
        weights: One for each reward; 1 by default.
        split: Split of a Hugging Face dataset.
        subset: Configuration of a Hugging Face dataset.
        held_out: Share of the rows reserved for evaluation, or separate evaluation rows: a split of
            a Hugging Face dataset, a file, or rows.
        column: Column of the prompt; by default `prompt`, `messages`, `conversations` (ShareGPT) or
            `question` (GSM8K), the first that a row has.
        chat: Use of a chat's messages: "context" for one answer, or "turns" that the policy answers
            one after the other.
        tools: Typed, documented functions that the policy may call, or their places, such as
            `["file.py:function"]`; see `gspo_env.tools.tool.tool`.
        reply: Function of the `Attempt` so far that returns the user's next message, or None at the
            end; it may be asynchronous.
        score: When rewards are given: at the "end" of the episode or at every "turn".
        success: Minimum reward of the last turn that counts as success; by default any outcome
            above 0 does.
        system_prompt: System prompt for rows without one.
        max_turns: Turns before the episode is truncated; by default 8 with `reply`, or else the
            number of messages to answer.
        blocking: Whether a reward or `reply` blocks, so that the environment runs in a thread; by
            default true with `reply`, asynchronous functions and reward models.
    """

    credit_score = "turns"
    rescore = staticmethod(rescore)

    def __init__(
        self,
        data: Any,
        rewards: Any = (),
        *,
        weights: Sequence[float] = (),
        split: str = "train",
        subset: str | None = None,
        held_out: Any = 0.1,
        column: str = "",
        chat: Literal["context", "turns"] = "context",
        tools: str | Sequence[str | Callable[..., Any]] = (),
        reply: str | Callable[[Attempt], Any] | None = None,
        score: Literal["end", "turn"] = "end",
        success: float | None = None,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        blocking: bool | None = None,
    ) -> None:
        """Opens the dataset and loads the rewards."""
        choices = {"chat": (chat, "context", "turns"), "score": (score, "end", "turn")}
        for name, (value, *allowed) in choices.items():
            if value not in allowed:
                raise ConfigError(f"Dataset: {name} is {value!r}, expected {' or '.join(allowed)}.")
        super().__init__(max_turns)
        check_success("Dataset", success)
        named = [tools] if isinstance(tools, str) else tools
        if not isinstance(named, (list, tuple)):
            raise ConfigError(f"Dataset: tools is {tools!r}, expected functions or their places.")
        self._functions = tuple(map(_load_tool, named))
        self.rewards = Rewards("Dataset", rewards, weights)
        self.group_reward = self.rewards.of_group(success)
        self._rows = TaskRows(data, split=split, subset=subset, held_out=held_out)
        self.num_tasks, self.num_eval_tasks = len(self._rows), self._rows.num_held_out
        self.reply = load_function(reply, "reply") if isinstance(reply, str) else reply
        if reply is not None and not callable(self.reply):
            raise ConfigError(f"Dataset: reply is {reply!r}, expected a function or its place.")
        if not isinstance(system_prompt, str | None):
            raise ConfigError(f"Dataset: system_prompt is {system_prompt!r}, expected a text.")
        waits = bool(self.reply) or self.rewards.waits
        self.blocking = waits if blocking is None else blocking
        self.limits_steps = bool(self.rewards or tools)
        self.column, self.chat, self.score, self.success_from = column, chat, score, success
        self._system, self._limit = system_prompt, max_turns

    @property
    def gives_reward(self) -> bool | None:  # type: ignore[override]
        """False without reward functions; not known of a subclass, which may have other rewards."""
        return None if self.rewards or type(self) is not DatasetEnv else False

    @cached_property
    def tools(self) -> tuple[Tool, ...]:  # type: ignore[override]
        """The environment's own tools, then the functions."""
        return (*super().tools, *self._functions)

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Picks a row; `options={"row": 3}` selects row 3.

        Raises:
            ConfigError: The row does not exist or has no chat.
        """
        super().reset(seed=seed, options=options)
        self._row, index = self._rows.pick(self.np_random, seed, (options or {}).get("row"))
        prompt = self._read_prompt(index)
        self._questions: deque[str] = deque()
        if self.chat == "turns":
            questions = [m["content"] for m in prompt if m["role"] == "user"]
            prompt, self._questions = (
                [{"role": "user", "content": questions[0]}],
                deque(questions[1:]),
            )
        system = self.system_prompt
        self._prompt = tuple(prompt)
        if system is not None:
            self._prompt = ({"role": "system", "content": system}, *prompt)
        self._messages: list[Message] = []
        self._token_ids: tuple[int, ...] = ()
        self.max_turns = self._limit or (
            8 if self.reply or self.tools else len(self._questions) + 1
        )
        return begin_chat(prompt, index, self._row)

    def step(self, action: str) -> StepResult:
        """Takes the answer of a turn and, at the end or at every turn, scores it."""
        self.require_episode()
        self._messages.append({"role": "assistant", "content": str(action)})
        if isinstance(action, Action):
            self._token_ids += action.token_ids
        observation, reward, terminated, truncated, info = super().step(action)
        ended = terminated or truncated
        if ended or self.score == "turn":
            judged, info["reward_parts"] = self.rewards.judge(self._attempt())
            reward += judged or 0.0
            if self.rewards:
                info["scored"] = judged is not None
            if ended and self.success_from is not None:
                info["success"] = reward >= self.success_from
        role = info.get("observation_role", "user")
        self._messages.append({"role": role, "content": observation})
        return observation, float(reward), terminated, truncated, info

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Returns the user's next message, if there is one."""
        following = self._questions.popleft() if self._questions else self._reply()
        return following or "", 0.0, following is None

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the row's own answer; with noise, sometimes another row's.

        Raises:
            NotImplementedError: The row has no answer.
        """
        row = self._row
        if noise > 0.0 and self.np_random.random() < noise:
            row, _ = self._rows.pick(self.np_random)
        answers = _answers(row, self._column(row), every=self.chat == "turns")
        if not answers:
            raise NotImplementedError("the dataset holds no answers: no completion, no assistant")
        answered = sum(m["role"] == "assistant" for m in self._messages)
        return str(answers[min(answered, len(answers) - 1)])

    def _reply(self) -> str | None:
        if self.reply is None:
            return None
        (answer,) = settle([self.reply(self._attempt())])
        if answer is not None and not isinstance(answer, str):
            raise ConfigError(f"Dataset: reply gave {answer!r}, expected a text or None.")
        return answer

    def _attempt(self) -> Attempt:
        return Attempt(
            prompt=self._prompt,
            completion=tuple(self._messages),
            row=self._row,
            plain=self._plain,
            token_ids=self._token_ids,
        )

    def _column(self, row: Mapping[str, Any]) -> str:
        column = prompt_column(row, self.column)
        if column not in row:
            names = repr(self.column) if self.column else " or ".join(COLUMNS)
            raise ConfigError(f"Dataset: no column {names}, the columns are {', '.join(row)}.")
        return column

    def _read_prompt(self, index: int) -> list[Message]:
        column = self._column(self._row)
        value = self._row[column]
        self._plain = is_text(value)
        unread = [name for name in _UNREAD if _has(self._row.get(name))]
        if unread and not (self.tools or self._system):
            _warn_of(unread[0])
        where = f"Dataset: column {column} of row {index}"
        if self._plain and self.chat == "turns":
            raise ConfigError(f"{where} is a text, but chat is 'turns'; expected messages.")
        if self.chat == "turns" and has_calls(as_chat(value)):
            raise ConfigError(f"{where} has tool calls, but chat is 'turns'; expected 'context'.")
        system, messages = read_chat(value, where)
        self.system_prompt = self._system if system is None else system
        if messages[-1]["role"] == "assistant":
            messages.pop()  # the reference answer
        return messages


@lru_cache
def _warn_of(column: str) -> None:
    logger.warning(
        "The rows have a column %r, which is not read: set %s instead.", column, _UNREAD[column]
    )


def _has(value: Any) -> bool:
    return value is not None and len(value) > 0 if hasattr(value, "__len__") else False


def _load_tool(spec: str | Callable[..., Any]) -> Tool:
    """Returns the tool that a function, or the function of a place, is.

    Raises:
        ConfigError: It cannot be imported, or it is not typed and documented.
    """
    function = load_function(spec, "tool") if isinstance(spec, str) else spec
    return as_tool(tool(function))


def _answers(row: Mapping[str, Any], column: str, *, every: bool) -> list[str]:
    """Returns the answers in a row: of every turn, or only of the last."""
    completion = row.get("answer" if column == "question" else "completion")
    if isinstance(completion, str):
        return [completion]
    chat = as_list(row[column] if completion is None else completion)
    if not isinstance(chat, (list, tuple)) or not chat or not isinstance(chat[-1], Mapping):
        return []
    messages = [speaker_and_text(m) for m in chat]
    answers = [str(text) for role, text in messages if role == "assistant"]
    return answers if every else answers[-1:] if messages[-1][0] == "assistant" else []
