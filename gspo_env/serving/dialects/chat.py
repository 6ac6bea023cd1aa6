"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspo_env.chat.fields import Fields, Json
from gspo_env.chat.messages import read_message, read_tools, write_call, write_message
from gspo_env.errors import RefusedError
from gspo_env.serving.request import make_request, stops
from gspo_env.serving.session import Reply, Request

DISTRIBUTION = "it changes the distribution of answers, which the server takes as the policy's own"
FORMAT = "answers are not constrained to a schema or grammar"
HARMLESS = (
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "prediction"),
)
"""Fields that change no answer and are ignored."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    **{"n": (1,), "top_p": (1,), "frequency_penalty": (0,), "presence_penalty": (0,)},
    **{"logit_bias": ({},), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)},
    **{"best_of": (1,), "parallel_tool_calls": (True,), "verbosity": ("medium",)},
    **{"guided_json": (), "guided_regex": (), "guided_grammar": (), "structured_outputs": ()},
    **{"functions": ([],), "function_call": ("auto", "none"), "web_search_options": ()},
    **{"chat_template_kwargs": ({},)},
}
"""The values of fields that change nothing; others are refused."""
_PLAIN: Mapping[str, Sequence[Any]] = {
    **{"logprobs": (False,), "top_logprobs": (0,), "modalities": (["text"],), "audio": ()}
}


class Chat:
    """The wire format."""

    prefix = "chatcmpl-"

    def read(self, body: Json, name: str, agent: str | None = None) -> Request:
        """See `Dialect.read`."""
        fields = Fields(body)
        tools = read_tools(fields.items("tools"))
        values = enumerate(fields.items("messages"))
        newer, older = fields.count("max_completion_tokens"), fields.count("max_tokens")
        request = make_request(
            fields,
            name,
            agent,
            messages=[read_message(v, f"messages[{n}]", strict=True) for n, v in values],
            tools=tools,
            max_tokens=newer if newer is not None else older,
            stop=stops(fields, "stop"),
            seed=fields.take("seed", int, "an integer"),
            effort=fields.text("reasoning_effort"),
        )
        usage = bool(fields.inner("stream_options").values.get("include_usage"))
        fields.ignore(HARMLESS)
        fields.only({"response_format": ({"type": "text"},)}, FORMAT)
        fields.only(NEUTRAL, DISTRIBUTION)
        fields.only(_PLAIN, "answers are text without log-probabilities")
        fields.done()
        return replace(request, stream_usage=usage)

    def write(self, request: Request, reply: Reply) -> Json:
        """See `Dialect.write`."""
        message = {**write_message(reply.message), "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
        choice["logprobs"] = None
        head = _head(request, reply, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(reply)}

    def events(self, request: Request, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        """See `Dialect.events`."""
        head = _head(request, reply, "chat.completion.chunk")
        none = {"usage": None} if request.stream_usage else {}

        def chunk(delta: Json, finish: str | None = None) -> tuple[str, Json]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return "", {**head, "choices": [choice], **none}

        message = reply.message
        yield chunk({"role": "assistant", "content": ""})
        if message.reasoning:
            yield chunk({"reasoning_content": message.reasoning})
        if message.content:
            yield chunk({"content": message.content})
        for index, call in enumerate(message.tool_calls):
            written = write_call(call)
            empty = {**written["function"], "arguments": ""}
            yield chunk({"tool_calls": [{"index": index, **written, "function": empty}]})
            pieces = {"arguments": written["function"]["arguments"]}
            yield chunk({"tool_calls": [{"index": index, "function": pieces}]})
        yield chunk({}, reply.finish_reason)
        if request.stream_usage:
            yield "", {**head, "choices": [], "usage": _usage(reply)}
        yield "", "[DONE]"

    def fault(self, error: RefusedError) -> Json:
        """See `Dialect.fault`."""
        return openai_fault(error)


def openai_fault(error: RefusedError) -> Json:
    """Returns an error in OpenAI's format."""
    kinds = {401: "authentication_error", 404: "not_found_error", 410: "session_closed"}
    kind = kinds.get(error.status, "invalid_request_error")
    kind = "server_error" if error.status >= 500 else kind
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}


def _head(request: Request, reply: Reply, kind: str) -> Json:
    return {"id": reply.id, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(reply: Reply) -> Json:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
