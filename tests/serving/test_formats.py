"""Chat completions, Anthropic's messages, OpenAI's responses and streams, as on the wire."""

import asyncio
from concurrent.futures import Future

import pytest
from support.serving_policy import Policy

from gspo_env.errors import RefusedError
from gspo_env.serving import Reply
from gspo_env.types import Message, ToolCall

CALL = ToolCall(name="look", arguments={"key": "a"})
CALLS = Message(role="assistant", content="wait", tool_calls=(CALL,))
HI = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


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


def test_items_of_one_answer_become_one_message(opened):
    policy = Policy("ok")
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"key": "a"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "7"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "r", "text": "so"}]}
    content_blocks = {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]}
    user = {"role": "user", "content": "hi"}
    items = [user, thought, content_blocks, call, {**call, "call_id": "c2"}]
    items += [output, call, output, content_blocks, user]
    got = opened(policy).post("/responses", json={"model": "m", "input": items})
    assert got.json()["output"][0]["content"][0]["text"] == "ok"
    messages = policy.seen[0].messages
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant", "user"]
    assert [m.role for m in messages] == roles
    assert (messages[1].reasoning, messages[1].content) == ("so", "wait")
    assert [c.id for c in messages[1].tool_calls] == ["c1", "c2"]


BODIES = {"/chat/completions": HI, "/messages": HI, "/responses": {"model": "m", "input": "hi"}}


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_to_a_request_without_a_model_names_the_one_that_is_served(opened, path):
    client = opened(Policy(), model="mine")
    body = {name: value for name, value in BODIES[path].items() if name != "model"}
    for more in ({}, {"model": ""}):
        assert client.post(path, json={**body, **more}).json()["model"] == "mine"


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
REFUSED = {
    "/chat/completions": [
        *({"n": 2}, {"top_p": 0.9}, {"logit_bias": {"5": 1}}, {"presence_penalty": 0.5}),
        *({"response_format": {"type": "json_schema", "json_schema": {}}}, {"frobnicate": 1}),
        *({"tool_choice": "required"}, {"parallel_tool_calls": False}, {"guided_regex": "a*"}),
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        *({"max_tokens": 0}, {"max_tokens": True}, {"temperature": "hot"}, {"logprobs": True}),
        *({"stop": [""]}, {"messages": []}, {"messages": "hi"}, {"messages": IMAGE}),
        {"messages": [{"role": "assistant", "content": "I"}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        *({"tools": [{"function": {"name": n}}]} for n in (True, None, 3, "a b", "x" * 129)),
        {"tools": [{"type": "function", "function": {"name": "look"}}] * 100},
    ],
    "/messages": [
        *({"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "look"}}),
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        *({"top_k": 5}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        *({"thinking": {"type": "between_tools"}}, {"output_config": {"task_budget": {}}}),
        *({"output_config": {"format": {"type": "json_schema"}}}, {"speed": 2}),
        *({"mcp_servers": [{"type": "url"}]}, {"container": "c"}, {"thread": {"type": "create"}}),
        *(
            {"context_management": {"edits": [{"type": t}]}}
            for t in ("clear_tool_uses_20250919", 3)
        ),
        *({"tools": [{"type": "bash", "name": "bash"}]}, {"max_tokens": None}),
        {"tools": [{"name": "look", "input_schema": {}}] * 2},
        {"tools": [{"name": "look", "input_schema": {}, "defer_loading": True}]},
        {"messages": [{"role": "system", "content": "x", "clear_at": "next_user_message"}]},
    ],
    "/responses": [
        *({"previous_response_id": "resp_1"}, {"conversation": "c"}, {"background": True}),
        *({"tools": [{"type": "web_search"}]}, {"text": {"format": {"type": "json_schema"}}}),
        *({"reasoning": {"mode": "pro"}}, {"tool_choice": "required"}, {"input": []}),
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"tools": [{"type": "function", "name": "look"}] * 2},
    ],
}


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in REFUSED.items() for body in bodies]
)
def test_what_cannot_be_done_is_refused_with_the_name_of_the_field(opened, path, body):
    policy = Policy()
    got = opened(policy).post(path, json={**BODIES[path], **body})
    assert got.status_code == 400
    error = got.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert next(iter(body)) in error["message"] + str(error.get("param"))
    assert not policy.seen


CLAUDE_CODE = {
    **{"thinking": {"type": "adaptive", "display": "summarized"}, "speed": "fast"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    **{"output_config": {"effort": "xhigh"}, "mcp_servers": [], "fallbacks": "default"},
    **{"metadata": {"user_id": "u"}, "diagnostics": {"previous_message_id": None}, "betas": ["b"]},
    "cache_control": {"type": "ephemeral"},
    "tools": [{"name": "look", "input_schema": {}, "defer_loading": False, "strict": False}],
}
"""Fields that Claude Code and Anthropic's clients send, and that change nothing here."""
CODEX = {"reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "medium"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/messages", {field: value}) for field, value in CLAUDE_CODE.items()),
        *(("/messages", {"thinking": {"type": "disabled"}}), ("/messages", {"output_config": {}})),
        ("/messages", {"context_management": {"edits": []}}),
        *(("/responses", CODEX), ("/chat/completions", {"reasoning_effort": "low"})),
    ],
)
def test_what_changes_no_answer_is_taken(opened, path, body):
    policy = Policy()
    got = opened(policy).post(path, json={**BODIES[path], **body})
    assert got.status_code == 200, got.text
    assert len(policy.seen) == 1


