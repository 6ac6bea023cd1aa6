import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_env.env.tools import Tool, format_tool_call
from gspo_env.serving import RefusedError
from gspo_env.tool_calls import parse_message, read_action
from gspo_env.types import Message, ToolCall

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.lists(
    st.builds(ToolCall, name=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)
MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", ">", ";"),
    *("{", "}", "[", "]", '"', ":", ",", '{"name": "a", "parameters": {}}', "\\", "\\ud800", "NaN"),
    *("a", " ", "\n", "1e999", '{"name": "f", "arguments": {"x": 1}}'),
]


def hermes(calls):
    return "\n".join(format_tool_call(c.name, c.arguments) for c in calls)


def llama(calls):
    return "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls)


def mistral(calls):
    return "[TOOL_CALLS]" + json.dumps([{"name": c.name, "arguments": c.arguments} for c in calls])


def newer_mistral(calls):
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{json.dumps(c.arguments)}" for c in calls)


def tagged_llama(calls):
    return f"<|python_tag|>{llama(calls)}"


@pytest.mark.parametrize("write", [hermes, llama, tagged_llama, mistral, newer_mistral])
@given(calls=CALLS, thought=st.sampled_from(["", "I think", "a\nb"]))
def test_what_a_family_writes_is_read_back(write, calls, thought):
    text = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + write(calls)
    message, malformed = parse_message(text)
    assert message == Message(
        role="assistant", content="", reasoning=thought or None, tool_calls=tuple(calls)
    )
    assert malformed == 0


def a_tool(name, **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    return Tool(
        name=name,
        description="",
        parameters={"type": "object", "properties": properties},
        function=print,
        validator=None,
    )


PLAIN = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>"), max_size=20)


@given(text=PLAIN, number=st.integers(), tree=st.dictionaries(NAMES, PLAIN), wrapped=st.booleans())
def test_xml_arguments_have_the_types_of_the_schema(text, number, tree, wrapped):
    tool = a_tool("f", s="string", n="integer", o="object")
    values = {"s": text, "n": number, "o": tree}
    body = "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
        for k, v in values.items()
    )
    written = f"<function=f>\n{body}</function>"
    written = f"<tool_call>\n{written}\n</tool_call>" if wrapped else written
    message, malformed = parse_message(f"Let me look.\n{written}", [tool])
    assert message.tool_calls == (ToolCall(name="f", arguments=values),)
    assert (message.content, malformed) == ("Let me look.", 0)


@settings(max_examples=400)
@given(st.lists(st.sampled_from(MARKS), max_size=40).map("".join) | st.text())
def test_hostile_text_is_never_an_error(text):
    message, malformed = parse_message(text)
    assert malformed >= 0
    if not message.tool_calls and message.reasoning is None:
        assert message.content == text
    json.dumps([call.arguments for call in message.tool_calls]).encode()


