"""τ²-bench's tasks: `gym.make("gspo/Tau2-v0", domain="retail")`."""

from __future__ import annotations

import gc
import gzip
import json
import pickle
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from gspo_env.tools.tool import Tool
from gspo_envs.adapters.foreign import load
from gspo_envs.adapters.instances import Calls, InstanceEnv, check_choice

DOMAINS = ("retail", "airline", "telecom")
_INSTALL = "'gspo-env[tau2]' && pip install --no-deps inspect-evals==0.28.0"
_load = partial(load, package="inspect-evals", install=_INSTALL)
_EXPECTED: dict[tuple[str, str], str] = {}
"""Hashes of the databases that solve a task, by domain and id."""
_READS = ("get_", "find_", "search_", "list_", "calculate", "transfer_")
"""How the names of tools begin that change nothing."""
_MOST_PAYMENTS = 1000
"""Payments of a reservation that can still be cancelled, which doubles them each time."""


class Tau2Env(InstanceEnv):
    """A task of τ²-bench, with the tools, the data and the checks that inspect-evals has of it.

    The user is scripted: the first message says what the user wants and knows, the second one how
    the user insists, and then the user leaves. In `telecom`, the policy reads a ticket and operates
    the user's phone too, as in the benchmark's solo mode. An episode of the other
    two succeeds if the database is as the reference calls leave it and the policy has said what the
    task demands; one of `telecom`, if the task's assertions hold and its required calls were made.
    Criteria in plain language are not judged.

    Args:
        domain: `retail`, `airline` or `telecom`.
        rules: Whether the system prompt has the benchmark's rules, thousands of tokens.
        exclude_free: See `InstanceEnv`.
        max_turns: See `InstanceEnv`.

    Raises:
        ConfigError: The domain is unknown.
        MissingExtraError: inspect-evals is not installed.
    """

    def __init__(
        self,
        domain: str = "retail",
        *,
        rules: bool = True,
        exclude_free: bool = True,
        max_turns: int = 60,
    ) -> None:
        """Reads the tasks from the wheel."""
        check_choice("Tau2: domain", domain, DOMAINS)
        self._suite = domain
        self._solo, place = domain == "telecom", f"inspect_evals.tau2.{domain}"
        sides = ("Agent", "User") if self._solo else ("Agent",)
        names = [f"{domain.capitalize()}{side}Tools" for side in sides]
        self._classes = [getattr(_load(f"{place}.{name}"), name) for name in names]
        self._store, tool = _load("inspect_ai.util").Store, _load("inspect_ai.tool")
        self._error_type, define = tool.ToolError, tool.ToolDef
        wrappers = _load(f"{place}.tools").__dict__
        if self._solo:
            wrappers = wrappers | _load(f"{place}.user_tools").__dict__
            self._environment = _load(f"{place}.environment").Environment
        offered = [
            each() for n, list_ in wrappers.items() if n.startswith("all_") for each in list_
        ]
        self._others = {define(each).name: each for each in offered}
        self._equal = _load("inspect_evals.tau2.utils").deep_equal_unordered
        folder = _load("inspect_evals.tau2.utils").TAU2_DATA_DIR / "domains" / domain
        split = _read(folder, tuple(self._classes), self._store)
        self._offers = [
            Tool(
                name=each.name,
                description=each.description,
                parameters=each.parameters.model_dump(exclude_none=True),
                function=partial(self._call, each.name),
            )
            for each in map(define, offered)
        ]
        self._databases = split["databases"]
        files = sorted(folder.glob("*policy_solo.txt" if self._solo else "policy.txt"))
        files += sorted(folder.glob("tech_support_workflow_solo.txt"))
        texts = [each.read_text(encoding="utf-8") for each in files]
        self.system_prompt = "\n\n".join(texts) if rules else "Solve the user's problem."
        self._tried = self._new_tools()
        super().__init__(
            split["train"],
            held_out=split["test"],
            suite=domain,
            exclude_free=exclude_free,
            max_turns=max_turns,
        )

    def name_of(self, task: Any) -> str:
        """Returns the benchmark's id."""
        return str(task["id"])

    def open(self, task: Any) -> str:
        """Makes the databases of a task."""
        self._task, self._criteria = task, task["evaluation_criteria"]
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._said, self._now = "", self._new_tools()
        self.tools = tuple(self._offers)
        user = task["user_scenario"]["instructions"]
        self._messages = iter([] if self._solo else [user["task_instructions"]])
        if self._solo:
            self._sync = self._environment(self._now[1], self._now[0]).sync_tools
            for call in task["initial_state"]["initialization_actions"] or ():
                self._run(self._side(call), call["func_name"], call["arguments"])
            return str(task["ticket"])
        parts = [user[key] for key in ("reason_for_call", "known_info", "unknown_info")]
        return "\n\n".join(filter(None, parts))

    def reply(self, text: str) -> str | None:
        """Returns how the user insists, or None when the user leaves."""
        self._said += "\n" + text.lower().replace(",", "")
        return next(self._messages, None)

    def grade(self) -> bool:
        """Returns the verdict of the benchmark's checks of states, calls and messages."""
        if not all(each.lower() in self._said for each in self._criteria["communicate_info"] or ()):
            return False
        if self._solo:
            return all(map(self._holds, self._criteria["env_assertions"] or ())) and (
                "ACTION" not in self._criteria["reward_basis"] or not self._missing()
            )
        return self._expected() == str(self._now[0].db.get_hash())

    def _expected(self) -> str:
        """Returns the hash of the database as the reference calls leave it."""
        key = self._suite, self._task["id"]
        if key not in _EXPECTED:
            tools = self._new_tools()
            for name, arguments in next(self.solution()):
                self._try(tools[0], name, arguments)
            _EXPECTED[key] = str(tools[0].db.get_hash())
        return _EXPECTED[key]

    def solution(self) -> Iterator[Calls]:
        """Yields the reference calls; the user then has nothing new to say."""
        yield [(call["name"], call["arguments"]) for call in self._criteria["actions"] or ()]

    def last_words(self) -> str:
        """Returns what the user must be told."""
        return " ".join(["Done.", *(self._criteria["communicate_info"] or ())])

    def _new_tools(self) -> list[Any]:
        """Returns the tools of the agent, and of the user where they are offered, on new data."""
        tools = [each(store=self._store(), initialized=True) for each in self._classes]
        collects = gc.isenabled()
        gc.disable()  # which passes over the new objects again and again: 80 % of the time
        try:
            for each, data in zip(tools, self._databases, strict=True):
                each.db = pickle.loads(data)
        finally:
            if collects:
                gc.enable()
        return tools

    def _side(self, call: dict[str, Any]) -> Any:
        return self._now[call.get("env_type", call.get("requestor")) == "user"]

    def _holds(self, each: dict[str, Any]) -> bool:
        value = getattr(self._side(each), each["func_name"])(**each["arguments"])
        return bool(value == each["assert_value"])

    def _missing(self) -> bool:
        """Returns whether a required call was not made."""
        for action in self._criteria["actions"]:
            keys = action.get("compare_args")
            for name, arguments in self._calls:
                actual, required = arguments, action["arguments"]
                if keys is not None:
                    actual, required = ({k: a.get(k) for k in keys} for a in (actual, required))
                free = name == "transfer_to_human_agents"
                if name == action["name"] and (free or self._equal(actual, required)):
                    break
            else:
                return True
        return False

    def _call(self, name: str, /, **arguments: Any) -> str:
        self._calls.append((name, arguments))
        sides = [each for each in self._now if hasattr(each, name)]
        if not sides:  # `calculate` has no state
            return _settled(self._others[name](**arguments))
        return _text(self._run(sides[0], name, arguments))

    def _run(self, side: Any, name: str, arguments: dict[str, Any]) -> Any:
        if name == "cancel_reservation":
            held = side.db.reservations.get(arguments.get("reservation_id"))
            if held is not None and len(held.payment_history) > _MOST_PAYMENTS:
                raise self._error_type("the reservation was cancelled too often")
        result = getattr(side, name)(**arguments)
        if self._solo:
            self._sync()
        return result

    def _try(self, side: Any, name: str, arguments: dict[str, Any]) -> bool:
        """Makes a reference call, and returns whether it did not fail."""
        try:
            getattr(side, name, dict)(**arguments)
        except self._error_type:
            return False
        return True

    def _is_free(self, row: int) -> bool:
        """Returns whether no reference call changes anything, and nothing has to be said."""
        if self._solo:
            return super()._is_free(row)
        criteria = self._rows.pick(self.np_random, None, row)[0]["evaluation_criteria"]
        calls = [(c["name"], c["arguments"]) for c in criteria["actions"] or ()]
        writes = [call for call in calls if not call[0].startswith(_READS)]
        # a copy of the data takes a tenth of a second, so only likely tasks get one
        likely = not criteria["communicate_info"] and not any(
            self._try(self._tried[0], *call) for call in writes
        )
        return likely and not any(self._try(self._new_tools()[0], *call) for call in writes)


@cache
def _read(folder: Path, classes: tuple[Any, ...], store: Any) -> dict[str, list[Any]]:
    """Reads the tasks of a domain and its databases, once for all copies of the environment."""
    packed = folder / "tasks.json.gz"
    with gzip.open(packed) if packed.exists() else (folder / "tasks.json").open("rb") as file:
        tasks = {task["id"]: task for task in json.load(file)}
    names = json.loads((folder / "split_tasks.json").read_text(encoding="utf-8"))
    tools = [each(store=store()) for each in classes]
    for each in tools:
        each.initialize()
    return {
        **{side: [tasks[name] for name in names[side]] for side in ("train", "test")},
        "databases": [pickle.dumps(each.db) for each in tools],  # copied in a tenth of the time
    }


def _text(result: Any) -> str:
    """Writes a result as the benchmark does."""
    if hasattr(result, "model_dump_json"):
        return str(result.model_dump_json())
    if isinstance(result, str):
        return result
    return json.dumps(result, default=lambda value: getattr(value, "model_dump", value.__str__)())


def _settled(coroutine: Any) -> str:
    """Returns the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return str(end.value)
    raise AssertionError("it waits")
