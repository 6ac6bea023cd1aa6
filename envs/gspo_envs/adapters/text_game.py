"""Base of text games, and the Java process that the games of one package share."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gspo_env.env.base import ResetResult, StepResult
from gspo_env.errors import EnvironmentCrashError, EnvironmentHangError, MissingExtraError
from gspo_env.runtime.processes import Guard
from gspo_envs.adapters.foreign import RowEnv, load
from gspo_envs.data.rows import TaskRows

_LOCK = threading.Lock()
_MAX_COMMAND = 256
"""Characters of a command that a game reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """What a game shows after a command.

    Example:
        >>> Screen(text="Taken.", score=0.5).over
        False
    """

    text: str
    score: float
    """The score so far; that of a solved game is 1."""
    success: bool = False
    """Whether the game says that it is won."""
    over: bool = False
    """Whether it has ended, won or lost."""


class TextGameEnv(RowEnv):
    """A text game: each action is a command, and its reward is the increase of the score.

    If the game raises, hangs or dies, the episode is lost: it is played again and never scored.

    Args:
        rows: The games to train on.
        held_out: The games for evaluation.
        show_actions: Whether each observation ends with the commands that the game accepts.
        max_turns: Turns before the episode is truncated.
    """

    system_prompt = "You play a text game. Answer each message with one command and nothing else."

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Sequence[Mapping[str, Any]],
        *,
        show_actions: bool,
        max_turns: int,
    ) -> None:
        """Counts the games."""
        super().__init__(max_turns)
        self._rows, self._show_actions = TaskRows(rows, held_out=held_out), show_actions
        self.num_tasks, self.num_eval_tasks = len(self._rows), self._rows.num_held_out

    @abstractmethod
    def open(self, row: Any, index: int, seed: int) -> Screen:
        """Begins the game of a row, and returns its task and first text."""

    @abstractmethod
    def play(self, command: str) -> Screen:
        """Takes a command."""

    @abstractmethod
    def actions(self) -> list[str]:
        """Returns the commands that the game accepts now."""

    @abstractmethod
    def gold(self) -> list[str]:
        """Returns the commands that solve the game."""

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Begins the game that the seed picks."""
        row, index = self._rows.pick(self.np_random, self._seed, options.get("row"))
        self._solution: Iterator[str] | None = None
        screen = self.open(row, index, seed)
        self._score = screen.score
        return self._shown(screen), {"row": index, "task_key": " ".join(map(str, row.values()))}

    def act(self, action: str) -> StepResult:
        """Plays one command."""
        screen = self.play(" ".join(action.split())[:_MAX_COMMAND])
        reward, self._score = screen.score - self._score, screen.score
        return self._shown(screen), reward, screen.over, False, {"success": screen.success}

    def _try(self, action: str) -> StepResult:
        return self.act(action)  # an error is not the policy's: the episode is lost, not scored

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the next command of the game's own solution; with probability `noise`, looks."""
        if noise > 0.0 and self.np_random.random() < noise:
            return "look around"
        self._solution = self._solution or iter(self.gold())
        return next(self._solution, "look around")

    def _shown(self, screen: Screen) -> str:
        text = screen.text.strip()
        if self._show_actions and not screen.over:
            text += "\n\nCommands: " + "; ".join(sorted(set(self.actions())))
        return text


