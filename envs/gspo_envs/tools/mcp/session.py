"""Connections to Model Context Protocol servers, for synchronous callers."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import logging
import os
import re
import subprocess
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, TypeVar

from gspo_env.errors import ConfigError, MissingExtraError, ToolServerError, raised_as
from gspo_env.redaction import redact, resolve
from gspo_env.runtime import loops
from gspo_env.runtime.processes import Guard

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOOP = "mcp"
_CLOSING = 15.0
"""Seconds to wait for a server to shut down; after that, it ends in the background."""
_GRACE = 1.0
"""Seconds that a started server has after the end of its input, and again after SIGTERM."""
MOST_BYTES, MOST_VALUES = 4 << 20, 200_000
"""Maximum size of a message over stdio, and of the body of a response over HTTP. A value of two
bytes takes a hundred times as many in memory."""
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[{,"))
_KEPT = 1 << 16
"""Bytes of standard error after which the file begins anew."""
_MOST_MESSAGES, _AT_ONCE = 1000, 50
"""Messages a second, and those that are read without a pause; a server that sends more waits."""
_MOST_PAGES = 50
_MOST_TOOLS = 500
_LONGEST_REASON = 500
"""Characters of an error that the policy or the log shows."""
_SURROGATE = re.compile(r"\\\\|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(\\u[dD][89a-fA-F]\w\w)")
"""In JSON, an escaped backslash, a character in two halves, or (the group) half a character."""
_ANSWER = re.compile(r'"jsonrpc": ?"2.0", ?"id": ?([0-9]{1,15})(?!, ?"(?:method|params))\b')
"""The number of a call in its answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MCPServer:
    """How to reach a server: a command to start (stdio) or an address (streamable HTTP)."""

    name: str
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables in addition to a few harmless ones; no others are inherited. In values
    and headers, `${NAME}` is our own variable NAME, so that secrets are not part of the config."""
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, name: str, spec: Any) -> MCPServer:
        """Parses a server in the format of the common `mcpServers` files.

        Args:
            name: Name of the server in messages.
            spec: An http address, a command as a list, or a table with `command`, `args`, `env`
                and `cwd`, or with `url` and `headers`. `env` may also be a list of the names of
                variables to pass on.

        Raises:
            ConfigError: It is none of these, or a variable that it names is not set.
        """
        table: Any = {"url": spec} if isinstance(spec, str) else spec
        if isinstance(table, Sequence) and table:
            table = {"command": table[0], "args": table[1:]}
        elif not isinstance(table, Mapping):
            table = {}
        unknown = set(table) - {"command", "args", "env", "cwd", "url", "headers"}
        url, command = str(table.get("url", "")), table.get("command", "")
        wrong = bool(url) == bool(command) or (url and not url.startswith(("http://", "https://")))
        if unknown or wrong:
            shape = "an http address, a command as a list, or a table with command or url"
            raise ConfigError(f"MCP server {name!r} is {redact(spec)!r}, expected {shape}.")
        env, headers = table.get("env", {}), table.get("headers", {})
        if not isinstance(env, Mapping):
            env = {variable: f"${{{variable}}}" for variable in env}
        for value in (*env.values(), *headers.values()):
            resolve(str(value))  # an unset variable is an error of the settings
        return cls(
            name=name,
            command=(str(command), *map(str, table.get("args", ()))) if command else (),
            env=tuple(sorted((str(k), str(v)) for k, v in env.items())),
            cwd=table.get("cwd"),
            url=url,
            headers=tuple(sorted((str(k), str(v)) for k, v in headers.items())),
        )


class MCPSession:
    """One connection, opened at its first use; all of its code runs on the background loop."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._client: Any = None
        self._end = asyncio.Event()
        self._answers = 0
        self._is_noted = False
        self._ending: set[asyncio.Task[None]] = set()
        _ALIVE.add(self)

    def ask(self, question: Callable[[Any], Awaitable[T]], timeout: float) -> T:
        """Sends a request to the server.

        Raises:
            ToolServerError: The server did not answer.
        """
        return loops.run(self._ask(question, timeout), _LOOP)

    def close(self) -> None:
        """Closes the connection, and the server if it was started here; waits for both."""
        if self.is_used:
            loops.run(self._finish(), _LOOP)

    @property
    def is_used(self) -> bool:
        """Whether there is a connection, or one that is being closed."""
        return self._task is not None or bool(self._ending)

    def forget(self) -> None:
        """Closes the connection without waiting."""
        if self._task is not None:
            loops.post(self._finish(), _LOOP)

    async def _ask(self, question: Callable[[Any], Awaitable[T]], timeout: float) -> T:
        client, before, name = None, self._answers, f"MCP server {self.server.name!r}"
        try:
            async with asyncio.timeout(timeout):
                client = await self._connected()
                answer = await question(client)
        except TimeoutError:
            if client is self._client and self._answers == before:  # no call is answered: it hangs
                self._drop()
            raise ToolServerError(f"{name} gave no answer in {timeout:g} seconds") from None
        except ToolServerError:
            raise
        except Exception as error:
            if _lost(error):
                if client is self._client:  # else another call has reconnected
                    self._drop()
                raise ToolServerError(f"the connection to {name} was lost") from None
            # the log shows a cause whole, and this one can be of any length
            what = "sent an invalid answer" if isinstance(error, ValueError) else "refused"
            raise ToolServerError(f"{name} {what}: {shorten(str(error))}") from None
        self._answers += 1
        return answer

    async def _connected(self) -> Any:
        async with self._lock:
            if self._task is None or self._task.done():
                opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._client, self._end = None, asyncio.Event()
                self._task = asyncio.create_task(self._live(opened, self._end))
                self._client = await opened
            return self._client

    async def _live(self, opened: asyncio.Future[Any], end: asyncio.Event) -> None:
        """Holds the connection open; the task that enters its context must also exit it."""
        from mcp import Client

        for name in ("mcp", "client"):  # they log whatever a server sends, each with a traceback
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with tempfile.TemporaryFile() as log:
            try:
                async with AsyncExitStack() as stack:
                    transport = await _transport(self.server, stack, log)
                    client = Client(transport, message_handler=self._note)
                    await stack.enter_async_context(client)
                    # it would match a pattern of the server on this loop, and lists the tools first
                    client.session.validate_tool_result = _accept
                    if not opened.done():
                        opened.set_result(client)
                        await end.wait()
            except Exception as error:
                log.seek(0)
                shown = log.read()[-_LONGEST_REASON:].decode(errors="replace").strip()
                reason = f"{_reason(error)} {shown}".strip()
                words = shorten(reason, 2 * _LONGEST_REASON)
                if opened.done():
                    logger.warning("MCP server %s: %s", self.server.name, words)
                else:
                    opened.set_exception(
                        ToolServerError(f"MCP server {self.server.name!r} cannot be used: {words}")
                    )

    async def _note(self, message: Any) -> None:
        """Logs the first line of a connection that is not a message."""
        if isinstance(message, Exception) and not self._is_noted:
            self._is_noted = True
            words = "MCP server %s sent what is not a message (%s); further ones are not shown"
            logger.warning(words, self.server.name, shorten(_reason(message)))

    def _drop(self) -> None:
        """Ends the connection in the background and kills a server that hangs."""
        task, self._task = self._task, None
        self._end.set()
        if task is not None:
            if self._client is None:  # it is still in the handshake
                task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._client = None

    async def _finish(self) -> None:
        self._drop()
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSING)


