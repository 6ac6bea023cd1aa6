"""BFCL's multi-turn tasks: `gym.make("gspo/BFCL-v0", category="base")`."""

from __future__ import annotations

import ast
import copy
import inspect
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gspo_env.tools.tool import Tool
from gspo_envs.adapters.foreign import load
from gspo_envs.adapters.instances import Calls, InstanceEnv, check_choice

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
_load = partial(load, package="bfcl-eval", install="--no-deps bfcl-eval==2026.3.23")
_CHECKER = "bfcl_eval.eval_checker.multi_turn_eval"
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""BFCL's names of types in JSON schema."""
_MORE = "I have updated some more functions you can choose from. What about now?"
"""The user's message when functions are added."""


class BFCLEnv(InstanceEnv):
    """A multi-turn task of the Berkeley Function Calling Leaderboard, with its own two checks.

    After each message of the user, the state of all APIs must be that of the reference calls, and
    the results so far must contain theirs; the episode ends at the first message for which they
    don't. The policy's calls are made directly, and never as Python code.

    Args:
        category: `base`, `miss_func`, `miss_param` or `long_context`.
        exclude_free: See `InstanceEnv`.
        max_turns: See `InstanceEnv`.

    Raises:
        ConfigError: The category is unknown.
        MissingExtraError: bfcl-eval is not installed; its own dependencies are not needed.
    """

    system_prompt = (
        "Do what the user asks with the tools. When nothing is left to call, answer in words, and "
        "the user goes on."
    )

    def __init__(
        self, category: str = "base", *, exclude_free: bool = True, max_turns: int = 40
    ) -> None:
        """Reads the tasks from the wheel."""
        check_choice("BFCL: category", category, CATEGORIES)
        self._checker = _load(f"{_CHECKER}.multi_turn_checker")
        config = _load("bfcl_eval.constants.executable_backend_config")
        self._files: dict[str, str] = config.CLASS_FILE_PATH_MAPPING
        self._docs: dict[str, str] = config.MULTI_TURN_FUNC_DOC_FILE_MAPPING
        self._data = Path(str(_load("bfcl_eval").__path__[0])) / "data"
        self._long = category == "long_context"
        name = f"BFCL_v4_multi_turn_{category}.json"
        gold = {row["id"]: row["ground_truth"] for row in self._lines(f"possible_answer/{name}")}
        tasks = [{**row, "gold": gold[row["id"]]} for row in self._lines(name)]
        super().__init__(tasks, suite=category, exclude_free=exclude_free, max_turns=max_turns)

    def name_of(self, task: Any) -> str:
        """Returns BFCL's id."""
        return str(task["id"])

    def open(self, task: Any) -> str:
        """Makes the APIs of a task twice: for the policy and for the reference."""
        self._task, self._turn = task, 0
        self._ours, self._theirs = self._instances(), self._instances()
        self._results: list[str] = []
        self._called = False
        self.tools = self._offered()
        return self._message()

    def reply(self, text: str) -> str | None:
        """Checks the calls since the last message, and returns the next one."""
        self._accepted = self._check(self._task["gold"][self._turn])
        self._turn, self._called = self._turn + 1, False
        if not self._accepted or self._turn == len(self._task["gold"]):
            return None
        self.tools = self._offered()
        return self._message()

    def grade(self) -> bool:
        """Returns whether all messages were answered as the reference does."""
        return self._accepted

    def solution(self) -> Iterator[Calls]:
        """Yields the reference calls."""
        for calls in self._task["gold"]:
            yield [self._read(call) for call in calls]

    def step_info(self, terminated: bool, truncated: bool) -> dict[str, Any]:
        """Returns the outcome, and the tools where a task adds some."""
        more = {"tools": self.tools} if self._task.get("missed_function") else {}
        return super().step_info(terminated, truncated) | more

    def _lines(self, name: str) -> list[dict[str, Any]]:
        text = (self._data / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line]

    def _instances(self) -> dict[str, Any]:
        instances = {}
        for name in self._task["involved_classes"]:
            instances[name] = getattr(_load(self._files[name]), name)()
            if hasattr(instances[name], "_load_scenario"):
                config = copy.deepcopy(self._task["initial_config"].get(name, {}))
                instances[name]._load_scenario(config, long_context=self._long)
        return instances

    def _message(self) -> str:
        return "\n".join(m["content"] for m in self._task["question"][self._turn]) or _MORE

    def _offered(self) -> tuple[Tool, ...]:
        """Returns the methods that the policy may call now."""
        missed = self._task.get("missed_function", {})
        later = [name for turn, names in missed.items() if int(turn) > self._turn for name in names]
        hidden = {*self._task.get("excluded_function", ()), *later}
        return tuple(
            Tool(
                name=doc["name"],
                description=doc["description"],
                parameters=_schema(doc["parameters"]),
                function=partial(self._call, getattr(instance, doc["name"])),
            )
            for name, instance in self._ours.items()
            for doc in self._documents(name)
            if doc["name"] not in hidden
        )

    def _documents(self, name: str) -> list[dict[str, Any]]:
        if name not in _DOCUMENTS:
            _DOCUMENTS[name] = self._lines(f"multi_turn_func_doc/{self._docs[name]}")
        return _DOCUMENTS[name]

    def _call(self, method: Any, /, **arguments: Any) -> str:
        self._called = True
        result = _run(method, arguments)
        self._results.append(result)
        return result

    def _check(self, gold: list[str]) -> bool:
        """Returns whether the state and the results are those of the reference."""
        expected = []
        for call in gold:
            name, arguments = self._read(call)
            methods = (getattr(each, name, None) for each in self._theirs.values())
            expected.append(_run(next(filter(None, methods)), arguments))
        if gold and not self._called:
            return False
        state = self._checker.state_checker(self._ours, self._theirs)["valid"]
        responses = self._checker.response_checker(self._results, expected, self._turn)["valid"]
        return not gold or bool(state and responses)

    def _read(self, call: str) -> tuple[str, dict[str, Any]]:
        """Returns a call that the wheel has as Python code."""
        tree: Any = ast.parse(call, mode="eval").body
        method = next(filter(None, (getattr(i, tree.func.id, None) for i in self._ours.values())))
        values = [ast.literal_eval(argument) for argument in tree.args]
        names = list(inspect.signature(method).parameters)
        keywords = {k.arg: ast.literal_eval(k.value) for k in tree.keywords}
        return tree.func.id, dict(zip(names, values, strict=False)) | keywords


_DOCUMENTS: dict[str, list[dict[str, Any]]] = {}
"""The descriptions of the functions of each API."""


def _run(method: Any, arguments: dict[str, Any]) -> str:
    """Calls a method and writes its result as BFCL does."""
    try:
        result = method(**arguments)
    except Exception as error:  # a method may raise anything; the policy reads it
        return f"Error during execution: {error}"
    if isinstance(result, dict):
        return json.dumps(result, default=str)
    return str(result)


def _schema(value: Any) -> Any:
    """Returns BFCL's schema as JSON schema."""
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    schema = {name: _schema(each) for name, each in value.items()}
    if isinstance(kind := value.get("type"), str):
        schema["type"] = _TYPES.get(kind, kind)
    return schema