@pytest.mark.parametrize(
    "unit",
    [
        *("<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>["'),
        "<tool_call></tool_call>",
        *("<function=", "<function=a>", "<function=a></function>", "<parameter=a>", "<think>"),
        *("<function=a><parameter=b></function>", '"', "[TOOL_CALLS]", "[TOOL_CALLS][", "[ARGS]"),
        *("[TOOL_CALLS]a[ARGS]", "[TOOL_CALLS]a[ARGS]{", "<|python_tag|>", "<|python_tag|>{"),
        *('{"name": "a", "parameters": {}};', "{", "[", "</think>", "[TOOL_CALLS]a[CALL_ID]"),
    ],
)  # fmt: skip
def test_a_megabyte_of_hostile_text_is_read_once(unit):
    text = unit * (1_000_000 // len(unit))
    message, malformed = parse_message(text)  # a quadratic search takes many minutes
    assert malformed <= 32
    assert len(message.content) <= len(text)


def test_a_malformed_call_stays_text_and_is_counted():
    bad = '<tool_call>{"name": "f", "arguments": {"x": </tool_call>'
    good = format_tool_call("f", {"x": 1})
    message, malformed = parse_message(f"so {bad} and {good}")
    assert malformed == 1
    assert bad in message.content
    assert message.tool_calls == (ToolCall(name="f", arguments={"x": 1}),)
    cut, malformed = parse_message('<tool_call>{"name": "f"')
    assert (cut.content, cut.tool_calls, malformed) == ('<tool_call>{"name": "f"', (), 1)


def test_json_that_is_an_answer_is_no_call():
    answer = '{"name": "Ada", "parameters": {}}'
    assert parse_message(answer, [a_tool("f")])[0].content == answer
    for text in ('{"name": "Ada"}', '{"name": "f", "parameters": {}} is it', "{}"):
        assert parse_message(text) == (Message(role="assistant", content=text), 0)


def test_a_thought_whose_start_is_in_the_prompt_is_split_off():
    message, _ = parse_message("hm\n</think>\n\nyes")
    assert (message.reasoning, message.content) == ("hm", "yes")
    message, _ = parse_message("<think>\nit never en")
    assert (message.reasoning, message.content) == ("it never en", "")
    text = "the tag <think> and </think> in a text"
    assert parse_message(text)[0].content == text


def test_a_call_in_a_thought_is_not_made():
    text = f"<think>{format_tool_call('f', {})}</think>no"
    message, malformed = parse_message(text)
    assert (message.tool_calls, message.content, malformed) == ((), "no", 0)


def test_mistral_gives_the_ids_of_its_calls():
    message, _ = parse_message('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"x": 1}')
    assert message.tool_calls == (ToolCall(name="f", arguments={"x": 1}, id="abc123def"),)


def strict(schema, kind="chat"):
    """The tools of a request with one strict tool, in each wire format."""
    from gspo_env.serving.dialects.chat import Chat
    from gspo_env.serving.dialects.messages import Messages
    from gspo_env.serving.dialects.responses import Responses

    function = {"name": "look", "description": "", "strict": True}
    hi = [{"role": "user", "content": "hi"}]
    body, wire = {
        "chat": (
            {"tools": [{"type": "function", "function": {**function, "parameters": schema}}]},
            Chat(),
        ),
        "messages": (
            {"tools": [{**function, "input_schema": schema}], "max_tokens": 9},
            Messages(),
        ),
        "responses": (
            {"tools": [{"type": "function", **function, "parameters": schema}]},
            Responses(),
        ),
    }[kind]
    talk = {"input": hi} if kind == "responses" else {"messages": hi}
    return wire.read({"model": "m", **talk, **body}, "id").request.tools


KEY = {
    "type": "object",
    "properties": {"key": {"$ref": "#/$defs/word"}},
    "required": ["key"],
    "additionalProperties": False,
    "$defs": {"word": {"type": "string", "enum": ["a", "b"]}},
}


@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_a_call_that_does_not_fit_a_strict_tool_is_text_and_counted(kind):
    pytest.importorskip("jsonschema")
    tools = strict(KEY, kind)
    good = format_tool_call("look", {"key": "a"})
    message, malformed = read_action(good, tools)
    assert (message.tool_calls, malformed) == ((ToolCall(name="look", arguments={"key": "a"}),), 0)
    for arguments in ({}, {"key": 1}, {"key": "c"}, {"key": "a", "more": 1}):
        text = good + format_tool_call("look", arguments)
        assert read_action(text, tools) == (Message(role="assistant", content=text), 1)
        call = ToolCall(name="look", arguments=arguments)
        parsed = Message(role="assistant", content="", tool_calls=(call,))
        assert read_action(text, tools, parsed) == (Message(role="assistant", content=text), 1)


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"properties": {"a": {"enum": 3}}}])
def test_the_schema_of_a_strict_tool_has_to_be_one(schema):
    pytest.importorskip("jsonschema")
    with pytest.raises(RefusedError, match="schema of a strict tool"):
        strict(schema)


@pytest.mark.parametrize("place", ["https://127.0.0.1:1/x.json", "#/nowhere", "#"])
def test_a_reference_out_of_the_schema_of_a_strict_tool_is_not_followed(place):
    pytest.importorskip("jsonschema")
    tools = strict({"type": "object", "properties": {"key": {"$ref": place}}})
    text = format_tool_call("look", {"key": 1})
    assert read_action(text, tools)[1] == 1


def test_strict_without_the_package_is_refused_and_not_ignored(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(RefusedError, match="jsonschema"):
        strict(KEY)
