"""The tools of Model Context Protocol servers, as tools of an environment."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, TypeAdapter

from gspo_env import background
from gspo_env.errors import ConfigError, MissingExtraError, ToolServerError
from gspo_env.text_env import ResetResult
from gspo_env.tool_env import ToolEnv
from gspo_env.tools import Tool
from gspo_envs.dataset import DatasetEnv

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOOP = "mcp"
_CLOSING = 15.0
"""Seconds that an orderly end of a server may take before it is left to the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MCPServer:
    """How to reach a server: a command to start (stdio) or an address (streamable HTTP)."""

    name: str
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables beside a few harmless ones; the rest is not inherited."""
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, name: str, spec: Any) -> MCPServer:
        """Read a server in the form of the common `mcpServers` files.

        Args:
            name: What messages call it.
            spec: An http address, a command as a list, or a table with `command`, `args`, `env`
                and `cwd`, or with `url` and `headers`.

        Raises:
            ConfigError: It is none of these.
        """
        if isinstance(spec, str):
            spec = {"url": spec}
        elif isinstance(spec, Sequence):
            spec = {"command": spec[0] if spec else "", "args": spec[1:]}
        allowed = {"command", "args", "env", "cwd", "url", "headers"}
        shape = "an http address, a command as a list, or a table with command or url"
        if not isinstance(spec, Mapping) or set(spec) - allowed:
            raise ConfigError(f"MCP server {name!r} is {spec!r}, expected {shape}.")
        url, command = str(spec.get("url", "")), spec.get("command", "")
        if bool(url) == bool(command) or (url and not url.startswith(("http://", "https://"))):
            raise ConfigError(f"MCP server {name!r} is {spec!r}, expected {shape}.")
        return cls(
            name=name,
            command=(str(command), *map(str, spec.get("args", ()))) if command else (),
            env=tuple(sorted((str(k), str(v)) for k, v in spec.get("env", {}).items())),
            cwd=spec.get("cwd"),
            url=url,
            headers=tuple(sorted((str(k), str(v)) for k, v in spec.get("headers", {}).items())),
        )


class MCPTools(ToolEnv):
    """Gives a `ToolEnv` the tools of MCP servers, after its own.

    A server that hangs, dies or answers with an error is an observation `Error: ...`; its
    connection is made anew at the next call. `super().reset` and `super().close` must be called.
    """

    mcp_servers: Mapping[str, Any] = {}
    """The servers by name; see `MCPServer.parse`."""
    mcp_only: Sequence[str] = ()
    """The tools to offer; empty offers all."""
    mcp_session: Literal["episode", "env", "process"] = "episode"
    """How long a connection, and a started server, lives: one episode, one environment, or the
    whole process for all environments. Servers that remember need "episode"."""
    mcp_timeout: float = 30.0
    """The most seconds of one call, starting the server included."""
    mcp_result_length: int = 8192
    """The most characters of a result that the policy reads."""
    blocking = True

    @cached_property
    def tools(self) -> tuple[Tool, ...]:  # type: ignore[override]
        """The environment's own tools, then those of the servers.

        Raises:
            ToolServerError: A server cannot be reached and its tools were never listed.
            ConfigError: Two tools have one name, or one of `mcp_only` is missing.
        """
        made = list(super().tools)
        for server in self._servers:
            listed = _list_tools(server, self._session(server), self.mcp_timeout)
            made += [_as_tool(one, partial(self._call, server, one.name)) for one in listed]
        if self.mcp_only:
            own = len(super().tools)
            made = made[:own] + [one for one in made[own:] if one.name in self.mcp_only]
        names = [one.name for one in made]
        if missing := sorted(set(self.mcp_only) - set(names)):
            raise ConfigError(f"MCP: no server has a tool {missing[0]!r}.")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"MCP: there are two tools {twice[0]!r}, choose with mcp_only.")
        return tuple(made)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult:
        """Begin an episode; with `mcp_session="episode"` every server begins anew too."""
        if self.mcp_session == "episode":
            self._drop_sessions()
        result = super().reset(seed=seed, options=options)
        logger.debug("tools: %s", [one.name for one in self.tools])  # connects, the first time
        return result

    def close(self) -> None:
        """End the connections of this environment and the servers it started."""
        self._drop_sessions()
        super().close()

    @cached_property
    def _servers(self) -> tuple[MCPServer, ...]:
        return tuple(MCPServer.parse(name, spec) for name, spec in self.mcp_servers.items())

    @cached_property
    def _sessions(self) -> dict[MCPServer, _Session]:
        return _PROCESS_SESSIONS if self.mcp_session == "process" else {}

    def _session(self, server: MCPServer) -> _Session:
        return self._sessions.setdefault(server, _Session(server))

    def _drop_sessions(self) -> None:
        if self.mcp_session != "process":
            for session in self._sessions.values():
                session.close()

    def _call(self, server: MCPServer, name: str, **arguments: Any) -> str:
        session = self._session(server)
        result = session.ask(lambda client: client.call_tool(name, arguments), self.mcp_timeout)
        text = _result_text(result)
        if len(text) > self.mcp_result_length:
            text = f"{text[: self.mcp_result_length]}... (cut, {len(text)} characters)"
        if result.is_error:
            raise ToolServerError(text or "the server gave no reason")
        return text


class MCPEnv(MCPTools, DatasetEnv):
    """Answer the prompts of a dataset with the tools of Model Context Protocol servers.

    Args:
        servers: The servers by name, each an http address, a command as a list, or a table as in
            `mcpServers` files.
        data: See `gspo_envs.dataset.DatasetEnv`, which takes the further arguments too.
        session: How long a server lives: "episode", "env" or "process".
        only: Tools to offer; all by default.
        timeout: The most seconds of one call.
        calls: The most tool calls of one turn.
        max_turns: Steps before the episode is truncated.
        **dataset: Arguments of `DatasetEnv`.
    """

    def __init__(
        self,
        servers: Mapping[str, Any],
        data: Any,
        *,
        session: Literal["episode", "env", "process"] = "episode",
        only: Sequence[str] = (),
        timeout: float = 30.0,
        calls: int = 1,
        max_turns: int = 8,
        **dataset: Any,
    ) -> None:
        """Note how to reach the servers; the first use connects."""
        if session not in ("episode", "env", "process"):
            raise ConfigError(f"MCP: session is {session!r}, expected episode, env or process.")
        super().__init__(data, max_turns=max_turns, **dataset)
        self.mcp_servers, self.mcp_session = servers, session
        self.mcp_only, self.mcp_timeout, self.max_calls_per_turn = only, timeout, calls
        self.blocking = True


class _Session:
    """One connection, opened when first needed; all of it happens on the background loop."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._client: Any = None
        self._end = asyncio.Event()
        self._answers = 0
        self._ending: set[asyncio.Task[None]] = set()
        _ALIVE.add(self)

    def ask(self, question: Callable[[Any], Awaitable[T]], timeout: float) -> T:
        """Put a question to the server.

        Raises:
            ToolServerError: There was no answer, for whatever reason.
        """
        return background.run(self._ask(question, timeout), _LOOP)

    def close(self) -> None:
        """End the connection, and the server where it was started here; wait for both."""
        if self._task is not None or self._ending:
            background.run(self._finish(), _LOOP)

    async def _ask(self, question: Callable[[Any], Awaitable[T]], timeout: float) -> T:
        before = self._answers
        try:
            async with asyncio.timeout(timeout):
                answer = await question(await self._connected())
        except TimeoutError:
            if self._answers == before:  # it answers nobody: it hangs
                self._drop()
            raise ToolServerError(f"the server gave no answer in {timeout:g} seconds") from None
        except ToolServerError:
            raise
        except Exception as error:
            if _lost(error):
                self._drop()
                raise ToolServerError("the connection to the server was lost") from error
            raise ToolServerError(f"the server refused: {error}") from error
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
        """Hold the connection open; what enters a connection must also leave it."""
        from mcp import Client

        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                async with AsyncExitStack() as stack:
                    transport = await _transport(self.server, stack, log)
                    client = await stack.enter_async_context(Client(transport))
                    if not opened.done():
                        opened.set_result(client)
                        await end.wait()
            except Exception as error:
                log.seek(0)
                words = f"{_reason(error)} {log.read()[-500:].strip()}".strip()
                if opened.done():
                    logger.warning("MCP server %s: %s", self.server.name, words)
                else:
                    opened.set_exception(
                        ToolServerError(f"MCP server {self.server.name!r} cannot be used: {words}")
                    )

    def _drop(self) -> None:
        """Let the connection end in the background; a server that hangs is killed on the way."""
        task, self._task = self._task, None
        self._end.set()
        if task is not None:
            if self._client is None:  # it is still greeting
                task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._client = None

    async def _finish(self) -> None:
        self._drop()
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSING)


