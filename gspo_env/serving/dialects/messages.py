"""Anthropic's messages: `POST /v1/messages`, and the count of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspo_env.chat.fields import Fields, Json, content
from gspo_env.chat.messages import format_arguments, make_tool
from gspo_env.errors import RefusedError
from gspo_env.serving.dialects.chat import DISTRIBUTION, FORMAT
from gspo_env.serving.request import make_request, stops
from gspo_env.serving.session import Reply, Request
from gspo_env.types import Message, ToolCall

_HARMLESS = (
    *("metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id"),
    *("betas", "billing_policy", "diagnostics", "fallbacks", "fallback_credit_token"),
)
_NEUTRAL: Mapping[str, Sequence[Any]] = {"top_p": (1,), "top_k": (0, -1)}
_ELSEWHERE: Mapping[str, Sequence[Any]] = {
    **{"mcp_servers": ([],), "container": (), "thread": (), "compaction": ()}
}
_EDIT = "clear_thinking_20251015"
"""Which earlier reasoning a prompt has, the chat template decides."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_TEXT = ("text",)


class Messages:
    """The wire format."""

    prefix = "msg_"
    counts = False
    """Whether the tokens of a request are counted, not answered."""

    def read(self, body: Json, name: str, agent: str | None = None) -> Request:
        """See `Dialect.read`."""
        fields = Fields(body)
        tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(fields.items("tools"))]
        system = fields.content("system", _TEXT)
        messages = [Message(role="system", content=system)] if system else []
        for n, message in enumerate(fields.items("messages")):
            messages += _messages(message, f"messages[{n}]")
        most = fields.count("max_tokens")
        if most is None and not self.counts:
            raise RefusedError("max_tokens is missing; expected an integer", param="max_tokens")
        request = make_request(
            fields,
            name,
            agent,
            messages=messages,
            tools=tools,
            hottest=1.0,
            max_tokens=most,
            stop=stops(fields, "stop_sequences"),
        )
        fields.ignore(_HARMLESS)
        effort = _effort(fields)
        _check_thinking(fields)
        fields.only({"output_format": ()}, FORMAT)
        fields.only({"speed": ("standard", "fast")}, "an answer has no other speed")
        fields.only(_ELSEWHERE, "the server runs no tools and keeps no conversations")
        fields.only(_NEUTRAL, DISTRIBUTION)
        fields.done()
        return replace(request, effort=effort, counts=self.counts)

    def write(self, request: Request, reply: Reply) -> Json:
        """See `Dialect.write`."""
        head = _head(request, reply)
        end = _end(reply)
        return {**head, "content": _blocks(reply.message), **end, "usage": _usage(reply)}

    def events(self, request: Request, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        """See `Dialect.events`."""
        start = {**_head(request, reply), "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**_usage(reply), "output_tokens": 0}
        yield _event("message_start", message=start)
        for index, block in enumerate(_blocks(reply.message)):
            empty, deltas = _pieces(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        usage = {"output_tokens": reply.completion_tokens}
        yield _event("message_delta", delta=_end(reply), usage=usage)
        yield _event("message_stop")

    def fault(self, error: RefusedError) -> Json:
        """See `Dialect.fault`."""
        kind = _KINDS.get(error.status, "invalid_request_error")
        kind = "api_error" if error.status >= 500 else kind
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


class TokenCount(Messages):
    """The wire format of `POST /v1/messages/count_tokens`."""

    counts = True

    def write(self, request: Request, reply: Reply) -> Json:
        """See `Dialect.write`."""
        return {"input_tokens": reply.prompt_tokens}


def _effort(fields: Fields) -> str:
    """Reads `output_config`."""
    config = fields.inner("output_config")
    effort = config.text("effort")
    config.only({"format": ()}, FORMAT)
    config.done()
    return effort


def _check_thinking(fields: Fields) -> None:
    """Refuses what would limit the reasoning of an answer, or edit the conversation."""
    thinking = fields.inner("thinking")
    thinking.only({"type": ("adaptive", "disabled")}, "the policy decides how long it thinks")
    thinking.ignore(("display", "block_binding"))
    thinking.done()
    management = fields.inner("context_management")
    for n, value in enumerate(management.items("edits")):
        edit = Fields(value, f"context_management.edits[{n}]")
        edit.only({"type": (_EDIT,)}, "the server does not edit conversations")
    management.done()


def _event(name: str, **data: Any) -> tuple[str, Json]:
    return name, {"type": name, **data}


def _head(request: Request, reply: Reply) -> Json:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": request.model}


def _end(reply: Reply) -> Json:
    if reply.finish_reason == "stop" and reply.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
    return {"stop_reason": _REASONS[reply.finish_reason], "stop_sequence": None}


def _usage(reply: Reply) -> Json:
    return {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}


def _blocks(message: Message) -> list[Json]:
    blocks: list[Json] = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        use = {"id": call.id, "name": call.name, "input": call.arguments}
        blocks.append({"type": "tool_use", **use})
    return blocks


def _pieces(block: Json) -> tuple[Json, list[Json]]:
    """Returns a block as a stream begins it, and the deltas that fill it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [delta, {"type": "signature_delta", "signature": ""}]
    call = ToolCall(name=block["name"], arguments=block["input"])
    delta = {"type": "input_json_delta", "partial_json": format_arguments(call)}
    return {**block, "input": {}}, [delta]


def _tool(value: Any, where: str) -> Any:
    fields = Fields(value, where)
    if (kind := fields.text("type") or "custom") != "custom":
        fields.refuse("type", kind, '"custom": other tools run on a server of their maker')
    fields.ignore(("cache_control", "input_examples", "eager_input_streaming"))
    fields.only({"defer_loading": (False,)}, "all tools are listed in the prompt")
    fields.only({"allowed_callers": (["direct"],)}, "the policy calls all tools itself")
    tool = make_tool(fields, "input_schema")
    fields.done()
    return tool


def _messages(value: Any, where: str) -> list[Message]:
    """Returns a message as one, or as several where it holds results of tools."""
    fields = Fields(value, where)
    role, blocks = fields.text("role"), fields.values.pop("content", None)
    if role == "system":
        fields.only({"clear_at": ("never",), "output_config": ({},)}, "messages stay as they are")
    fields.done()
    if role == "assistant":
        return [_assistant(blocks, f"{where}.content")]
    if role not in ("system", "user"):
        fields.refuse("role", role, '"user", "assistant" or "system"')
    if role == "system" or not isinstance(blocks, list) or not blocks:
        text = content(blocks, f"{where}.content", _TEXT)
        return [Message(role="system" if role == "system" else "user", content=text)]
    messages: list[Message] = []
    texts: list[Any] = []
    for n, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            texts.append(block)
            continue
        messages += _user(texts, where)
        texts = []
        place = Fields(block, f"{where}.content[{n}]")
        call = place.need("tool_use_id", str, "the id of a call")
        text = place.content("content", _TEXT)
        messages.append(Message(role="tool", content=text, tool_call_id=call))
    return messages + _user(texts, where)


def _user(blocks: list[Any], where: str) -> list[Message]:
    if not blocks:
        return []
    return [Message(role="user", content=content(blocks, f"{where}.content", _TEXT))]


def _assistant(blocks: Any, where: str) -> Message:
    if not isinstance(blocks, list):
        return Message(role="assistant", content=content(blocks, where, _TEXT))
    texts, calls, thoughts = [], [], []
    for n, block in enumerate(blocks):
        fields = Fields(block, f"{where}[{n}]")
        kind = fields.text("type")
        if kind == "thinking":
            thoughts.append(fields.text("thinking"))
        elif kind == "tool_use":
            calls.append(fields.call("input", fields.text("id")))
        else:
            texts.append(block)
    return Message(
        role="assistant",
        content=content(texts, where, _TEXT),
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
    )
