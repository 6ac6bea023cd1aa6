"""Offers the tools of Model Context Protocol servers in an environment."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

from gspo_env.env.base import Options, ResetResult
from gspo_env.env.tool_env import ToolEnv
from gspo_env.errors import ConfigError, ToolServerError
from gspo_env.tools.json_calls import decode
from gspo_env.tools.python import literal
from gspo_env.tools.schema import arguments_validator
from gspo_env.tools.tool import Tool
from gspo_envs.data.dataset import DatasetEnv
from gspo_envs.tools.mcp.session import MCPServer, MCPSession, list_tools, shorten

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_LONGEST_DESCRIPTION = 20_000
_LONGEST_ERROR = 1500
"""Characters of a failed call's message; an exception keeps 2,000."""
_MOST_OBJECTS = 10_000
"""Objects in the schemas of all tools; checking them takes seconds."""
_MOST_BLOCKS = 100
"""Blocks of a result that are read; the number of the others is named."""


class MCPTools(ToolEnv):
    """Gives a `ToolEnv` the tools of MCP servers, after its own.

    If a server hangs, exits or returns an error, the observation is `Error: ...`, and the next call
    reconnects. `super().reset` and `super().close` must be called.
    """

    mcp_servers: Mapping[str, Any] = {}
    """The servers by name; see `MCPServer.parse`."""
    mcp_sandbox: Any = None
    """`podman:IMAGE`, `docker:IMAGE` or fields of `Containers`, for the servers that are commands.
    Without it they run as you. They get the variables that their `env` names."""
    mcp_only: Sequence[str] = ()
    """The tools to offer; empty offers all."""
    mcp_session: Literal["episode", "env", "process"] = "episode"
    """Lifetime of a connection and of a started server: one episode, one environment, or the whole
    process for all environments. Stateful servers need "episode"."""
    mcp_timeout: float = 30.0
    """Maximum seconds of one call, including starting the server."""
    mcp_result_length: int = 8192
    """Maximum characters of a result; the rest is cut."""
    blocking = True

    @cached_property
    def tools(self) -> tuple[Tool, ...]:  # type: ignore[override]
        """The environment's own tools, then those of the servers.

        Raises:
            ToolServerError: A server cannot be reached and its tools were never listed.
            ToolServerError: A tool to offer has no usable name or schema, or all schemas together
                are too large.
            ConfigError: Two tools have one name, or one of `mcp_only` is missing.
        """
        listed = [
            (server, one)
            for server in self._servers
            for one in list_tools(server, self._session(server), self.mcp_timeout)
            if not self.mcp_only or one.name in self.mcp_only
        ]
        if sum(json.dumps(one.input_schema).count("{") for _, one in listed) > _MOST_OBJECTS:
            raise ToolServerError(
                f"the schemas of the MCP tools have more than {_MOST_OBJECTS} objects together; "
                "choose fewer tools with mcp_only"
            )
        tools = list(super().tools)
        tools += [
            _as_tool(server, one, partial(self._call, server, one.name)) for server, one in listed
        ]
        names = [one.name for one in tools]
        if missing := sorted(set(self.mcp_only) - set(names)):
            raise ConfigError(f"MCP: no server has a tool {missing[0]!r}.")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"MCP: there are two tools {twice[0]!r}, choose with mcp_only.")
        return tuple(tools)

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins an episode; with `mcp_session="episode"` every server restarts too."""
        if self.mcp_session == "episode":
            self._drop_sessions()
        result = super().reset(seed=seed, options=options)
        _ = self.tools  # connects the first time, so an unreachable server fails here
        return result

    def close(self) -> None:
        """Closes the connections of this environment and the servers that it started."""
        self._drop_sessions()
        super().close()

    @cached_property
    def _servers(self) -> tuple[MCPServer, ...]:
        servers = [MCPServer.parse(name, spec) for name, spec in self.mcp_servers.items()]
        if self.mcp_sandbox is None:
            return tuple(servers)
        from gspo_env.sandbox.containers import read_containers

        box = read_containers(self.mcp_sandbox, "MCP: sandbox")
        box.check()
        return tuple(
            replace(one, command=tuple(box.wrap(one.command, dict(one.env))))
            if one.command
            else one
            for one in servers
        )

    @cached_property
    def _sessions(self) -> dict[MCPServer, MCPSession]:
        if self.mcp_session == "process":
            return _PROCESS_SESSIONS
        sessions: dict[MCPServer, MCPSession] = {}
        # the rollout drops an environment whose episode timed out
        weakref.finalize(self, _forget, sessions)
        return sessions

    def _session(self, server: MCPServer) -> MCPSession:
        return self._sessions.setdefault(server, MCPSession(server))

    def _drop_sessions(self) -> None:
        if self.mcp_session != "process":
            for session in self._sessions.values():
                session.close()

    def _call(self, server: MCPServer, name: str, /, **arguments: Any) -> str:
        session = self._session(server)
        result = session.ask(lambda client: client.call_tool(name, arguments), self.mcp_timeout)
        text = _result_text(result)
        if result.is_error:
            longest = min(self.mcp_result_length, _LONGEST_ERROR)
            raise ToolServerError(shorten(text, longest) or "the server gave no reason")
        return shorten(text, self.mcp_result_length)


class MCPEnv(MCPTools, DatasetEnv):
    """Answer the prompts of a dataset with the tools of Model Context Protocol servers.

    Args:
        servers: The servers by name, each an http address, a command as a list, or a table as in
            `mcpServers` files.
        data: See `gspo_envs.data.dataset.DatasetEnv`.
        session: Lifetime of a server: "episode", "env" or "process".
        only: Tools to offer; all by default.
        timeout: Maximum seconds of one call.
        calls: Maximum tool calls of one turn.
        sandbox: Containers for the servers that are commands: `podman:IMAGE` or `docker:IMAGE`.
        max_turns: Turns before the episode is truncated.
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
        sandbox: Any = None,
        max_turns: int = 8,
        **dataset: Any,
    ) -> None:
        """Stores how to reach the servers; the first use connects."""
        if session not in ("episode", "env", "process"):
            raise ConfigError(f"MCP: session is {session!r}, expected episode, env or process.")
        super().__init__(data, max_turns=max_turns, **dataset)
        self.mcp_servers, self.mcp_session = servers, session
        self.mcp_sandbox = sandbox
        if sandbox is not None:
            from gspo_env.sandbox.containers import read_containers

            self.max_copies = read_containers(sandbox, "MCP: sandbox").at_once
        self.mcp_only, self.mcp_timeout, self.max_calls_per_turn = only, timeout, calls
        self.blocking = True