_PROCESS_SESSIONS: dict[MCPServer, _Session] = {}
_LISTINGS: dict[MCPServer, list[Any]] = {}
_ALIVE: weakref.WeakSet[_Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Leave no server behind, not even one that does not notice the end of its input."""
    for session in list(_ALIVE):
        session.close()


def _list_tools(server: MCPServer, session: _Session, timeout: float) -> list[Any]:
    """List a server's tools; once for all environments, since a listing outlives its server."""
    if server not in _LISTINGS:
        with _installed():
            import mcp  # noqa: F401

        async def every_page(client: Any) -> list[Any]:
            page = await client.list_tools()
            listed = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                listed += page.tools
            return listed

        _LISTINGS[server] = session.ask(every_page, timeout)
    return _LISTINGS[server]


async def _transport(server: MCPServer, stack: AsyncExitStack, log: Any) -> Any:
    if server.url:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # a server may hold a stream open for long; each call has a limit of its own
        limits = httpx2.Timeout(30.0, read=None)
        client = httpx2.AsyncClient(headers=dict(server.headers), timeout=limits)
        http = await stack.enter_async_context(client)
        return streamable_http_client(server.url, http_client=http)
    from mcp.client.stdio import StdioServerParameters, stdio_client

    command, *args = server.command
    started = StdioServerParameters(
        command=command, args=args, env=dict(server.env), cwd=server.cwd
    )
    return stdio_client(started, errlog=log)


def _as_tool(listed: Any, function: Callable[..., Any]) -> Tool:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    parameters = {"properties": {}, **listed.input_schema}
    # an empty registry: a schema must not make this process fetch addresses
    checker = Draft202012Validator(parameters, registry=Registry())

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        for error in checker.iter_errors(arguments):
            where = ".".join(str(part) for part in error.absolute_path)
            raise ValueError(f"{where}: {error.message}" if where else error.message)
        return arguments

    return Tool(
        name=listed.name,
        description=listed.description or listed.name,
        parameters=parameters,
        function=function,
        validator=TypeAdapter(Annotated[dict[str, Any], AfterValidator(check)]),
    )


def _result_text(result: Any) -> str:
    parts = []
    for block in result.content:
        text = getattr(block, "text", None) or getattr(
            getattr(block, "resource", None), "text", None
        )
        parts.append(text if text is not None else f"[{block.type} left out]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    return "\n".join(parts)


def _lost(error: BaseException) -> bool:
    import anyio
    import httpx2
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return error.code == CONNECTION_CLOSED
    broken = (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.TransportError, OSError)
    return isinstance(error, (*broken, RuntimeError))


def _reason(error: BaseException) -> str:
    """Give the first cause in a group of exceptions, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"MCP tools need the package mcp ({error}): pip install 'gspo-env[mcp]'"
        ) from error
