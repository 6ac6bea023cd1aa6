"""Terminal tasks in the format of Harbor: `gym.make("gspo/Harbor-v0", folder="tasks")`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gspo_env.env.base import Options, ResetResult
from gspo_env.env.tool_env import ToolEnv
from gspo_env.errors import ConfigError, EnvironmentContractError, raised_as
from gspo_env.redaction import clean
from gspo_env.runtime.threads import without_limit
from gspo_env.sandbox import SandboxResult, Stop
from gspo_env.sandbox.session import SandboxSession
from gspo_env.seeding import fingerprint
from gspo_env.tools.tool import format_tool_call, tool
from gspo_envs.data.rows import TaskRows
from gspo_envs.harbor.tasks import (
    LOGS,
    SOLUTION,
    TESTS,
    HarborTask,
    archive_of,
    prepare,
    read_tasks,
)

SANDBOXES = ("podman", "docker", "jail")
_DONE = "Done."
_REWARDS = f"{LOGS}/verifier"
_STATE, _OUTPUT = "/tmp/.gspo-shell", "/tmp/.gspo-output"
_SHOW = """if [ ! -f OUTPUT ]; then size=0; else size=$(wc -c <OUTPUT); fi
if [ "$size" = 0 ]; then :; elif [ "$size" -le LIMIT ]; then cat OUTPUT; else
head -c HALF OUTPUT; printf '\\n[... %d bytes left out ...]\\n' $((size - 2 * HALF))
tail -c HALF OUTPUT; fi"""
_RUN = f"""rm -rf OUTPUT; bash -c "$2" bash "$1" >OUTPUT 2>&1 </dev/null
code=$?; {_SHOW}; exit $code"""
"""Runs a command by `_SHELL` and shows its output, without the middle of a long one."""
_SHELL = f"""[ -r {_STATE} ] && . {_STATE} 2>/dev/null
_save() {{ set +eax; {{ export -p; declare -f; printf "cd -- %q\n" "$PWD"; }} >{_STATE}.new \
2>/dev/null && mv {_STATE}.new {_STATE}; }}
trap _save EXIT; set -a
eval "$1"
"""
"""Runs a command with the folder, the variables and the functions that the last one has left."""
_CLEAR = f"""rm -rf {TESTS}/* {TESTS}/.[!.]* {_REWARDS}; mkdir -p {_REWARDS} {LOGS}/agent"""
"""Removes what an episode has put in the place of tests and rewards."""


class HarborEnv(ToolEnv):
    """A task in a terminal, whose tests decide the outcome.

    The policy runs commands with the tool `run`, and ends with an action without a call. Then the
    tests are put into the sandbox and run. The outcome is what they write to
    `/logs/verifier/reward.txt` or `reward.json`, and 0 without either; from 1 on it is a success.
    If the sandbox ends or can't be started, the episode is lost and has no score.

    Args:
        folder: A folder with tasks, or one task.
        sandbox: `podman` or `docker`; or `jail`, for tasks whose Dockerfile only copies files, with
            the programs of this machine.
        held_out: The share of tasks that is held out for evaluation, or a folder with them.
        exclude: Names of tasks to leave out.
        limits: Fields of `Containers`, or of `Sandbox` in the jail, that differ from the task's.
        writable: Folders that commands can write to, beside the working folder and `/tmp`.
        partial: Whether an episode that fails has the share of passed tests as its outcome, if the
            tests write `/logs/verifier/ctrf.json`.
        command_seconds: Time of one command.
        output: Bytes of output that an observation shows; the middle of a longer one is left out.
        max_turns: Turns before the episode is truncated; its tests then run too.

    Raises:
        ConfigError: An argument or a task is invalid.
        SandboxUnavailableError: An image can't be built, or nothing can be isolated here.
    """

    system_prompt = (
        "Solve the task in a Linux terminal. The tool runs a command and shows its output and exit "
        "code; make one call per turn. When the task is done, answer in words without a call."
    )
    blocking = True
    gives_outcome = True
    credit_score = "outcome"
    expert_solves = True

    def __init__(
        self,
        folder: str | os.PathLike[str] = "",
        sandbox: Literal["podman", "docker", "jail"] = "podman",
        *,
        held_out: float | str = 0.1,
        exclude: Sequence[str] = (),
        limits: Mapping[str, Any] | None = None,
        writable: Sequence[str] = (),
        partial: bool = False,
        command_seconds: float = 60.0,
        output: int = 4000,
        max_turns: int = 20,
    ) -> None:
        """Reads the tasks and builds their images."""
        super().__init__(max_turns)
        if sandbox not in SANDBOXES:
            raise ConfigError(f"Harbor: sandbox is {sandbox!r}, expected {', '.join(SANDBOXES)}.")
        if not 0 < command_seconds < math.inf or not 100 <= output <= 60_000:
            raise ConfigError(
                f"Harbor: command_seconds is {command_seconds!r} and output {output!r}, expected "
                "seconds above 0 and 100 to 60000 bytes."
            )
        tasks = read_tasks(folder, exclude)
        other = read_tasks(held_out, exclude) if isinstance(held_out, str) else None
        self._rows = TaskRows(tasks, held_out=held_out if other is None else other)
        options = (sandbox, tuple(writable), tuple(sorted((limits or {}).items())))
        with without_limit():
            self._places = {task: prepare(task, *options) for task in [*tasks, *(other or [])]}
        self.num_tasks, self.num_eval_tasks = len(self._rows), self._rows.num_held_out
        place = next(iter(self._places.values()))
        self.max_copies = getattr(place.box, "at_once", None)  # a jail costs little
        self.partial, self.command_seconds, self.output = partial, command_seconds, output
        self._session: SandboxSession | None = None

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Starts the sandbox of the task that the seed picks; `options={"row": 3}` selects one.

        Raises:
            EnvironmentCrashError: It can't be started.
        """
        self.abandon()
        super().reset(seed=seed, options=options)
        self._ended = True
        self._task, row = self._rows.pick(self.np_random, seed, (options or {}).get("row"))
        self._outcome: float | None = None
        self._parts: dict[str, float] = {}
        self._commands: tuple[str, ...] = ()
        self._seconds_left = self._task.seconds
        self._place = self._places[self._task]
        self._session = self._place.open()
        self._ended = False
        key = fingerprint(*self._commands)
        return clean(self._task.instruction), {
            "task_key": self._task.name,
            "row": row,
            "state_key": key,
        }

    @tool
    def run(self, command: str) -> str:
        """Run a shell command; the folder, variables and background processes stay for the next.

        Args:
            command: The command, for bash.
        """
        seconds = min(self.command_seconds, self._seconds_left)
        self._commands += (command,)
        if seconds <= 0:
            return "the time of the task is over; answer without a call"
        result = self._exec(
            ["bash", "-c", self._fill(_RUN), "bash", clean(command), _SHELL], seconds
        )
        self._seconds_left -= result.seconds
        shown = result.stdout
        if result.stopped is Stop.TIME:
            shown = self._exec(["bash", "-c", self._fill(_SHOW)], 10.0).stdout
        ending = "" if not shown or shown.endswith("\n") else "\n"
        if result.stopped is Stop.MEMORY:
            limit = self._place.box.memory_mib
            return f"{shown}{ending}[killed: out of memory, the limit is {limit} MiB]"
        if result.stopped is not None:
            return f"{shown}{ending}[killed after {seconds:g} s]"
        return f"{shown}{ending}[exit code {result.exit_code}]"

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Ends the episode."""
        return "", 0.0, True

    def step_info(self, terminated: bool, truncated: bool) -> dict[str, Any]:
        """Runs the tests at the end; returns the outcome."""
        info: dict[str, Any] = {"state_key": fingerprint(*self._commands)}
        if not (terminated or truncated):
            return info
        try:
            outcome = self._grade(self._task)
        finally:
            self.abandon()
        parts = {"reward_parts": self._parts} if self._parts else {}
        return info | parts | {"success": outcome >= 1.0, "episodic_reward": outcome}

    def abandon(self) -> None:
        """Ends the sandbox."""
        self._ended = True
        if self._session is not None:
            self._session.stop()
            self._session = None

    def close(self) -> None:
        """Ends the sandbox."""
        self.abandon()

    def expert_action(self, noise: float = 0.0) -> str:
        """Runs the solution of the task, then ends; with probability `noise` it ends at once.

        Raises:
            NotImplementedError: The task has no solution.
        """
        if (solution := self._task.solution) is None:
            raise NotImplementedError(f"the task {self._task.name!r} has no solution/solve.sh")
        if self._commands or (noise > 0.0 and self.np_random.random() < noise):
            return _DONE
        if self._session is not None and len(list((self._task.folder / "solution").iterdir())) > 1:
            self._session.put(SOLUTION, archive_of(self._task.folder / "solution"))
        _, _, command = (
            solution.partition("\n") if solution.startswith("#!") else ("", "", solution)
        )
        return format_tool_call("run", {"command": command.strip()})

    def _exec(self, command: Sequence[str], seconds: float) -> SandboxResult:
        assert self._session is not None
        return self._session.exec(command, seconds=seconds, variables=self._place.variables)

    def _fill(self, script: str) -> str:
        values = {"OUTPUT": _OUTPUT, "LIMIT": str(self.output), "HALF": str(self.output // 2)}
        for name, value in values.items():
            script = script.replace(name, value)
        return script

    def _grade(self, task: HarborTask) -> float:
        """Runs the tests, without what the episode has left behind."""
        assert self._session is not None
        self._session.kill()
        self._exec(["bash", "-c", _CLEAR], 30.0)
        self._session.put(TESTS, archive_of(task.folder / "tests"))
        # programs read start-up files of their home, such as `.sqliterc`; long output is no failure
        quiet = f"HOME={TESTS} exec bash {TESTS}/test.sh >/dev/null 2>&1"
        self._exec(["bash", "-c", quiet], task.test_seconds)
        outcome, self._parts = _read_reward(self._session, task.name)
        if (
            self.partial
            and outcome < 1.0
            and (report := self._session.get(f"{_REWARDS}/ctrf.json"))
        ):
            outcome = max(outcome, _passed(report))
        return outcome


def _read_reward(session: SandboxSession, name: str) -> tuple[float, dict[str, float]]:
    """Returns the reward that tests have written, and its parts.

    Raises:
        EnvironmentContractError: It is not a finite number.
    """
    parts: dict[str, float] = {}
    faults = (ValueError, TypeError, AttributeError, RecursionError)
    with raised_as(EnvironmentContractError, f"Harbor: the reward of {name!r}", *faults):
        if (data := session.get(f"{_REWARDS}/reward.txt")) is not None:
            reward = float(data)
        elif (data := session.get(f"{_REWARDS}/reward.json")) is not None:
            parts = {str(key): float(value) for key, value in json.loads(data).items()}
            reward = parts.pop("reward", sum(parts.values()) / max(1, len(parts)))
        else:
            return 0.0, {}
    if not all(map(math.isfinite, (reward, *parts.values()))):
        raise EnvironmentContractError(f"Harbor: the reward of {name!r} is not a finite number.")
    return reward, parts


def _passed(report: bytes) -> float:
    """Returns the share of passed tests of a report in the Common Test Report Format."""
    try:
        summary = json.loads(report)["results"]["summary"]
        return float(summary["passed"] / summary["tests"]) if summary["tests"] else 0.0
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0.0
