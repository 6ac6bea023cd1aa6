"""The ASGI app of the policy server: routes, keys, limits of bodies, errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gspo_env.chat.fields import Fields, Json, parse_json
from gspo_env.errors import RefusedError
from gspo_env.serving.connection import SCOPE
from gspo_env.serving.dialects.chat import Chat, openai_fault
from gspo_env.serving.dialects.messages import Messages, TokenCount
from gspo_env.serving.dialects.responses import Responses
from gspo_env.serving.request import Dialect, agent_name
from gspo_env.serving.session import LateRewardError, Reply, Request
from gspo_env.types import LARGEST_REWARD

if TYPE_CHECKING:
    from gspo_env.serving.server import PolicyServer
    from gspo_env.serving.session import Session

logger = logging.getLogger(__name__)

LARGEST_BODY = 4 * 2**20
"""Bytes of a body."""
_SMALL = 1 << 16
"""Bytes of a body that is read in the event loop, without a thread."""
BODY_SECONDS = 60.0
"""Time in which a body has to come."""
_CLOSING = (401, 408, 410, 413)
"""After these errors the connection ends, so that the rest of a body is not read."""

R = TypeVar("R")
Handler = Callable[[HttpRequest], Awaitable[Response]]


def make_app(server: PolicyServer) -> Starlette:
    """Returns the app that serves the sessions of a server."""
    dialects: dict[str, Dialect] = {
        "/v1/chat/completions": Chat(),
        "/v1/messages": Messages(),
        "/v1/messages/count_tokens": TokenCount(),
        "/v1/responses": Responses(),
    }
    routes = [
        Route(path, _guarded(_endpoint(server, dialect), dialect.fault), methods=["POST"])
        for path, dialect in dialects.items()
    ]

    async def models(http: HttpRequest) -> Response:
        session = _session(server, http)
        name = http.path_params.get("name", session.model)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "gspo_env"}
        if "name" in http.path_params:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    async def reward(http: HttpRequest) -> Response:
        session = _session(server, http)
        return _reward(session, await _read(await _body(http), parse_json))

    routes += [
        Route("/v1/models", _guarded(models, openai_fault), methods=["GET"]),
        Route("/v1/models/{name:path}", _guarded(models, openai_fault), methods=["GET"]),
        Route("/v1/reward", _guarded(reward, openai_fault), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _not_found})


def _endpoint(server: PolicyServer, dialect: Dialect) -> Handler:
    async def endpoint(http: HttpRequest) -> Response:
        session = _session(server, http)
        body, agent = await _body(http), agent_name(http.headers.get("x-agent"))
        name = session.new_id(dialect.prefix)
        request = await _read(body, lambda data: dialect.read(parse_json(data), name, agent))
        request = replace(request, model=request.model or session.model)
        reply = await _or_hung_up(http, session.reply(request))
        return Response() if reply is None else _write(dialect, request, reply)

    return endpoint


def _write(dialect: Dialect, request: Request, reply: Reply) -> Response:
    if reply.finish_reason == "context":
        text = reply.message.content
        raise RefusedError(text, code="context_length_exceeded", param="messages")
    if not request.stream:
        return JSONResponse(dialect.write(request, reply))
    lines = []
    for name, data in dialect.events(request, reply):
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        lines.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
    headers = {"cache-control": "no-cache"}
    return Response("".join(lines), media_type="text/event-stream", headers=headers)


def _reward(session: Session, body: Json) -> Response:
    fields = Fields(body)
    name = fields.need("completion_id", str, "the id of an answer")
    value = fields.values.pop("reward", None)
    fields.done()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) <= LARGEST_REWARD:
        raise RefusedError(
            f"reward is {str(value)[:80]}; expected a finite number up to "
            f"{LARGEST_REWARD:g} in size",
            status=422,
            param="reward",
        )
    try:
        session.take_reward(name, float(value))
    except KeyError:
        raise RefusedError(
            f"no answer of this session has the id {name[:80]!r}", status=404, param="completion_id"
        ) from None
    except LateRewardError as error:
        raise RefusedError(
            str(error) or "the step of this turn has returned, its reward is final",
            status=409,
            param="completion_id",
        ) from None
    return JSONResponse({"completion_id": name, "reward": value})


def _session(server: PolicyServer, http: HttpRequest) -> Session:
    scheme, _, bearer = http.headers.get("authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")
    connection = http.scope.get(SCOPE)
    session = server.find(key, None if connection is None else connection.only)
    if connection is not None:
        connection.use(session)
    return session


async def _body(http: HttpRequest) -> bytes:
    """Reads a body.

    Raises:
        RefusedError: It is too large or too slow.
    """
    large = RefusedError(f"the body has more than {LARGEST_BODY:,} bytes", status=413)
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > LARGEST_BODY:
        raise large
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in http.stream():
                data += chunk
                if len(data) > LARGEST_BODY:
                    raise large
    except TimeoutError:
        raise RefusedError(f"the body did not come within {BODY_SECONDS:g} s", status=408) from None
    return bytes(data)


async def _read(data: bytes, read: Callable[[bytes], R]) -> R:
    """Reads a body; a large one in a thread, so that other requests go on."""
    return read(data) if len(data) <= _SMALL else await asyncio.to_thread(read, data)


async def _or_hung_up(http: HttpRequest, answer: Awaitable[Reply]) -> Reply | None:
    """Waits for an answer and cancels it when the client is gone; then returns None."""
    waiting = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_hung_up(http))
    try:
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await waiting if waiting.done() else None
    finally:
        gone.cancel()
        waiting.cancel()


async def _hung_up(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _guarded(handler: Handler, fault: Callable[[RefusedError], Json]) -> Handler:
    """Returns a handler whose errors have the dialect format; none of them stops the server."""

    async def guarded(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except RefusedError as refused:
            error = refused
        except ClientDisconnect:
            return Response()
        except Exception as failure:
            logger.exception("A request to the policy server failed.")
            error = RefusedError(f"the policy failed: {type(failure).__name__}", status=500)
        headers = {"connection": "close"} if error.status in _CLOSING else None
        return JSONResponse(fault(error), error.status, headers)

    return guarded


async def _not_found(http: HttpRequest, error: Any) -> Response:
    refused = RefusedError(
        f"{http.method[:16]} {http.url.path[:80]} is not served; expected /v1/chat/completions, "
        "/v1/messages, /v1/responses, /v1/reward or /v1/models",
        status=error.status_code,
    )
    return JSONResponse(openai_fault(refused), error.status_code)
