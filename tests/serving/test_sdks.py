"""The address is what the SDKs of agent programs expect."""

import asyncio

import pytest
from support.serving_policy import Policy

from gspo_env.types import Message, ToolCall

pytestmark = pytest.mark.agents

CALL = ToolCall(name="look", arguments={"key": "ämber"})
CALLS = Message(role="assistant", content="wait", reasoning="so", tool_calls=(CALL,))
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}}
TOOL = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
HI = [{"role": "user", "content": "hi"}]


def check_returned(policy):
    """The second request has what the policy said in the first one, and the result."""
    said, given = policy.seen[1].messages[1:]
    assert (said.content, said.reasoning) == ("wait", "so")
    assert said.tool_calls[0].arguments == CALL.arguments
    assert (given.role, given.tool_call_id) == ("tool", said.tool_calls[0].id)


@pytest.fixture
def openai(opened):
    sdk = pytest.importorskip("openai")

    def make(policy):
        session = opened(policy).session
        return sdk.OpenAI(base_url=session.url, api_key=session.key, max_retries=0, timeout=10)

    return make


@pytest.fixture
def anthropic(opened):
    sdk = pytest.importorskip("anthropic")

    def make(policy):
        session = opened(policy).session
        url = session.environment()["ANTHROPIC_BASE_URL"]
        return sdk.Anthropic(base_url=url, api_key=session.key, max_retries=0, timeout=10)

    return make


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_with_a_call_and_its_result(openai, stream):
    policy = Policy(CALLS, "7")
    client = openai(policy)
    tools = [{"type": "function", "function": {**TOOL, "strict": True}}]
    if stream:
        with client.chat.completions.stream(
            model="m", messages=HI, tools=tools, stream_options={"include_usage": True}
        ) as events:
            got = events.get_final_completion()
    else:
        got = client.chat.completions.create(model="m", messages=HI, tools=tools)
    choice = got.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "wait")
    assert choice.message.reasoning_content == "so"
    assert got.usage.total_tokens == 0
    call = choice.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    history = [*HI, choice.message.model_dump(exclude_unset=True), result]
    for message in history:
        for one in message.get("tool_calls", ()):
            one["function"].pop("parsed_arguments", None)
            one.pop("index", None)
        message.pop("parsed", None)
    assert client.chat.completions.create(model="m", messages=history).choices[0].message.content
    check_returned(policy)


def test_openai_errors_have_their_classes(openai, opened):
    import openai as sdk

    client = openai(Policy(finish_reason="context"))
    with pytest.raises(sdk.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(sdk.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert client.models.list().data[0].id == "policy"


def test_openai_reads_a_cut_answer(openai):
    client = openai(Policy("and so", finish_reason="length"))
    assert (
        client.chat.completions.create(model="m", messages=HI).choices[0].finish_reason == "length"
    )
    got = client.responses.create(model="m", input="hi")
    assert got.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses_with_a_call_and_its_result(openai, stream):
    policy = Policy(CALLS, "7")
    client = openai(policy)
    tools = [{"type": "function", **TOOL, "strict": True}]
    ask = {"model": "m", "instructions": "be brief", "input": HI, "tools": tools}
    if stream:
        with client.responses.stream(**ask) as events:
            kinds = [event.type for event in events]
            got = events.get_final_response()
        assert kinds[-1] == "response.completed"
        assert "response.function_call_arguments.done" in kinds
    else:
        got = client.responses.create(**ask)
    assert got.output_text == "wait"
    reasoning, message, call = got.output
    assert (call.name, reasoning.content[0].text) == ("look", "so")
    items = [item.model_dump(exclude_unset=True) for item in (reasoning, message, call)]
    for item in items:
        item.pop("parsed_arguments", None)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    assert client.responses.create(model="m", input=[*HI, *items, result]).output_text == "7"
    check_returned(policy)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_with_a_call_and_its_result(anthropic, stream):
    policy = Policy(CALLS, "7")
    client = anthropic(policy)
    tools = [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}]
    ask = {"model": "m", "max_tokens": 9, "system": "be brief", "messages": HI, "tools": tools}
    if stream:
        with client.messages.stream(**ask) as events:
            got = events.get_final_message()
    else:
        got = client.messages.create(**ask)
    assert got.stop_reason == "tool_use"
    thought, text, call = got.content
    assert (thought.thinking, text.text, call.input) == ("so", "wait", CALL.arguments)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    history = [
        *HI,
        {"role": "assistant", "content": got.content},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(model="m", max_tokens=9, messages=history)
    check_returned(policy)
    assert policy.seen[0].messages[0] == Message(role="system", content="be brief")


def test_anthropic_counts_tokens_and_sends_what_claude_code_does(anthropic):
    policy = Policy("ok", prompt_tokens=7)
    client = anthropic(policy)
    assert client.messages.count_tokens(model="m", messages=HI).input_tokens == 7
    got = client.beta.messages.create(
        model="m",
        max_tokens=5,
        messages=HI,
        betas=["context-management-2025-06-27", "effort-2025-11-24"],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
    )
    assert (got.content[0].text, got.usage.input_tokens) == ("ok", 7)


def test_anthropic_errors_have_their_classes(anthropic):
    import anthropic as sdk

    client = anthropic(Policy("prompt is too long", finish_reason="context"))
    with pytest.raises(sdk.BadRequestError, match="prompt is too long"):
        client.messages.create(model="m", max_tokens=9, messages=HI)
    with pytest.raises(sdk.AuthenticationError):
        client.with_options(api_key="no").messages.create(model="m", max_tokens=9, messages=HI)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_the_agents_sdk_uses_its_tool(opened, api, stream):
    agents = pytest.importorskip("agents")
    sdk = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    policy = Policy(Message(role="assistant", content="", tool_calls=(CALL,)), "it is 7")
    session = opened(policy).session
    asked = []

    @agents.function_tool
    def look(key: str) -> str:  # the SDK reads the types
        """Looks a key up."""
        asked.append(key)
        return "7"

    async def play():
        client = sdk.AsyncOpenAI(base_url=session.url, api_key=session.key, timeout=10)
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        model = kind(model="m", openai_client=client)
        agent = agents.Agent(name="helper", instructions="Use it.", tools=[look], model=model)
        async with client:
            if not stream:
                return (await agents.Runner.run(agent, "what is ämber?")).final_output
            result = agents.Runner.run_streamed(agent, "what is ämber?")
            async for _ in result.stream_events():
                pass
            return result.final_output

    assert asyncio.run(play()) == "it is 7"
    assert asked == ["ämber"]
    first, second = policy.seen
    assert [m.role for m in first.messages] == ["system", "user"]
    assert second.messages[:2] == first.messages
    assert second.messages[3].content == "7"
    assert first.tools[0].parameters["properties"]["key"]["type"] == "string"