_LISTINGS: dict[MCPServer, list[Any]] = {}
_ALIVE: weakref.WeakSet[MCPSession] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends all servers at once, including those that ignore the end of their input."""

    async def finish() -> None:
        await asyncio.gather(*(session._finish() for session in used))

    if used := [session for session in _ALIVE if session.is_used]:
        loops.run(finish(), _LOOP)


def list_tools(server: MCPServer, session: MCPSession, timeout: float) -> list[Any]:
    """Lists a server's tools, once for all environments.

    Raises:
        MissingExtraError: The package `mcp` is not installed.
        ToolServerError: The server does not answer, or lists too many tools or pages.
    """
    if server not in _LISTINGS:
        what, hint = "MCP tools need the package mcp from 2.0 on", "; pip install 'gspo-env[mcp]'"
        with raised_as(MissingExtraError, what, ImportError, mend=hint):
            from mcp import Client  # noqa: F401  # from version 2 on

        async def every_page(client: Any) -> list[Any]:
            page = await client.list_tools()
            listed, pages = list(page.tools), 1
            while page.next_cursor:
                if pages == _MOST_PAGES or len(listed) > _MOST_TOOLS:
                    break
                page = await client.list_tools(cursor=page.next_cursor)
                listed, pages = [*listed, *page.tools], pages + 1
            if page.next_cursor or len(listed) > _MOST_TOOLS:
                raise ToolServerError(
                    f"MCP server {server.name!r} lists more than {_MOST_TOOLS} tools or "
                    f"{_MOST_PAGES} pages of them"
                )
            return listed

        _LISTINGS[server] = session.ask(every_page, timeout)
    return _LISTINGS[server]


async def _transport(server: MCPServer, stack: AsyncExitStack, log: IO[bytes]) -> Any:
    if not server.url:
        return _started(server, log)
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # a server may hold a stream open for long; each call has its own limit
    limits = httpx2.Timeout(30.0, read=None)
    headers = {name: resolve(value) for name, value in server.headers}
    client = httpx2.AsyncClient(
        headers={**headers, "accept-encoding": "identity"},
        timeout=limits,
        event_hooks={"response": [_bound]},
    )
    http = await stack.enter_async_context(client)
    return streamable_http_client(server.url, http_client=http)


@asynccontextmanager
async def _started(server: MCPServer, log: IO[bytes]) -> AsyncIterator[tuple[Any, Any]]:
    """Starts the command of a server under a guard, and ends both; yields its streams twice."""
    import anyio
    from mcp.client.stdio import get_default_environment

    loop, (stdin, own_end) = asyncio.get_running_loop(), os.pipe()
    status = os.open(os.devnull, os.O_WRONLY)  # nobody reads the exit code
    guard = Guard(
        ["report", str(_GRACE), str(status), str(stdin), *server.command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=get_default_environment() | {name: resolve(value) for name, value in server.env},
        cwd=server.cwd,
        pass_fds=(status, stdin),
    )
    os.close(stdin)
    os.close(status)
    outputs = [asyncio.StreamReader(limit=MOST_BYTES) for _ in range(2)]
    for reader, pipe in zip(outputs, (guard.process.stdout, guard.process.stderr), strict=True):
        make = partial(asyncio.StreamReaderProtocol, reader)
        await loop.connect_read_pipe(make, pipe)
    into, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(own_end, "wb"))
    noting = asyncio.create_task(_keep(outputs[1], log))
    try:
        streams = _Streams(outputs[0], into, log)
        yield streams, streams
    finally:
        with anyio.CancelScope(shield=True):
            into.close()
            await _drain(outputs[0], _GRACE)  # it may end by itself
            guard.ask_to_end()
            await _drain(outputs[0], _CLOSING)
            await asyncio.wait({noting}, timeout=_GRACE)
            noting.cancel()
            guard.process.poll()


class _Streams:
    """What a started server sends, within bounds, and its input; both streams of the SDK."""

    def __init__(
        self, out: asyncio.StreamReader, into: asyncio.WriteTransport, log: IO[bytes]
    ) -> None:
        self._out, self._into, self._log = out, into, log

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def send(self, item: Any) -> None:
        text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        self._into.write(f"{text}\n".encode(errors="replace"))

    async def __aiter__(self) -> AsyncIterator[Any]:
        with contextlib.suppress(ValueError):  # a line exceeds the limit of the stream
            for number in itertools.count(1):
                if not (line := await self._out.readline()):
                    return
                if Structure().values(line) > MOST_VALUES:
                    break
                yield _read(line.decode(errors="replace"))
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(_AT_ONCE / _MOST_MESSAGES)
        bounds = b"a message has more than %d bytes or %d values" % (MOST_BYTES, MOST_VALUES)
        _note(self._log, bounds)


async def _drain(out: asyncio.StreamReader, seconds: float) -> None:
    """Reads on until a server has ended, since one that writes cannot read that it should."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while await out.read(1 << 16):
                pass


