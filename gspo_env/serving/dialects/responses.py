"""OpenAI's responses: `POST /v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from gspo_env.chat.fields import Fields, Json
from gspo_env.chat.messages import format_arguments, make_tool
from gspo_env.errors import RefusedError
from gspo_env.serving.dialects.chat import DISTRIBUTION, FORMAT, HARMLESS, openai_fault
from gspo_env.serving.request import make_request
from gspo_env.serving.session import Reply, Request
from gspo_env.types import Message

_STATE = "the server keeps no conversations: send the whole input"
_FORGOTTEN: Mapping[str, Sequence[Any]] = {
    **{"previous_response_id": (), "conversation": (), "background": (False,), "prompt": ()},
    **{"truncation": ("disabled",), "context_management": ([],)},
}
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    **{"top_p": (1,), "parallel_tool_calls": (True,), "top_logprobs": (0,)},
    **{"max_tool_calls": (), "moderation": ()},
}
_ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    **{"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
}
_TEXT = ("input_text", "output_text", "text", "refusal")


class Responses:
    """The wire format."""

    prefix = "resp_"

    def read(self, body: Json, name: str, agent: str | None = None) -> Request:
        """See `Dialect.read`."""
        fields = Fields(body)
        tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(fields.items("tools"))]
        instructions = fields.text("instructions")
        value = fields.need("input", (str, list), "a string or a list of items")
        if value == []:
            fields.refuse("input", value, "at least one item")
        items = [{"role": "user", "content": value}] if isinstance(value, str) else value
        messages = [Message(role="system", content=instructions)] if instructions else []
        reasoning = fields.inner("reasoning")
        request = make_request(
            fields,
            name,
            agent,
            messages=messages + _read_items(items),
            tools=tools,
            max_tokens=fields.count("max_output_tokens"),
            effort=reasoning.text("effort"),
        )
        reasoning.ignore(("summary", "generate_summary"))
        reasoning.done()
        fields.ignore((*HARMLESS, "include", "stream_options"))
        _check_text(fields)
        fields.only(_FORGOTTEN, _STATE)
        fields.only(_NEUTRAL, DISTRIBUTION)
        fields.done()
        return request

    def write(self, request: Request, reply: Reply) -> Json:
        """See `Dialect.write`."""
        cut = reply.finish_reason == "length"
        return {
            **_head(request, reply),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(reply),
            "usage": _usage(reply),
        }

    def events(self, request: Request, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        """See `Dialect.events`."""
        begun = {**_head(request, reply), "status": "in_progress", "incomplete_details": None}
        begun |= {"output": [], "usage": None}
        whole = self.write(request, reply)
        events: list[Json] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(whole["output"]):
            events += _item_events(index, item)
        events.append({"type": f"response.{whole['status']}", "response": whole})
        for number, event in enumerate(events):
            yield event["type"], {**event, "sequence_number": number}

    def fault(self, error: RefusedError) -> Json:
        """See `Dialect.fault`."""
        return openai_fault(error)


def _head(request: Request, reply: Reply) -> Json:
    tools = [
        {"type": "function", **tool.schema["function"], "strict": tool.strict}
        for tool in request.tools
    ]
    return {
        "id": reply.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": request.temperature,
        "tool_choice": "auto",
        "tools": tools,
        "top_p": 1.0,
        "max_output_tokens": request.max_tokens,
        "previous_response_id": None,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
    }


def _usage(reply: Reply) -> Json:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _items(reply: Reply) -> list[Json]:
    message, name = reply.message, reply.id.rpartition("_")[2]
    items: list[Json] = []
    if message.reasoning is not None:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [thought]})
    if message.content or not message.tool_calls:
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{name}", "type": "message", "role": "assistant"}
        items.append({**head, "status": "completed", "content": [text]})
    for call in message.tool_calls:
        call_fields = {"call_id": call.id, "name": call.name, "arguments": format_arguments(call)}
        head = {"id": f"fc_{call.id}", "type": "function_call", "status": "completed"}
        items.append({**head, **call_fields})
    return items


def _item_events(index: int, item: Json) -> list[Json]:
    """Returns the events that build one item of the output."""
    place = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "function_call":
        empty, text = {**item, "arguments": ""}, item["arguments"]
        kind = "response.function_call_arguments"
        inner: list[Json] = [
            {"type": f"{kind}.delta", **place, "delta": text},
            {"type": f"{kind}.done", **place, "name": item["name"], "arguments": text},
        ]
    else:
        empty, (part,) = {**item, "content": []}, item["content"]
        text, at = part["text"], {**place, "content_index": 0}
        kind = f"response.{part['type']}"
        more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
        parts = "response.content_part"
        inner = [
            {"type": f"{parts}.added", **at, "part": {**part, "text": ""}},
            {"type": f"{kind}.delta", **at, "delta": text, **more},
            {"type": f"{kind}.done", **at, "text": text, **more},
            {"type": f"{parts}.done", **at, "part": part},
        ]
    if "status" in empty:
        empty["status"] = "in_progress"
    added = {"type": "response.output_item.added", "output_index": index, "item": empty}
    done = {"type": "response.output_item.done", "output_index": index, "item": item}
    return [added, *inner, done]


def _check_text(fields: Fields) -> None:
    text = fields.inner("text")
    text.only({"format": ({"type": "text"},)}, FORMAT)
    text.only({"verbosity": ("medium",)}, DISTRIBUTION)
    text.done()


def _tool(value: Any, where: str) -> Any:
    fields = Fields(value, where)
    if (kind := fields.text("type")) != "function":
        fields.refuse("type", kind, '"function": other tools run on a server of their maker')
    fields.only({"defer_loading": (False,)}, "all tools are listed in the prompt")
    fields.ignore(("output_schema", "allowed_callers"))
    tool = make_tool(fields, "parameters")
    fields.done()
    return tool


def _read_items(items: Sequence[Any]) -> list[Message]:
    """Returns a conversation; items of one answer of the assistant become one message."""
    messages: list[Message] = []
    growing = False
    for n, item in enumerate(items):
        where = f"input[{n}]"
        message = _read_item(Fields(item, where), where)
        if message.role != "assistant":
            messages.append(message)
            growing = False
            continue
        last = messages[-1] if growing else None
        if last is None or message.reasoning is not None or (message.content and _spoke(last)):
            messages.append(message)
        else:
            messages[-1] = replace(
                last,
                content=last.content + message.content,
                tool_calls=last.tool_calls + message.tool_calls,
            )
        growing = True
    return messages


def _spoke(message: Message) -> bool:
    return bool(message.content or message.tool_calls)


def _read_item(fields: Fields, where: str) -> Message:
    kind = fields.text("type") or "message"
    fields.ignore(("id", "status", "phase", "namespace", "caller"))
    if kind == "message":
        role = fields.text("role")
        text = fields.content("content", _TEXT)
        fields.done()
        if role not in _ROLES:
            fields.refuse("role", role, " or ".join(f'"{name}"' for name in _ROLES))
        return Message(role=_ROLES[role], content=text)
    if kind == "function_call":
        call = fields.call("arguments", fields.text("call_id"))
        return Message(role="assistant", content="", tool_calls=(call,))
    if kind == "function_call_output":
        call_id = fields.need("call_id", str, "the id of a call")
        text = fields.content("output", _TEXT)
        return Message(role="tool", content=text, tool_call_id=call_id)
    if kind == "reasoning":
        parts = [part for part in fields.items("content") if isinstance(part, dict)]
        text = "\n".join(str(part.get("text", "")) for part in parts)
        return Message(role="assistant", content="", reasoning=text)
    allowed = '"message", "function_call", "function_call_output" or "reasoning"'
    fields.refuse("type", kind, allowed)
