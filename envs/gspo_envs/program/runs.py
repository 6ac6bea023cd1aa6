"""A running program: its session of the address, and what it sends."""

from __future__ import annotations

import contextlib
import queue
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_env.errors import RefusedError
from gspo_envs.program.rewards import TurnRewards

if TYPE_CHECKING:
    from gspo_env.serving import Reply, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRequest:
    """A request of the program and the future of its answer."""

    request: Request
    reply: Future[Reply]

    def answer(self, reply: Reply) -> None:
        """Answers the request, unless the program has hung up."""
        with contextlib.suppress(InvalidStateError):
            self.reply.set_result(reply)

    def refuse(self, error: RefusedError) -> None:
        """Refuses the request, unless the program has hung up."""
        with contextlib.suppress(InvalidStateError):
            self.reply.set_exception(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramEnd:
    """How a program ended."""

    result: Any = None
    """What a function returned, or the last line of a command's output: the value of its JSON, else
    its text."""
    error: Exception | None = None
    """What a function raised."""
    code: int | None = 0
    """The exit code; negative for a signal."""
    stderr: str = ""
    """The end of a command's standard error."""


class RunningProgram:
    """A program that plays one episode, with its session of the address."""

    def __init__(self, start: Callable[..., Callable[[], None]], owner: object) -> None:
        """Opens the session and starts the program.

        Args:
            start: Starts the program, given the session and the inbox; returns what ends it.
            owner: The program is ended when it is garbage-collected.
        """
        from gspo_env.serving import address

        self.inbox, self.rewards = Inbox(), TurnRewards()
        self.session = address().open(self.inbox.ask, self.rewards.post)
        try:
            end = start(session=self.session, inbox=self.inbox)
        except BaseException:
            self.session.close()
            raise
        ends = (self.inbox.close, self.session.close, end)
        self._forgotten = weakref.finalize(owner, _end_all, *ends)

    def end(self) -> None:
        """Ends its requests and its processes, without waiting; may be called again."""
        self._forgotten()


def _end_all(*ends: Callable[[], None]) -> None:
    for end in ends:
        end()


class Inbox:
    """What a program sends, in the order of its arrival."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[PendingRequest | None] = queue.SimpleQueue()
        self._end: ProgramEnd | None = None
        self._closed = False

    def ask(self, request: Request) -> Future[Reply]:
        """Takes a request; returns the future of its answer, which may be cancelled."""
        reply: Future[Reply] = Future()
        self._requests.put(PendingRequest(request=request, reply=reply))
        if self._closed:
            reply.cancel()
        return reply

    def end(self, end: ProgramEnd) -> None:
        """Takes the end of the program."""
        self._end = end
        self._requests.put(None)

    def next(self, seconds: float) -> PendingRequest | ProgramEnd | None:
        """Waits for the end of the program or its next request; None if neither comes in time.

        Requests that the program has given up, and those that are still open at its end, are
        dropped.
        """
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while self._end is None:
                pending = self._requests.get(timeout=max(0.0, deadline - time.monotonic()))
                if self._end is None and pending is not None and not pending.reply.cancelled():
                    return pending
        return self._end

    def close(self) -> None:
        """Cancels the requests that wait; later ones are cancelled at once."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (pending := self._requests.get_nowait()) is not None:
                    pending.reply.cancel()
