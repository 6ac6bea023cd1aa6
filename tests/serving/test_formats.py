"""Anthropic's messages and OpenAI's responses, and streams, as they are on the wire."""

import json

import pytest
from serving_policy import Policy

from gspo_env.serving import RefusedError
from gspo_env.types import Message, ToolCall

CALL = ToolCall(name="look", arguments={"key": "a"})
CALLS = Message(role="assistant", content="wait", tool_calls=(CALL,))
HI = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
ITEMS = {"model": "m", "input": "hi"}


def events(response):
    """Returns the names and the data of a stream."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events_read = []
    for block in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events_read.append(
            (fields.get("event", ""), data if data == "[DONE]" else json.loads(data))
        )
    return events_read


def test_a_stream_of_chat_chunks_gives_the_whole_message(opened):
    client = opened(Policy(CALLS, completion_tokens=3))
    body = {**HI, "stream": True, "stream_options": {"include_usage": True}}
    events_read = [data for _, data in events(client.post("/chat/completions", json=body))]
    assert events_read[-1] == "[DONE]"
    assert events_read[-2]["usage"]["completion_tokens"] == 3
    deltas = [chunk["choices"][0]["delta"] for chunk in events_read[:-2]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "wait"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads("".join(c["function"]["arguments"] for c in calls)) == CALL.arguments
    assert events_read[-3]["choices"][0]["finish_reason"] == "tool_calls"


def test_anthropic_messages_reach_the_policy(opened):
    policy = Policy(CALLS)
    client = opened(policy)
    tool = {"name": "look", "input_schema": {"type": "object"}}
    content_blocks = [{"type": "text", "text": "ok"}]
    content_blocks += [{"type": "tool_use", "id": "c1", "name": "look", "input": {"key": "a"}}]
    result = [{"type": "tool_result", "tool_use_id": "c1", "content": content_blocks[:1]}]
    body = {
        **{**HI, "system": content_blocks[:1], "tools": [tool], "stop_sequences": ["X"]},
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": content_blocks},
            {"role": "user", "content": [*result, {"type": "text", "text": "go on"}]},
        ],
    }
    got = client.post("/messages", json=body).json()
    assert got["content"][1]["input"] == {"key": "a"}
    assert got["stop_reason"] == "tool_use"
    (request,) = policy.seen
    assert [m.role for m in request.messages] == ["system", "user", "assistant", "tool", "user"]
    assert request.messages[2].tool_calls[0].id == request.messages[3].tool_call_id == "c1"
    assert (request.stop, request.max_tokens) == (("X",), 5)
    assert request.tools[0].name == "look"


def test_a_stream_of_anthropic_events_gives_the_whole_message(opened):
    events_read = events(opened(Policy(CALLS)).post("/messages", json={**HI, "stream": True}))
    assert [name for name, _ in events_read][:2] == ["message_start", "content_block_start"]
    deltas = [data["delta"] for name, data in events_read if name == "content_block_delta"]
    assert deltas[0]["text"] == "wait"
    assert json.loads(deltas[1]["partial_json"]) == CALL.arguments
    assert events_read[-1][0] == "message_stop"


def test_items_of_one_answer_become_one_message(opened):
    policy = Policy("ok")
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"key": "a"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "7"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "r", "text": "so"}]}
    content_blocks = {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]}
    user = {"role": "user", "content": "hi"}
    items = [
        user,
        thought,
        content_blocks,
        call,
        {**call, "call_id": "c2"},
        output,
        call,
        output,
        content_blocks,
    ]
    got = opened(policy).post("/responses", json={"model": "m", "input": [*items, user]})
    assert got.json()["output"][0]["content"][0]["text"] == "ok"
    messages = policy.seen[0].messages
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant", "user"]
    assert [m.role for m in messages] == roles
    assert (messages[1].reasoning, messages[1].content) == ("so", "wait")
    assert [c.id for c in messages[1].tool_calls] == ["c1", "c2"]


def test_a_stream_of_response_events_gives_the_whole_answer(opened):
    events_read = events(opened(Policy(CALLS)).post("/responses", json={**ITEMS, "stream": True}))
    assert [data["sequence_number"] for _, data in events_read] == list(range(len(events_read)))
    assert all(name == data["type"] for name, data in events_read)
    whole = events_read[-1][1]["response"]
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("/messages", {"tool_choice": {"type": "tool", "name": "look"}}, "tool_choice"),
        (
            "/messages",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice",
        ),
        ("/messages", {"top_k": 5}, "top_k"),
        ("/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ("/messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ("/messages", {"max_tokens": None}, "max_tokens"),
        ("/messages", {"mcp_servers": []}, "mcp_servers"),
        ("/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/responses", {"conversation": "c"}, "conversation"),
        ("/responses", {"background": True}, "background"),
        ("/responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("/responses", {"reasoning": {"effort": "high"}}, "reasoning"),
        ("/responses", {"tool_choice": "required"}, "tool_choice"),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_format_of_the_wire(opened, path, body, field):
    policy = Policy()
    got = opened(policy).post(path, json={**(HI if path == "/messages" else ITEMS), **body})
    assert got.status_code == 400
    error = got.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]
    assert not policy.seen


def test_errors_of_anthropic_have_its_format(opened):
    got = opened(Policy(finish_reason="context")).post("/messages", json=HI)
    assert got.status_code == 400
    assert got.json()["type"] == "error"
    assert "prompt is too long" in got.json()["error"]["message"]

    async def busy(request):
        raise RefusedError("the model loads", status=503)

    assert opened(busy).post("/messages", json=HI).json()["error"]["type"] == "api_error"