_PROCESS_SESSIONS: dict[MCPServer, MCPSession] = {}


def _forget(sessions: dict[MCPServer, MCPSession]) -> None:
    """Closes without waiting, because the garbage collector may run in any thread."""
    for session in sessions.values():
        session.forget()


def _as_tool(server: MCPServer, listed: Any, function: Callable[..., Any]) -> Tool:
    parameters = {"properties": {}, **listed.input_schema}
    try:
        if not _NAME.fullmatch(listed.name):
            raise ValueError("its name is not 1 to 128 letters, digits, or one of _ . : / -")
        if len(listed.description or "") > _LONGEST_DESCRIPTION:
            raise ValueError(f"its description has more than {_LONGEST_DESCRIPTION} characters")
        validator = arguments_validator(parameters)
    except ValueError as error:
        raise ToolServerError(
            f"tool {shorten(listed.name, 128)!r} of MCP server {server.name!r} cannot be used: "
            f"{shorten(str(error))}; choose other tools with mcp_only"
        ) from error
    return Tool(
        name=listed.name,
        description=listed.description or listed.name,
        parameters=parameters,
        function=function,
        validator=validator,
    )


def _result_text(result: Any) -> str:
    """Returns the texts of a result, and its structure if they do not repeat it."""
    texts, parts = [], []
    for block in result.content[:_MOST_BLOCKS]:
        text = getattr(getattr(block, "resource", block), "text", None)
        texts += [text] if text else []
        parts.append(_placeholder(block) if text is None else text)
    if len(result.content) > _MOST_BLOCKS:
        parts.append(f"[{len(result.content) - _MOST_BLOCKS} more blocks left out]")
    structure = result.structured_content
    if structure is not None and not (texts and _repeats(texts, structure)):
        parts.append(json.dumps(structure, ensure_ascii=False))
    return "\n".join(filter(None, parts))


def _placeholder(block: Any) -> str:
    """Names a block without text, such as an image or a link to a resource."""
    resource = getattr(block, "resource", block)
    about = [getattr(block, "name", None), getattr(resource, "uri", None)]
    return f"[{block.type} left out{': ' * any(about)}{', '.join(map(str, filter(None, about)))}]"


def _repeats(texts: Sequence[str], structure: Mapping[str, Any]) -> bool:
    """Returns whether texts contain a structure, as JSON, as Python or as plain text.

    Servers put a value that is not an object under `result`, and write each item of a list as a
    text of its own.
    """
    value = structure["result"] if structure.keys() == {"result"} else structure
    values = [{_canonical(text), _canonical(_read(text))} for text in texts]
    items = value if isinstance(value, list) and len(value) == len(texts) else ()
    written = "".join(json.dumps(structure, ensure_ascii=False).split())
    return (
        not structure
        or any(_canonical(each) in forms for forms in values for each in (structure, value))
        or bool(
            items and all(_canonical(i) in forms for i, forms in zip(items, values, strict=True))
        )
        or written in "".join("".join(texts).split())
    )


def _read(text: str) -> Any:
    value, _, fault = decode(text, whole=True)
    return literal(text) if fault else value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
