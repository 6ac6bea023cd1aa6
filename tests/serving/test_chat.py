import asyncio
import json
from concurrent.futures import Future

import pytest
from serving_policy import Policy

from gspo_env.serving import RefusedError, Reply
from gspo_env.types import Message, ToolCall

HI = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def post(client, body=HI, path="/chat/completions", **headers):
    return client.post(path, json=body, headers=headers)


def test_a_plain_request_reaches_the_policy_and_its_answer_the_program(opened):
    policy = Policy(prompt_tokens=7, completion_tokens=2)
    client = opened(policy)
    body = {**HI, "max_tokens": 5, "stop": "END"}
    body["messages"] = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]
    body["messages"] += HI["messages"]
    answer = post(client, body, **{"x-agent": "planner"}).json()
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert answer["id"] == "chatcmpl-000001"
    (request,) = policy.seen
    assert [m.role for m in request.messages] == ["system", "user"]
    assert (request.max_tokens, request.stop, request.agent) == (5, ("END",), "planner")
    assert request.id == answer["id"]


def test_calls_and_results_make_the_round(opened):
    call = ToolCall(name="look", arguments={"key": "ämber"})
    policy = Policy(Message(role="assistant", content="", tool_calls=(call,), reasoning="so"))
    client = opened(policy)
    first = post(client, {**HI, "tools": [TOOL]}).json()["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    message = first["message"]
    assert message["content"] is None
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"key": "ämber"}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
    post(client, {**HI, "messages": [*HI["messages"], message, result], "tools": [TOOL]})
    _, call_message, response = policy.seen[1].messages
    assert call_message.tool_calls[0].arguments == {"key": "ämber"}
    assert call_message.reasoning == "so"
    assert response.tool_call_id == call_message.tool_calls[0].id != ""
    assert policy.seen[1].tools[0].schema["function"]["name"] == "look"


def test_a_future_of_another_thread_is_an_answer(opened):
    future = Future()
    future.set_result(Reply(message=Message(role="assistant", content="from afar")))
    client = opened(lambda request: future)
    assert post(client).json()["choices"][0]["message"]["content"] == "from afar"


@pytest.mark.parametrize(
    ("reply", "status", "reason"),
    [({"finish_reason": "length"}, 200, "length"), ({"finish_reason": "context"}, 400, None)],
)
def test_a_cut_reply_goes_on_and_a_prompt_that_does_not_fit_is_an_error(
    opened, reply, status, reason
):
    response = post(opened(Policy(**reply)))
    assert response.status_code == status
    if reason:
        assert response.json()["choices"][0]["finish_reason"] == reason
    else:
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2},
        {"top_p": 0.9},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"parallel_tool_calls": False},
        {"guided_regex": "a*"},
        {"logprobs": True},
        {"frobnicate": 1},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"stop": [""]},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "I"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": "hi"},
    ],
)
def test_what_cannot_be_done_is_refused_with_the_name_of_the_field(opened, field):
    policy = Policy()
    response = post(opened(policy), {**HI, **field})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert next(iter(field)) in error["message"] + str(error["param"])
    assert not policy.seen


@pytest.mark.parametrize("name", [True, None, 3, "a b", "x" * 129])
def test_a_wrong_name_of_a_tool_is_refused_with_what_is_allowed(opened, name):
    tool = {"type": "function", "function": {"name": name}}
    error = post(opened(Policy()), {**HI, "tools": [tool]}).json()["error"]
    assert error["param"] == "tools[0].function.name"
    assert error["message"].endswith("expected up to 128 letters, digits, '_', '-' or '.'")


def test_fields_that_change_no_answer_are_taken(opened):
    harmless = {
        **{"user": "me", "metadata": {}, "store": False, "n": 1, "top_p": 1.0, "seed": 4},
        **{"tool_choice": "auto", "parallel_tool_calls": True, "logit_bias": None},
        **{"response_format": {"type": "text"}, "presence_penalty": 0.0, "stream": False},
    }
    policy = Policy()
    assert post(opened(policy), {**HI, **harmless}).status_code == 200
    assert policy.seen[0].agent == "me"


def test_tools_are_not_shown_where_calls_are_forbidden(opened):
    policy = Policy()
    post(opened(policy), {**HI, "tools": [TOOL], "tool_choice": "none"})
    assert policy.seen[0].tools == ()


def test_in_training_the_temperature_of_the_rollout_holds_and_is_counted(opened):
    policy = Policy()
    client = opened(policy)
    post(client, {**HI, "temperature": 0.3, "seed": 5})
    assert (policy.seen[0].temperature, policy.seen[0].seed) == (None, None)
    assert client.session.counts == {"temperature": 1}
    serving = opened(policy, training=False)
    post(serving, {**HI, "temperature": 0.3, "seed": 5})
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


def test_a_session_that_takes_no_rewards_remembers_no_answers(opened):
    """A served model answers for weeks."""
    client = opened(Policy())
    for _ in range(3):
        assert post(client).status_code == 200
    assert not client.session._answered


def test_an_answer_that_does_not_come_ends(opened):
    async def never(request):
        await asyncio.Event().wait()

    assert post(opened(never, seconds=0.1)).status_code == 504