def test_an_effort_without_effect_is_counted(opened):
    client = opened(Policy(), training=False)
    client.post("/messages", json={**HI, "output_config": {"effort": "low"}})
    client.post("/chat/completions", json={**HI, "reasoning_effort": "low"})
    client.post("/responses", json={"input": "hi", "reasoning": {"effort": "low"}})
    client.post("/responses", json={"input": "hi", "reasoning": {}})
    assert client.session.counts == {"effort": 3}


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
def test_a_message_without_content_is_an_empty_one(opened, path):
    policy = Policy()
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": []}]
    for before in ([], said):
        for content in ([], None, ""):
            messages = [*before, {"role": "user", "content": content}]
            got = opened(policy).post(path, json={**HI, "messages": messages})
            assert got.status_code == 200, got.text
            assert policy.seen[-1].messages[-1] == Message(role="user", content="")


def test_a_system_message_may_stand_between_those_of_anthropic(opened):
    policy = Policy()
    text = [{"type": "text", "text": "be brief"}]
    messages = [*HI["messages"], {"role": "system", "content": text, "clear_at": "never"}]
    assert opened(policy).post("/messages", json={**HI, "messages": messages}).status_code == 200
    assert policy.seen[0].messages[1] == Message(role="system", content="be brief")


def test_errors_of_anthropic_have_its_format(opened):
    policy = Policy("prompt is too long: 9", finish_reason="context")
    got = opened(policy).post("/messages", json=HI)
    assert got.status_code == 400
    assert got.json()["type"] == "error"
    assert "prompt is too long" in got.json()["error"]["message"]

    async def busy(request):
        raise RefusedError("the model loads", status=503)

    assert opened(busy).post("/messages", json=HI).json()["error"]["type"] == "api_error"


PLAIN = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def post(client, body=PLAIN, path="/chat/completions", **headers):
    return client.post(path, json=body, headers=headers)


def test_a_plain_request_reaches_the_policy_and_its_answer_the_program(opened):
    policy = Policy(prompt_tokens=7, completion_tokens=2)
    client = opened(policy)
    tools = {"tools": [TOOL], "tool_choice": "none"}
    body = {**PLAIN, "max_tokens": 5, "stop": "END", **tools}
    body["messages"] = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]
    body["messages"] += PLAIN["messages"]
    answer = post(client, body, **{"x-agent": "planner"}).json()
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert answer["id"] == "chatcmpl-000001"
    (request,) = policy.seen
    assert [m.role for m in request.messages] == ["system", "user"]
    assert (request.max_tokens, request.stop, request.agent) == (5, ("END",), "planner")
    assert request.tools == ()
    assert request.id == answer["id"]


def test_ids_that_a_model_repeats_are_different_in_a_session(opened):
    call = ToolCall(name="look", arguments={}, id="abc")
    message = Message(role="assistant", content="", tool_calls=(call, call))
    client = opened(Policy(message))
    ids = [
        call["id"]
        for _ in range(2)
        for call in post(client).json()["choices"][0]["message"]["tool_calls"]
    ]
    assert ids[0] == "abc"
    assert len(set(ids)) == 4