async def _keep(errors: asyncio.StreamReader, log: IO[bytes]) -> None:
    while data := await errors.read(_KEPT):
        _note(log, data)


def _note(log: IO[bytes], data: bytes) -> None:
    """Appends to standard error, of which the last part is kept."""
    if log.tell() + len(data) > _KEPT:
        log.truncate(0)
        log.seek(0)
    log.write(data)
    log.flush()


class Structure:
    """Counts the values of a line of JSON that comes in parts."""

    def __init__(self) -> None:
        self._inside, self._tail = False, b""

    def values(self, part: bytes) -> int:
        """Returns the number of values that begin in the next part."""
        part = self._tail + part
        self._tail = b"\\" if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""
        pieces = re.sub(rb"\\.", b"", part[: len(part) - len(self._tail)]).split(b'"')
        outside = b"".join(pieces[self._inside :: 2])
        self._inside ^= len(pieces) % 2 == 0
        return len(outside.translate(None, _NO_STRUCTURE))


def _read(line: str) -> Any:
    """Reads a message, without lone surrogates if it has any, or as the error of its call."""
    from mcp.shared.message import SessionMessage
    from mcp.types import PARSE_ERROR, jsonrpc_message_adapter

    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        fault = error
    whole = _SURROGATE.sub(lambda match: "\\ufffd" if match[1] else match[0], line)
    answer = _ANSWER.search(line)
    reason = {"code": PARSE_ERROR, "message": _reason(fault)}
    refusal = {"jsonrpc": "2.0", "id": int(answer[1]), "error": reason} if answer else None
    for text in (whole, json.dumps(refusal)):
        with contextlib.suppress(ValueError):
            return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
    return fault


