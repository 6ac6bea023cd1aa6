import asyncio
import json
from concurrent.futures import Future

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
    assert post(client, {**HI, "tools": [TOOL], "tool_choice": "none"}).status_code == 200
    assert policy.seen.pop().tools == ()
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


def test_fields_that_change_no_answer_are_taken(opened):
    harmless = {
        **{"user": "me", "metadata": {}, "store": False, "n": 1, "top_p": 1.0, "seed": 4},
        **{"tool_choice": "auto", "parallel_tool_calls": True, "logit_bias": None},
        **{"response_format": {"type": "text"}, "presence_penalty": 0.0, "stream": False},
    }
    policy = Policy()
    assert post(opened(policy), {**HI, **harmless}).status_code == 200
    assert policy.seen[0].agent == "me"


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


def test_an_answer_that_does_not_come_ends(opened):
    async def never(request):
        await asyncio.Event().wait()

    assert post(opened(never, seconds=0.1)).status_code == 504