@pytest.mark.parametrize("arguments", ["null", "", "{}", None, {}])
def test_a_call_without_arguments_may_be_sent_in_any_form(opened, arguments):
    function = {"name": "look", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    policy = Policy()
    body = {**PLAIN, "messages": [*PLAIN["messages"], said, *PLAIN["messages"]]}
    assert post(opened(policy), body).status_code == 200
    (call,) = policy.seen[0].messages[1].tool_calls
    assert call == ToolCall(name="look", arguments={}, id="c1")


def test_a_future_of_another_thread_is_an_answer(opened):
    future = Future()
    future.set_result(Reply(message=Message(role="assistant", content="from afar")))
    client = opened(lambda request: future)
    assert post(client).json()["choices"][0]["message"]["content"] == "from afar"


def test_fields_that_change_no_answer_are_taken(opened):
    harmless = {
        **{"user": "me", "metadata": {}, "store": False, "n": 1, "top_p": 1.0, "seed": 4},
        **{"tool_choice": "auto", "parallel_tool_calls": True, "logit_bias": None},
        **{"response_format": {"type": "text"}, "presence_penalty": 0.0, "stream": False},
    }
    policy = Policy()
    assert post(opened(policy), {**PLAIN, **harmless}).status_code == 200
    assert policy.seen[0].agent == "me"


def test_in_training_the_temperature_of_the_rollout_holds_and_is_counted(opened):
    policy = Policy()
    client = opened(policy)
    post(client, {**PLAIN, "temperature": 0.3, "seed": 5})
    assert (policy.seen[0].temperature, policy.seen[0].seed) == (None, None)
    assert client.session.counts == {"temperature": 1}
    serving = opened(policy, training=False)
    post(serving, {**PLAIN, "temperature": 0.3, "seed": 5})
    assert (policy.seen[1].temperature, policy.seen[1].seed) == (0.3, 5)


def test_models_are_listed(opened):
    client = opened(Policy(), model="mine")
    assert client.get("/models").json()["data"][0]["id"] == "mine"
    assert client.get("/models/mine").json()["id"] == "mine"


def test_a_failure_of_the_policy_is_an_error_of_the_server(opened):
    async def fail(request):
        raise RuntimeError("secret of the policy")

    response = post(opened(fail))
    assert response.status_code == 500
    assert "secret" not in response.text

    async def refuse(request):
        raise RefusedError("not today", status=400)

    assert "not today" in post(opened(refuse)).text


def test_an_answer_that_does_not_come_ends(opened):
    async def never(request):
        await asyncio.Event().wait()

    assert post(opened(never, seconds=0.1)).status_code == 504


def called(*ids):
    """Returns a conversation up to the calls of `look` with these ids."""
    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": i, "type": "function", "function": function} for i in ids]
    return [HI["messages"][0], {"role": "assistant", "content": None, "tool_calls": calls}]


def results(*ids):
    return [{"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in ids]


def in_chat(calls, answers):
    return "/chat/completions", {**HI, "messages": [*called(*calls), *results(*answers)]}


def in_messages(calls, answers):
    uses = [{"type": "tool_use", "id": i, "name": "look", "input": {}} for i in calls]
    parts = [{"type": "tool_result", "tool_use_id": i, "content": f"of {i}"} for i in answers]
    spoken = {"role": "assistant", "content": uses}, {"role": "user", "content": parts}
    return "/messages", {**HI, "messages": [*HI["messages"], *spoken]}


def in_responses(calls, answers):
    call = {"type": "function_call", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output"}
    items = [*HI["messages"], *({**call, "call_id": i} for i in calls)]
    items += [{**output, "call_id": i, "output": f"of {i}"} for i in answers]
    return "/responses", {"model": "m", "input": items}


WIRES = pytest.mark.parametrize("wire", [in_chat, in_messages, in_responses])


@WIRES
def test_results_reach_the_policy_in_the_order_of_the_calls(opened, wire):
    policy = Policy("ok")
    path, body = wire(["ca", "cb", "cc"], ["cc", "ca", "cb"])
    assert opened(policy).post(path, json=body).status_code == 200
    shown = [(m.tool_call_id, m.content) for m in policy.seen[0].messages if m.role == "tool"]
    assert shown == [("ca", "of ca"), ("cb", "of cb"), ("cc", "of cc")]


@WIRES
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (["ca", "cx"], "'cx'; expected one of ['ca', 'cb'], each once"),
        (["ca", "ca"], "'ca'; expected one of"),
        (["cb"], "the call 'ca' has no result, but one after it has"),
    ],
)
def test_results_that_belong_to_no_call_are_refused(opened, wire, answers, words):
    policy = Policy("ok")
    path, body = wire(["ca", "cb"], answers)
    got = opened(policy).post(path, json=body)
    assert (got.status_code, policy.seen) == (400, [])
    assert words in got.json()["error"]["message"]


def test_a_result_without_a_call_is_refused(opened):
    body = {**HI, "messages": [*HI["messages"], *results("ca")]}
    assert opened(Policy("ok")).post("/chat/completions", json=body).status_code == 400