async def _accept(name: str, result: Any) -> None:
    """Stands for the check of a structured result against the schema of the server."""


async def _bound(response: Any) -> None:
    """Refuses a compressed body, and one that is too long while it is read."""
    import httpx2

    coding = response.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        await response.aclose()
        raise httpx2.ReadError(f"the body is compressed ({shorten(coding, 40)})")

    class Bounded(httpx2.AsyncByteStream):
        """The body, of which at most `MOST_BYTES` and `MOST_VALUES` are read."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        async def __aiter__(self) -> Any:
            read, values, structure = 0, 0, Structure()
            async for part in self.stream:
                read += len(part)
                for n, line in enumerate(part.split(b"\n")):
                    structure = Structure() if n else structure
                    values += structure.values(line)
                if read > MOST_BYTES or values > MOST_VALUES:
                    raise httpx2.ReadError(
                        f"the body has more than {MOST_BYTES} bytes or {MOST_VALUES} values"
                    )
                yield part

        async def aclose(self) -> None:
            await self.stream.aclose()

    response.stream = Bounded(response.stream)


def shorten(text: str, length: int = _LONGEST_REASON) -> str:
    """Cuts a text of the server visibly."""
    return text if len(text) <= length else f"{text[:length]}... (cut, {len(text)} characters)"


def _lost(error: BaseException) -> bool:
    import anyio
    import httpx2
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return bool(error.code == CONNECTION_CLOSED)
    broken = (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.TransportError, OSError)
    return isinstance(error, broken)


def _reason(error: BaseException) -> str:
    """Describes the first cause in a group of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