class Java:
    """A Java process with games of a jar; it ends with its last user, and with our process.

    Args:
        jar: The path of the jar, in whose folder Java runs.
        interface: The Java class of a game.
        memory: MiB of Java's heap.
        timeout: Seconds that the start or one call may take.
        options: Further options of the `java` command.

    Raises:
        MissingExtraError: Py4J or Java is not installed.
        EnvironmentCrashError: Java ended or was not ready in time.
    """

    _running: ClassVar[dict[tuple[Any, ...], Java]] = {}

    def __init__(
        self, jar: str, interface: str, memory: int, timeout: float, *options: str
    ) -> None:
        """Starts Java."""
        py4j = load("py4j.java_gateway", "Py4J", install="py4j")
        if shutil.which("java") is None:
            raise MissingExtraError("Text games need Java; `java` is not in PATH.")
        logging.getLogger("py4j").setLevel(logging.CRITICAL)  # what it logs, it raises too

        class Client(py4j.GatewayClient):  # type: ignore[misc, name-defined]
            def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
                connection = self._get_connection()  # py4j's own would send it twice
                answer = connection.send_command(command)
                self._give_back_connection(connection)
                return answer

        classes = os.pathsep.join((py4j.find_jar_path(), jar))
        server = ("-classpath", classes, "py4j.GatewayServer", "--enable-auth", "0")
        heap = (f"-Xmx{memory}m", "-XX:+UseSerialGC")
        # a guard ends Java, also a stopped one, however our process ends
        self._guard = Guard(
            ["run", "1", "java", *heap, *options, *server],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=os.path.dirname(jar),
        )
        self.process = self._guard.process
        """The guard, which ends with Java."""
        output = self.process.stdout
        assert output is not None
        timer = threading.Timer(timeout, self._guard.ask_to_end)
        timer.start()
        messages = []
        while (line := output.readline()) and not line.strip().isdigit():
            messages.append(line.decode(errors="replace"))  # of an old Java, or on its options
        token = output.readline().decode().strip()
        timer.cancel()
        if not token:
            code, reason = self._guard.end(), "".join(messages)[:_MAX_COMMAND].strip()
            raise EnvironmentCrashError(
                f"java ended ({code}) or was not ready in {timeout:g} s: {reason or 'no message'}"
            )
        threading.Thread(target=deque, args=(output, 0), daemon=True).start()  # reads the rest
        parameters = py4j.GatewayParameters(port=int(line), auth_token=token, read_timeout=timeout)
        self._client = Client(gateway_parameters=parameters)
        self._gateway = py4j.JavaGateway(self._client, gateway_parameters=parameters)
        self._interface, self.users, self._error = interface, 0, py4j.Py4JError

    @classmethod
    def join(cls, owner: object, *args: Any) -> Java:
        """Returns the process of an owner for these arguments; `leave` must give it back."""
        with _LOCK:
            java = cls._running.get((owner, *args))
            if java is None or java.process.poll() is not None:
                java = cls._running[owner, *args] = cls(*args)
            java.users += 1
            return java

    def leave(self) -> None:
        """Gives the process back; the last user ends it."""
        with _LOCK:
            self.users -= 1
            if self.users == 0:
                self.end()
                for key in [key for key, java in self._running.items() if java is self]:
                    del self._running[key]

    def end(self) -> None:
        """Ends the process at once."""
        self._client.is_connected = False
        self._guard.end()
        self._client.close()

    def game(self) -> Any:
        """Returns the Java object of a new game."""
        value = self._gateway.jvm
        for name in self._interface.split("."):
            value = getattr(value, name)
        return value()

    def release(self, game: Any) -> None:
        """Lets Java drop a game, which a cycle holds here until Python's collector runs."""
        self._gateway.detach(game)

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Makes errors of calls those of an environment; a process that hangs or dies is ended."""
        try:
            yield
        except self._error as error:
            cause = getattr(error, "cause", None)
            kind = (
                EnvironmentHangError if isinstance(cause, TimeoutError) else EnvironmentCrashError
            )
            text = f"the game's Java process failed: {error} {cause or ''}".strip()
            if type(error).__name__ == "Py4JNetworkError":
                self.end()
            raise kind(text) from None  # py4j's own asks Java for its text whenever it is shown


class JavaGameEnv(TextGameEnv):
    """A text game in Java; `jar` and `interface` say which.

    The games of a process share one Java process, which all lose if it hangs or dies.

    Args:
        args: See `TextGameEnv`.
        memory: MiB of Java's heap.
        timeout: Seconds that one call of Java may take.
        kwargs: See `TextGameEnv`.
    """

    jar: str
    interface: str
    shares: bool = True
    """Whether it may share a process, so whether games have no state outside of their object."""
    java_options: tuple[str, ...] = ()
    """Options of the `java` command."""
    java: Java | None = None
    """The process, from the first reset to `close`."""
    _last: Any = None

    def __init__(self, *args: Any, memory: int, timeout: float, **kwargs: Any) -> None:
        """Sets the limits of the Java process."""
        super().__init__(*args, **kwargs)
        self._limits = memory, timeout

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Begins the game that the seed picks, in a new Java process if the last one has ended."""
        if self.java is None or self.java.process.poll() is not None:
            self.close()
            owner = None if self.shares else self
            self.java = Java.join(
                owner, self.jar, self.interface, *self._limits, *self.java_options
            )
        with self.java.calls():
            return super().begin(seed, options)

    def act(self, action: str) -> StepResult:
        """Plays one command."""
        assert self.java is not None
        with self.java.calls():
            return super().act(action)

    def new_game(self) -> Any:
        """Returns the Java object of a new game, in place of the one before."""
        assert self.java is not None
        if self._last is not None:
            self.java.release(self._last)
        self._last = self.java.game()
        return self._last

    def close(self) -> None:
        """Leaves the Java process; a reset joins one again."""
        java, self.java = self.java, None
        if java is not None:
            java.leave()
