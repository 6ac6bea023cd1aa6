"""Reward functions and reward models: a finished conversation in, named numbers out."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import queue
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Real
from typing import Any

from gspo_env.env.isolated import ISOLATED
from gspo_env.errors import ConfigError, EnvironmentContractError, ModelError, raised_as
from gspo_env.registry import load_function
from gspo_env.rewards import GroupReward, score_group
from gspo_env.runtime import loops
from gspo_env.types import Group
from gspo_envs.data.rows import Message, as_list

Ids = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One answered task, as a reward function gets it."""

    prompt: tuple[Message, ...]
    """The messages before the policy's first action."""
    completion: tuple[Message, ...]
    """All later messages: the policy's are `assistant`, the environment's `user` or `tool`."""
    row: Mapping[str, Any]
    """The row of the dataset."""
    plain: bool = False
    """Whether the row's prompt is a string and not a list of messages."""
    token_ids: tuple[int, ...] = ()
    """The sampled ids, if the rollout provides them."""
    result: Any = None
    """What the program of a `ProgramEnv` returned; None in other environments."""

    @property
    def texts(self) -> list[str]:
        """The policy's actions, turn by turn."""
        return [m["content"] for m in self.completion if m["role"] == "assistant"]

    @property
    def text(self) -> str:
        """The policy's last action."""
        return self.texts[-1] if self.texts else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A reward function and the name of its metric."""

    name: str
    function: Callable[[Attempt], Any]
    waits: bool
    """Whether it is asynchronous or a model, so that `step` waits for it."""
    batched: bool = False
    """Whether it returns a list of one number, as TRL's functions do."""
    of_group: GroupReward | None = None
    """What scores the finished episodes of a group instead of the function."""


def load_reward(spec: Any) -> Reward:
    """Makes a reward from a user's specification.

    Args:
        spec: A function of an `Attempt`, a function with TRL's signature (it has a parameter
            `completions`), a `RewardModel`, a `gspo_env.rewards.GroupReward` such as a `Judge`,
            `module:name` or `file.py:name` of one of them, or the folder or hub id of a
            `transformers` sequence classifier.

    Raises:
        ConfigError: It is none of these.
        ModelError: The classifier cannot be loaded.
    """
    if isinstance(spec, str):
        if ":" in spec:
            return load_reward(load_function(spec, "reward"))
        return _load_model(os.path.abspath(spec) if os.path.exists(spec) else spec)
    if isinstance(spec, RewardModel):
        return Reward(name=spec.name, function=spec, waits=True)
    if isinstance(spec, GroupReward):
        return Reward(name=spec.name, function=_nothing, waits=False, of_group=spec)
    if not callable(spec):
        raise ConfigError(f"reward is {spec!r}, expected a function, its place, or a model.")
    name = re.sub(r"\W", "", getattr(spec, "__name__", type(spec).__name__))
    waits = any(inspect.iscoroutinefunction(f) for f in (spec, getattr(spec, "__call__", None)))  # noqa: B004
    if "completions" in inspect.signature(spec).parameters:
        return Reward(name=name, function=_trl(spec), waits=waits, batched=True)
    return Reward(name=name, function=spec, waits=waits)


class Rewards:
    """The rewards of an environment.

    Args:
        owner: Name of the environment in errors.
        specs: One or several specifications; see `load_reward`.
        weights: One for each reward, or none.

    Raises:
        ConfigError: Two rewards have one name, or the weights are not one number for each.
    """

    def __init__(self, owner: str, specs: Any, weights: Sequence[float] = ()) -> None:
        """Loads them."""
        specs = specs if isinstance(specs, list | tuple) else [specs]
        self._rewards = [load_reward(spec) for spec in specs]
        names = [reward.name for reward in self._rewards]
        if len(set(names)) < len(names):
            raise ConfigError(f"{owner}: the rewards are named {names}, expected different names.")
        numbers = as_list(weights)
        is_list = isinstance(numbers, (list, tuple)) and all(map(_is_number, numbers))
        if not is_list or len(numbers) not in (0, len(names)) or (numbers and not any(numbers)):
            raise ConfigError(
                f"{owner}: weights is {numbers!r}, expected a finite number for each of {names}, "
                "one of them not 0."
            )
        self.weights = dict(zip(names, map(float, numbers or [1.0] * len(names)), strict=True))
        self.waits = any(reward.waits for reward in self._rewards)
        self._of_group = [
            (each.of_group, self.weights[each.name])
            for each in self._rewards
            if each.of_group is not None
        ]
        if self._of_group and ISOLATED in os.environ:
            raise ConfigError(
                f"{owner}: rewards has {self._of_group[0][0].name}, which sees whole groups, and "
                "the environment runs in its own process; expected --isolation thread."
            )

    def __len__(self) -> int:
        """Returns the number of rewards."""
        return len(self._rewards)

    def of_group(self, success: float | None) -> Callable[[Group], Awaitable[Group]] | None:
        """Returns what adds the rewards that see a whole group; None if there are none.

        Args:
            success: See `DatasetEnv`.
        """
        return partial(score_group, self._of_group, success) if self._of_group else None

    def judge(self, attempt: Attempt) -> tuple[float | None, dict[str, float]]:
        """Returns the weighted sum of all rewards, and each; a reward of None is left out.

        The sum is None if no reward with a weight other than 0 has a number. Asynchronous functions
        run concurrently.

        Raises:
            EnvironmentContractError: A reward is not a finite number.
        """
        answers = settle([reward.function(attempt) for reward in self._rewards])
        numbers = {r.name: _number(r, a) for r, a in zip(self._rewards, answers, strict=True)}
        parts = {name: number for name, number in numbers.items() if number is not None}
        counted = [self.weights[name] * parts[name] for name in parts if self.weights[name]]
        return sum(counted) if counted else None, parts


def settle(answers: Sequence[Any]) -> list[Any]:
    """Awaits the asynchronous ones among the answers concurrently."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*filter(inspect.isawaitable, answers))

    if not any(map(inspect.isawaitable, answers)):
        return list(answers)
    results = iter(loops.run(gather(), "rewards"))
    return [next(results) if inspect.isawaitable(answer) else answer for answer in answers]


def check_success(owner: str, success: Any) -> None:
    """Checks the reward from which an episode is a success.

    Raises:
        ConfigError: It is neither None nor a finite number.
    """
    if success is not None and not _is_number(success):
        raise ConfigError(f"{owner}: success is {success!r}, expected a finite number or None.")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _number(reward: Reward, answer: Any) -> float | None:
    expected = "a finite number or None"
    try:
        if reward.batched:
            expected = f"a list of {expected} for one completion"
            (answer,) = answer
        number = 0.0 if answer is None else float(answer)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvironmentContractError(
            f"reward {reward.name} answered {answer!r}, expected {expected}."
        )
    return None if answer is None else number


@lru_cache(maxsize=64)
def _load_model(path: str) -> Reward:
    """Loads a reward model once for all environments of the process."""
    return load_reward(RewardModel(path))


def _trl(function: Callable[..., Any]) -> Callable[[Attempt], Any]:
    """Wraps a function with TRL's signature to score one completion, as a batch of one."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [
        name for name, p in parameters.items() if p.default is p.empty and p.kind not in variable
    ]

    def call(attempt: Attempt) -> Any:
        messages = list(attempt.completion)
        arguments: dict[str, Any] = {key: [value] for key, value in attempt.row.items()}
        arguments |= {"trainer_state": None, "log_extra": _nothing, "log_metric": _nothing}
        prompt = attempt.prompt[-1]["content"] if attempt.plain else list(attempt.prompt)
        arguments |= {
            "prompts": [attempt.row.get("prompt", prompt)],
            "completions": [attempt.text if attempt.plain else messages],
            "completion_ids": [list(attempt.token_ids)],
        }
        arguments.pop("prompt", None)
        arguments.pop("completion", None)
        if lacking := [name for name in required if name not in arguments]:
            raise ConfigError(
                f"the reward {getattr(function, '__name__', function)!r} needs the column "
                f"{' and '.join(lacking)}; the rows have {', '.join(attempt.row)}"
            )
        return function(**{k: v for k, v in arguments.items() if takes_all or k in parameters})

    return call


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces TRL's logging functions."""


def conversation_encoder(tokenizer: Any, most: int | None = None) -> Callable[[Attempt], Ids]:
    """Returns a function that gives the ids of a conversation as a reward model reads them.

    The ids are those of the tokenizer's chat template, or of the joined texts if it has none. No
    message can contain a control token.

    Args:
        tokenizer: The reward model's tokenizer.
        most: Maximum ids; the start of a longer conversation is left out.
    """
    from gspo_env.chat import ChatTemplate, TextEncoder

    keep = slice(None if most is None else -most, None)
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer)
        return lambda a: template.ids((*a.prompt, *a.completion), generation=False)[keep]
    plain = TextEncoder(tokenizer)
    probe = tokenizer("a", return_special_tokens_mask=True)
    ids, first = probe["input_ids"], probe["special_tokens_mask"].index(0)
    before, behind = ids[:first], ids[first + probe["special_tokens_mask"].count(0) :]

    def joined(attempt: Attempt) -> Ids:
        text = "\n".join(m["content"] for m in (*attempt.prompt, *attempt.completion))
        room = 0 if most is None else most - len(before) - len(behind)
        return [*before, *plain.encode(text, first=True)[-room:], *behind]

    return joined


class RewardModel:
    """A `transformers` sequence classifier as a reward.

    Episodes that end at the same time are scored in one batch.

    Args:
        path: Folder or hub id.
        name: Name of its metric; the last part of the path by default.
        label: The label whose probability is the reward, if there are several.
        batch_size: Maximum conversations of one forward pass.

    Raises:
        ModelError: It cannot be loaded.
        ConfigError: The label is missing or unknown.
    """

    def __init__(self, path: str, *, name: str = "", label: str = "", batch_size: int = 32) -> None:
        """Loads the model."""
        import torch

        from gspo_env.model.load import load_model

        self.name = name or re.sub(r"\W", "_", str(path).rstrip("/").rpartition("/")[2])
        self.batch_size = batch_size
        hint = " (a reward function is named module:function or file.py:function)"
        with raised_as(
            ModelError, f"reward model {path!r} cannot be loaded", ModelError, mend=hint
        ):
            self.model, self.tokenizer = load_model(path, kind="AutoModelForSequenceClassification")
        self.model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        self._label = self._find(label)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token is None:
            raise ModelError(f"reward model {path!r} has no token for padding, nor one that ends")
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.tokenizer.padding_side = "right"
        most = getattr(self.model.config, "max_position_embeddings", None)
        self._encode = conversation_encoder(self.tokenizer, most)
        self._pending: queue.SimpleQueue[tuple[Ids, Future[float]]] = queue.SimpleQueue()
        self._running = threading.Lock()

    def __call__(self, attempt: Attempt) -> float:
        """Scores the whole conversation, in one batch with those that wait at the same time."""
        score: Future[float] = Future()
        if not (ids := self._encode(attempt)):
            raise ModelError(f"reward model {self.name}: its chat template shows no message")
        self._pending.put((ids, score))
        with self._running:
            while not score.done():
                self._score_batch()
        return score.result()

    def score(self, conversations: Sequence[Ids]) -> list[float]:
        """Scores the ids of conversations in one forward pass."""
        import torch

        rows = {"input_ids": list(conversations)}
        batch = self.tokenizer.pad(rows, return_tensors="pt").to(self.model.device)
        with torch.inference_mode():
            logits = self.model(**batch).logits.float()
        if logits.shape[-1] > 1:
            logits = logits.softmax(-1)
        scores: list[float] = logits[:, self._label].tolist()
        return scores

    def _find(self, label: str) -> int:
        names = {str(text): int(index) for index, text in self.model.config.id2label.items()}
        if not label and len(names) == 1:
            return 0
        if label not in names:
            raise ConfigError(
                f"reward model {self.name}: label is {label!r}, expected one of "
                f"{', '.join(names)}: RewardModel(path, label=...)"
            )
        return names[label]

    def _score_batch(self) -> None:
        batch: list[tuple[Ids, Future[float]]] = []
        with contextlib.suppress(queue.Empty):
            while len(batch) < self.batch_size:
                batch.append(self._pending.get_nowait())
        try:
            scores = self.score([ids for ids, _ in batch])
        except Exception as error:  # only the episodes of this batch fail
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), score in zip(batch, scores, strict=True):
            future.set_result(score)
