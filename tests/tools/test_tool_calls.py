import dataclasses
import functools
import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shop import TOOLS, as_text, calls_in_tool_env, step
from support.tool_cases import CASES, FORMATS
from support.turns import episode, turn

from gspo_env.chat.fields import parse_json
from gspo_env.cli.capture import to_lines
from gspo_env.env.base import Action
from gspo_env.episodes.writer import tool_calls
from gspo_env.errors import RefusedError
from gspo_env.rollout.metrics import control_metrics
from gspo_env.serving import Request
from gspo_env.serving.dialects.chat import Chat
from gspo_env.serving.dialects.messages import Messages
from gspo_env.serving.dialects.responses import Responses
from gspo_env.tools.calls import parse_message, parse_tool_calls
from gspo_env.tools.json_calls import ToolCallError, warn_of_unread
from gspo_env.tools.request import read_action
from gspo_env.tools.tool import Tool, format_tool_call
from gspo_env.types import Group, Message, Prompt, ResetInfo, StopReason, ToolCall, Turn
from gspo_envs.program.env import to_reply
from gspo_envs.tools.sql import SQLEnv

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
MINIMAX = "]<]minimax[>["
MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", ">", ";"),
    *("{", "}", "[", "]", '"', ":", ",", '{"name": "a", "parameters": {}}', "\\", "\\ud800", "NaN"),
    *(f"{MINIMAX}<tool_call>", f"{MINIMAX}</a>", "```tool_code\n", "<tool_calls>", "look(", ")"),
    *("a", " ", "\n", "1e999", '{"name": "f", "arguments": {"x": 1}}'),
]
HOSTILE = st.lists(st.sampled_from(MARKS), max_size=40).map("".join) | st.text()


def hermes(calls):
    return "\n".join(format_tool_call(c.name, c.arguments) for c in calls)


def llama(calls):
    return "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls)


def tagged_llama(calls):
    return f"<|python_tag|>{llama(calls)}"


def mistral(calls):
    return "[TOOL_CALLS]" + json.dumps([{"name": c.name, "arguments": c.arguments} for c in calls])


def newer_mistral(calls):
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{json.dumps(c.arguments)}" for c in calls)


def xml(calls):
    texts = []
    for call in calls:
        body = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in call.arguments.items()
        )
        texts.append(f"<function={call.name}>\n{body}</function>")
    return "\n".join(texts)


def wrapped_xml(calls):
    return f"<tool_call>\n{xml(calls)}\n</tool_call>"


JSON_FAMILIES = [hermes, llama, tagged_llama, mistral, newer_mistral]
FAMILIES = [*JSON_FAMILIES, xml, wrapped_xml]


def a_tool(name, **parameters):
    schema = {"type": "object", **parameters}
    return Tool(name=name, description="", parameters=schema, function=print, validator=None)


@pytest.mark.parametrize("write", JSON_FAMILIES)
@given(calls=CALLS, thought=st.sampled_from(["", "I think", "a\nb"]))
def test_what_a_family_writes_is_read_back(write, calls, thought):
    text = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + write(calls)
    message, malformed = parse_message(text)
    assert message == Message(
        role="assistant", content="", reasoning=thought or None, tool_calls=tuple(calls)
    )
    assert malformed == 0


PLAIN = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>"), max_size=20)
SHOP_CALLS = st.lists(
    st.builds(
        ToolCall,
        name=st.just("look"),
        arguments=st.fixed_dictionaries({"word": PLAIN}, optional={"times": st.integers(0, 3)}),
    )
    | st.just(ToolCall(name="leave", arguments={})),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("write", FAMILIES)
@given(calls=SHOP_CALLS, thought=st.sampled_from(["", "<think>hm</think>"]), parsed=st.booleans())
def test_an_environment_a_program_and_serve_read_the_same_calls(write, calls, thought, parsed):
    if write is wrapped_xml:
        calls = calls[:1]
    text, message = thought + write(calls), None
    if parsed:
        message = Message(role="assistant", content="", tool_calls=tuple(calls))
        text = "text that no reader knows"
    assert calls_in_tool_env(Action(text, message=message)) == (calls, 0)
    assert read_action(text, TOOLS, message)[0].tool_calls == tuple(calls)
    assert to_reply(Action(text, message=message), TOOLS)[0].message.tool_calls == tuple(calls)


@pytest.mark.parametrize("bad", ['<tool_call>{"name": look}</tool_call>', "<tool_call>{"])
def test_a_malformed_call_beside_one_that_a_response_template_has_parsed_is_counted(bad):
    call, tools = ToolCall(name="look", arguments=A), TOOLS
    text = f"{hermes([call])}\n{bad}"
    message = Message(role="assistant", content="so", tool_calls=(call,))
    assert calls_in_tool_env(Action(text, message=message)) == ([call], 1)
    assert read_action(text, tools, message) == (message, 1)
    assert to_reply(Action(text, message=message), tools)[1] == 1


WORD = {"$ref": "#/$defs/word"}
TYPED = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "644", "644"),
    ({"type": ["string", "null"]}, "true", "true"),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "", ""),
    (WORD, "644", "644"),
    ({"anyOf": [WORD, {"type": "array"}]}, "[1]", "[1]"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "null"}, "null", "null"),
    ({"enum": [1, 2]}, "1", 1),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "boolean"}, "yes", ToolCallError),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": ["integer", "null"]}, "", None),
    ({"type": "integer"}, "", ToolCallError),
    ({"type": "integer"}, "two", ToolCallError),
    ({"type": "integer"}, "2.5", ToolCallError),
    ({"type": "integer"}, "2.0", 2),
    ({"type": ["integer", "null"]}, "-3e2", -300),
    ({"type": ["integer", "number"]}, "2.0", 2),
    ({"type": "number"}, "2.0", 2.0),
    ({"enum": ["on", 3]}, "3", 3),
    ({"enum": ["on", None]}, "null", None),
    ({"anyOf": [{"const": True}, {"enum": ["auto"]}]}, "True", True),
    ({"enum": ["on", 3]}, "4", "4"),
    ({"type": "number"}, " 2 ", 2),
    ({"type": "array"}, "['x', 'y']", ["x", "y"]),
    ({"type": "array"}, '["x"]', ["x"]),
    ({"type": "array"}, "x, y", ToolCallError),
    ({"type": "array"}, "[" * 9999, ToolCallError),
    ({"type": "object"}, "{'a': True}", {"a": True}),
    ({"type": "object"}, "{'a': {1, 2}}", ToolCallError),
    ({}, "644", 644),
    ({}, '"644"', '"644"'),
    ({"anyOf": [{}, {"type": "integer"}]}, "x", "x"),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "1", "1"),
    ({"type": "STRING"}, "1", "1"),
    ({"type": "dict"}, '{"a": 1}', {"a": 1}),
    ({"type": "float"}, "1.5", 1.5),
    ({"type": ["str", "int"]}, "1", "1"),
    ({"type": "any"}, "x", "x"),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"$ref": "#/$defs/a~1b%20c"}, "1", "1"),
    ({"type": "array"}, '[{"a": 1, "a": 2}]', ToolCallError),
    ({"type": "object"}, "{'a': 1, 'a': 2}", ToolCallError),
    ({"$ref": "#/$defs/loop"}, "x", "x"),
    ({"$ref": "elsewhere"}, "5", 5),
    ({}, "None", None),
    ({}, "{'a': [True]}", {"a": [True]}),
    ({"type": "array"}, "", []),
    ({"type": "string"}, "<![CDATA[x]]>", "<![CDATA[x]]>"),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_an_xml_argument_is_what_its_schema_allows_or_malformed(schema, text, value):
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {}]}
    parameters = {
        "properties": {"key": schema},
        "$defs": {"word": {"type": "string"}, "loop": loop, "a/b c": {"type": "string"}},
    }
    if schema is WORD:
        parameters |= {"properties": {}, "additionalProperties": schema}
    tools = [a_tool("f", **parameters)]
    for action in (
        f"<tool_call>\n<function=f>\n<parameter=key>\n{text}\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>f\n<arg_key>key</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    ):
        (call,) = parse_tool_calls(action, tools)
        if value is ToolCallError:
            assert isinstance(call, ToolCallError)
            assert "'key'" in call.message
        else:
            assert call == ToolCall(name="f", arguments={"key": value})
            assert type(call.arguments["key"]) is type(value)


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
EVIL = "(a+)+$"
PLACED = [
    ({"patternProperties": {"^k": STRING}}, "644"),
    ({"patternProperties": {"^n_": INTEGER, "y$": STRING}}, "644"),
    ({"patternProperties": {"^n_": INTEGER}, "additionalProperties": STRING}, "644"),
    ({"patternProperties": {"^k[a-z]+$": INTEGER}, "additionalProperties": STRING}, "644"),
    ({"patternProperties": {r"^\\w{3}$": INTEGER, ".*": {}}}, 644),
    ({"patternProperties": {EVIL: STRING}}, "644"),
    ({"patternProperties": {EVIL: INTEGER, "^x": STRING}}, "644"),
    ({"patternProperties": {EVIL: INTEGER, "^x": INTEGER}}, 644),
    ({"patternProperties": {EVIL: INTEGER}, "additionalProperties": STRING}, "644"),
    ({"properties": {"key": INTEGER}, "patternProperties": {"key": STRING}}, 644),
    ({"patternProperties": 3, "additionalProperties": {"$ref": "#/$defs/word"}}, "644"),
    ({"patternProperties": {"[": STRING, "k": 3}}, "644"),
    ({"additionalProperties": {"anyOf": [STRING, {"type": "null"}]}}, "644"),
    ({"additionalProperties": True}, 644),
    ({"allOf": [{"properties": {"key": STRING}}]}, "644"),
    ({"properties": {}, "anyOf": [{"properties": {"key": STRING}}, {"required": ["x"]}]}, "644"),
    ({"oneOf": [{"properties": {"key": INTEGER}}, {"properties": {"key": STRING}}]}, "644"),
    ({"$ref": "#/$defs/arguments"}, "644"),
    ({"$ref": "#/$defs/arguments", "properties": {"other": INTEGER}}, "644"),
    ({"if": {}, "then": {"properties": {"key": STRING}}}, "644"),
    ({"properties": {"key": {"allOf": [{"type": ["string", "integer"]}, INTEGER]}}}, "644"),
    ({"properties": {"key": {"allOf": [{"type": "number"}, INTEGER]}}}, 644),
    ({"properties": {"key": {"type": ["string", "integer"], "allOf": [STRING]}}}, "644"),
    ({"properties": {"key": {"$ref": "#/$defs/word", "nullable": True}}}, "644"),
    ({"properties": {"key": {"$ref": "#/$defs/outer"}}}, "644"),
    ({"properties": {"key": {"$ref": "#/$defs/list/prefixItems/0"}}}, "644"),
    ({"properties": {"key": {"$ref": "#word"}}}, 644),
    ({"properties": {"key": {"anyOf": [{"$ref": "#/$defs/self"}, STRING]}}}, "644"),
    ({"properties": {"key": {"const": "644"}}}, "644"),
    ({"properties": {"key": {"const": 644}}}, 644),
    ({"properties": {"key": {"not": STRING}}}, 644),
    ({"properties": {"key": {"type": "string", "const": 3}}}, "644"),
    ({"properties": {"key": {"enum": ["644", 1]}}}, "644"),
    ({"properties": {"key": {"enum": [1, 2], "nullable": True}}}, 644),
]
NULLS = [
    {"allOf": [{"$ref": "#/$defs/word"}], "nullable": True},
    {"anyOf": [STRING, INTEGER], "nullable": True},
    {"enum": ["a"], "nullable": True},
    {"$ref": "#/$defs/word", "nullable": True},
    {"$ref": "#/$defs/nullable"},
    {"const": None},
    {"enum": ["a", None]},
]
DEFINITIONS = {
    "word": STRING,
    "nullable": {"type": "string", "nullable": True},
    "arguments": {"type": "object", "properties": {"key": {"$ref": "#/$defs/word"}}},
    "outer": {"$defs": {"inner": STRING}, "$ref": "#/$defs/outer/$defs/inner"},
    "list": {"prefixItems": [STRING]},
    "self": {"anyOf": [{"$ref": "#/$defs/self"}]},
}


@pytest.mark.parametrize(
    ("parameters", "text", "value"),
    [
        *((parameters, "644", value) for parameters, value in PLACED),
        *(({"properties": {"key": schema}}, "null", None) for schema in NULLS),
        ({"properties": {"key": {"$ref": "#/$defs/word"}}}, "null", "null"),
    ],
)
def test_the_schema_of_an_argument_is_found_wherever_it_stands(parameters, text, value):
    tools = [a_tool("f", **parameters, **{"$defs": DEFINITIONS})]
    action = f"<function=f>\n<parameter=key>\n{text}\n</parameter>\n</function>"
    assert parse_tool_calls(action, tools) == [ToolCall(name="f", arguments={"key": value})]


@settings(max_examples=400)
@given(HOSTILE)
def test_hostile_text_is_never_an_error(text):
    message, malformed = read_action(text, TOOLS)
    calls = parse_tool_calls(text, TOOLS)
    assert [call for call in calls if isinstance(call, ToolCall)] == list(message.tool_calls)
    assert sum(isinstance(call, ToolCallError) for call in calls) == malformed
    reply, malformed_in_program = to_reply(text, TOOLS)
    assert reply.message.tool_calls == message.tool_calls
    assert malformed_in_program == calls_in_tool_env(text)[1] == malformed
    message, _ = parse_message(text)
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
        *("<|tool_call>call:a{'", '<|tool_call>call:a{"\\', '\\"', "<|tool_call_begin|>functions1"),
        *("<|tool_call_begin|>functions" + "1" * 9_999, "to=functions.a", "<|python_start|>{"),
        *("[TOOL_CALLS]a[ARGS]{}" + "b[ARGS]{}" * 30_000, "[ARGS]{}a", "```\n{"),
        '```\n{"name": "a", "arguments": {}}\n```\n',
        *(f"{MINIMAX}<a>", "<a>{", "</a>", "```tool_code\na(", "<|open|>call tool=", "<escape>"),
        *("<|tools_prefix|>[", "<function name=a>", "<invoke name=a><parameter name=", "[THINK]"),
        *("look(", "look(word='a')\n", "look('", "<look>", "<look><word>", "<look><word></look>"),
        *("<look><word>a</word></look>", "<leave/>", "<leave/>\n", "<look word=", "```\nlook("),
        *("```\nlook(word='a')\n```", "<code>\nlook(", "<code>\nleave()\n</code>\n"),
        *("functions.look(", "<tool_use>", "<tool_use><name>look</name>", "<tool_use><name>"),
        *("<invoke><tool_name>look", "<tool_use><name>look</name><input><a>", '{"tool_uses": ['),
        *("<look><word><word>", "<look><word></look>", "<function=a><parameter=b></function>"),
    ],
)  # fmt: skip
def test_a_long_hostile_text_is_read_once(unit):
    text = unit * max(1, 300_000 // len(unit))
    message, malformed = parse_message(text, TOOLS)  # a quadratic search takes minutes
    assert malformed <= 33
    assert len(message.content) <= len(text)


@pytest.mark.parametrize(
    "closing", ["</tools>", " </tools>", "</tools>a", "</tool_call>\n", "]", ")"]
)
@pytest.mark.parametrize("call", ["look(word='a')", '<tool_call>{"name": "look"', "```\nlook()\n"])
def test_100_000_closing_marks_around_a_call_are_read_once(call, closing):
    for text in (closing * 100_000 + f" {call}", f"{call}{closing * 100_000} x"):
        parse_tool_calls(text, TOOLS)  # a quadratic search takes minutes


@pytest.mark.parametrize(
    "start",
    ["look(", "look(word=", "<look ", "```\n", "<tool_use><name>", "<function=", "<tool_call>look"],
)
@pytest.mark.parametrize("unit", [" ", "a-", "a.", "a--", "\t\n"])
def test_a_call_of_100_000_signs_that_never_ends_is_read_once(start, unit):
    text = start + unit * (100_000 // len(unit)) + "!"
    assert not parse_message(text, TOOLS)[0].tool_calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "a", "arguments": {}}', "no closing"),
        ("<tool_call>", "no closing"),
        ("<tool_call>{name}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "must be a JSON object, got int"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ('<tool_call>{"name": 3}</tool_call>', '"name"'),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', '"arguments" must be'),
        ('<tool_call>{"name": "a", "arguments": "{"}</tool_call>', '"arguments" are not valid'),
        ('<tool_call>{"name": "a"} x</tool_call>', "has text between"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
        (
            mistral([ToolCall(name="a", arguments=json.loads('{"x":' * 120 + "1" + "}" * 120))]),
            "deep",
        ),
        (hermes([ToolCall(name="a", arguments={"x": "\ud800"})]), "lone surrogate"),
        ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "too large"),
        ('<tool_call>{"name": "a", "arguments": {"x": [1e400]}}</tool_call>', "too large"),
        ('<tool_call>{"name": "a", "name": "b"}</tool_call>', "a key twice"),
        ('<tool_call>{"name": "a", "arguments": {"x": 1, "x": 2}}</tool_call>', "a key twice"),
        ("<function=a>", "no closing </function>"),
        ("<function=a>stray</function>", "<parameter=KEY>"),
        ("<function=a><parameter=b>1</function>", "<parameter=KEY>"),
        ("[TOOL_CALLS][]", "empty"),
        ("[TOOL_CALLS][3]", "must be a JSON object"),
        ("[TOOL_CALLS]a", "[ARGS]"),
        ("<|python_tag|>print(1)", '"arguments"'),
        (f"<think>\nI could write {format_tool_call('leave', {})}", "</think>"),
    ],
)
def test_a_malformed_call_is_an_error_in_one_sentence_that_the_policy_reads(text, error):
    (call,) = parse_tool_calls(text)
    assert isinstance(call, ToolCallError)
    assert error in call.message
    assert "\n" not in call.message
    observation, info, _ = step(text)
    assert observation == f"Error: {call.message}"
    assert info == {"observation_role": "tool", "tool_errors": 1, "malformed_calls": 1}


PARTED = [text.rsplit("2", 1) for text in FORMATS.values()]


@pytest.mark.parametrize("family", FORMATS)
def test_sql_the_page_and_capture_read_the_calls_of_each_family_as_a_tool_env_does(family):
    text, tools = f"Let me look.\n{FORMATS[family]}", TOOLS
    call = {"name": "look", "arguments": {"word": "a", "times": 2}}
    assert calls_in_tool_env(text) == ([ToolCall(**call)], 0)

    class Query(SQLEnv):
        tools = TOOLS

    assert Query().parse_calls(Action(text)) == [ToolCall(**call)]
    asked = ResetInfo(messages=(Message(role="user", content="hi"),), tools=tools)
    turn = Turn(text=text, observation="hi", reward=0.0)
    for info, listed in ((asked, tools), (dataclasses.replace(asked, tools=()), ())):
        prompt = Prompt(messages=info.messages, tools=listed)
        (line,) = to_lines(episode(turn, prompt=prompt, reset=info))
        (*_, answer) = json.loads(line)["messages"]
        calls = parse_tool_calls(text, listed)
        shown = [{"name": c.name, "arguments": c.arguments} for c in calls]
        assert tool_calls(turn, listed) == shown
        assert shown == [call] or not listed
        assert answer["content"] == ("Let me look." if listed else text)
        assert [c["function"]["name"] for c in answer.get("tool_calls", ())] == ["look"] * len(
            listed[:1]
        )


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("cut", [True, False])
def test_a_malformed_call_of_each_family_is_an_error_for_the_policy_and_counted(family, cut):
    start, end = FORMATS[family].rsplit("2", 1)
    text = f"So:\n{start}" if cut else f"{start}(2{end}"
    observation, info, _ = step(text)
    assert observation.startswith("Error: ")
    assert (info["malformed_calls"], info["tool_errors"]) == (1, 1)
    assert read_action(text, TOOLS)[1] == to_reply(text, TOOLS)[1] == 1


@pytest.mark.parametrize(
    "text",
    [
        *(f"{start}(2{end}\n{start}2{end}" for start, end in PARTED if start[0] not in "{["),
        '[TOOL_CALLS] [{"name": look}]\n[TOOL_CALLS]look[ARGS]{"word": "a"}',
        '[TOOL_CALLS]look{"word": "b"}\n[TOOL_CALLS]look[ARGS]{"word": "a"}',
        '<|python_tag|>{"name": look}\n<|python_tag|>{"name": "look", "parameters": {"word": "a"}}',
        "<tool_call>look\n<arg_key>word</arg_key><arg_value>b</arg_value>\n<tool_call>look</tool_call>",
        '<|tool_call_begin|>call9<|tool_call_argument_begin|>{"word": "b"}<|tool_call_end|>'
        '<|tool_call_begin|>look:1<|tool_call_argument_begin|>{"word": "a"}<|tool_call_end|>',
    ],
)
def test_a_malformed_call_before_a_good_one_is_counted_and_not_lost(text):
    calls = parse_tool_calls(text, TOOLS)
    assert [getattr(call, "name", "") for call in calls] == ["", "look"]


MARKED = '<tool_call>{"name": "look", "arguments": {"word": "a"}}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        *(
            '<invoke>{"name": "look"',
            '<invoke>{"name": "look"}',
            '<invoke>{"name": "look"</invoke>',
        ),
        *("<tool_use><name>nope</name>", "<tool_use><name>look</name>"),
        *("<function=hello</function>", "<function=look</function>"),
        *("<invoke><tool_name>look</tool_name><parameters>", '<|python_tag|>{"name": "look"'),
    ],
)
def test_what_follows_a_malformed_call_is_read_and_both_are_counted(text):
    for line in ("", " so", "\n"):
        error, call = parse_tool_calls(f"{text}{line}\n{MARKED}", TOOLS)
        assert isinstance(error, ToolCallError)
        assert call == ToolCall(name="look", arguments=A)
    assert all(isinstance(call, ToolCallError) for call in parse_tool_calls(text, TOOLS))
    assert parse_message(text, TOOLS)[1] == 1


@pytest.mark.parametrize("count", [1, 31, 32, 33, 200])
@pytest.mark.parametrize(
    ("prose", "call"),
    [
        ("I write <tool_call> here. ", MARKED),
        ("The mark <|python_tag|> is not <function=. ", MARKED),
        ("[TOOL_CALLS] begins one.\n", '[TOOL_CALLS]look[ARGS]{"word": "a"}'),
        ("look(word) is a tool.\n", "look(word='a')"),
        ("The tag <look> is a tool.\n", "<look><word>a</word></look>"),
        ("Action: climb (high)\n", 'Action: look\nAction Input: {"word": "a"}'),
        ("```\nlook(word) is a tool\n```\n", "```\nlook(word='a')\n```"),
    ],
)
def test_prose_that_names_a_mark_often_hides_no_call(prose, call, count):
    assert parse_tool_calls(prose * count + call, TOOLS) == [ToolCall(name="look", arguments=A)]


def test_a_call_behind_more_malformed_ones_than_are_read_is_reported():
    text = "<tool_call>{" * 99_999
    *_, last = calls = parse_tool_calls(text + MARKED, TOOLS)
    assert len(calls) == 33
    assert last.message == (
        "the text has too many marks of tool calls without a call, its end is not read."
    )
    good = parse_tool_calls(MARKED * 2000, TOOLS)
    assert [call.name for call in good] == ["look"] * 2000


@pytest.mark.parametrize("unit", ["<tool_call>{ ", "<look>x "])
def test_the_log_says_once_that_the_end_of_a_text_is_not_read(unit, caplog):
    warn_of_unread.cache_clear()
    parse_tool_calls(unit * 33 + "</look>", TOOLS)
    assert caplog.text == ""  # a short text is read to its end
    for _ in range(2):
        parse_tool_calls(unit * (1_000_000 // len(unit)), TOOLS)
    assert caplog.text.count("its end was not read") == 1


A = {"word": "a"}
NESTED = {
    "word": {"type": "string"},
    "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
    "free": {},
    "pair": {"type": "array", "prefixItems": [STRING, INTEGER], "items": STRING},
    "old": {"type": "array", "items": [STRING, INTEGER]},
    "map": {"type": "object", "patternProperties": {"^n": INTEGER, "^a": {"type": "boolean"}}},
}
LINE = {"type": "object", "properties": {"id": {"type": "string"}, "n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("<word>\n1</word>", {"word": "\n1"}),
        ("<word>a<b>c</b></word>", {"word": f"a{MINIMAX}<b>c{MINIMAX}</b>"}),
        ("<lines></lines>", {"lines": []}),
        (
            "<lines><item><id>7</id><n>7</n></item><item><id></id></item></lines>",
            {"lines": [{"id": "7", "n": 7}, {"id": ""}]},
        ),
        ("<free><item>1</item><item>x</item></free>", {"free": [1, "x"]}),
        ("<pair><item>1</item><item>2</item><item>3</item></pair>", {"pair": ["1", 2, "3"]}),
        ("<old><item>1</item><item>2</item><item>3</item></old>", {"old": ["1", 2, 3]}),
        ("<map><a>true</a><n>2</n></map>", {"map": {"a": True, "n": 2}}),
        ("<free><a b>true</a b></free>", {"free": {"a b": True}}),
        ("<lines>x</lines>", "'lines' is 'x'; expected array"),
        ("<lines><item><n>x</n></item></lines>", "'lines' is 'x'; expected integer"),
        ("<word>1</word><word>2</word>", "'word' twice"),
        ("<word>1", "with elements in it"),
        ("<word>1</free>", "with elements in it"),
        ("<a>" * 100 + "</a>" * 100, "with elements in it"),
    ],
)
def test_elements_of_minimax_m3_nest_and_have_the_types_of_the_schema(body, arguments):
    tools = [a_tool("look", properties=NESTED, **{"$defs": {"line": LINE}})]
    tag = '<tool_call><invoke name="look">'
    text = f"{tag}{body}</invoke></tool_call>".replace("<", f"{MINIMAX}<")
    calls = parse_tool_calls(f"So: {text}", tools)
    if isinstance(arguments, str):
        assert [arguments in call.message for call in calls] == [True]
    else:
        assert calls == [ToolCall(name="look", arguments=arguments)]
        assert parse_tool_calls(f"{text}\n{text}", tools) == calls * 2


@pytest.mark.parametrize("value", FORMATS.values())
@pytest.mark.parametrize("before", ["", "So:\n", "So: "])
def test_a_call_without_a_mark_may_quote_any_call(value, before):
    call = ToolCall(name="look", arguments={"word": value})
    text = json.dumps({"name": "look", "parameters": call.arguments}, ensure_ascii=False)
    for action in (text, f"[look(word={value!r})]"):
        assert calls_in_tool_env(f"{before}{action}") == ([call], 0)


@pytest.mark.parametrize("family", FORMATS)
def test_an_action_that_is_cut_anywhere_makes_no_other_call(family):
    text = FORMATS[family]
    call = ToolCall(name="look", arguments={"word": "a", "times": 2})
    for end in range(len(text)):
        for before in ("", "So:\n", "So: "):
            calls = parse_tool_calls(f"{before}{text[:end]}", TOOLS)
            whole = [each for each in calls if isinstance(each, ToolCall)]
            assert whole in ([], [dataclasses.replace(call, id=each.id) for each in whole][:1])
            assert calls or end <= text.index("look") + len('look"')


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<|python_tag|>{"name": "look", "parameters": {}}\n{"name": look}', ["look", ""]),
        ('<tool_calls>[{"name": "look"}]\n{"name": </tool_calls>', ["look", ""]),
        ('{"tool_calls": [{"name": "look", "arguments": {}}]}', ["look"]),
        ('[{"name": "look", "id": "a"}, {"name": "leave", "id": "b"}]', ["look", "leave"]),
        (
            '[{"name": "look", "arguments": {}}]\n[{"name": "leave", "arguments": {}}]',
            ["look", "leave"],
        ),
        (
            '{"name": "look", "arguments": {}}, {"name": "leave", "arguments": {}}',
            ["look", "leave"],
        ),
        ('```json\n{"name": "look", "arguments": {}}\n```\n' * 2, ["look", "look"]),
        ('```json\n[{"name": "look", "arguments": {"word":', [""]),
        ("```python\n[look(word='a')]\n```\nThis is how.", []),
        (
            'Action: look\nAction Input: {"word": "a"}\nAction: leave\nAction Input: {}',
            ["look", "leave"],
        ),
        ("Action: look\nAction Input: amber", [""]),
        ('Action: look ({"word": "a"})', [""]),
        ('Action: climb {"word": "a"}', []),
        ("```tool_code\nprint(look(word='a'))\n```", [""]),
        ("Thought: I look.\nAction: look", [""]),
        ("\u273fFUNCTION\u273f: look", [""]),
        (
            '<tool_call>{"name": "look"}</tool_call>\nAction: leave\nAction Input: null',
            ["look", ""],
        ),
        ('Action: climb\nAction Input: {"word": "a"}', ["climb"]),
        ("Action: climb", []),
        ("Call functools.reduce, or <function_calls>, or ```tool_code.", []),
        ('[TOOL_CALLS][{"name": "look"}]\n[TOOL_CALLS][{"name": "leave"}]', ["look", "leave"]),
    ],
)
def test_several_calls_in_one_action_are_each_made_or_malformed(text, names):
    calls = parse_tool_calls(text, TOOLS)
    assert [getattr(call, "name", "") for call in calls] == names


@pytest.mark.parametrize("name", ["get-weather", "ns.get-weather", "a_dot_b"])
def test_a_name_that_is_none_in_python_can_be_called(name):
    for text in ("<|tool_call_start|>[{}(a.b=1)]<|tool_call_end|>", "[{}(a.b=1)]"):
        calls = parse_tool_calls(text.format(name), [a_tool(name)])
        assert calls == [ToolCall(name=name, arguments={"a.b": 1})]


QUOTED = [
    "a block ends with </parameter> here",
    "</function>",
    "</tool_call>",
    "</arg_value>, so",
    *(FORMATS[family] for family in ("Hermes, Qwen", "GLM", "Qwen3-Coder", "MiniMax", "MiniCPM 5")),
    f"<tool_call>\n{FORMATS['Qwen3-Coder']}\n</tool_call> is a call",
]


@pytest.mark.parametrize("value", QUOTED)
@pytest.mark.parametrize("family", ["Qwen3-Coder", "GLM", "Muse", "MiniMax", "MiniCPM 5"])
def test_a_text_argument_may_quote_the_tags_of_a_call(family, value):
    start, word, end = FORMATS[family].partition("a\n" if family == "Qwen3-Coder" else ">a<")
    text = f"{start}{word.replace('a', value)}{end}"
    call = ToolCall(name="look", arguments={"word": value, "times": 2})
    assert calls_in_tool_env(text) == ([call], 0)


@pytest.mark.parametrize("case", CASES["spellings"], ids=lambda case: case["text"][:40])
def test_spellings_that_models_use_beside_that_of_their_template_are_read(case):
    message, malformed = parse_message(case["text"], TOOLS)
    assert message.tool_calls == (ToolCall(name="look", arguments=case["arguments"]),)
    assert (re.sub("Action:|.*commentary[?]+", "", message.content), malformed) == ("", 0)


def test_a_list_in_python_is_calls_if_it_names_a_tool_and_prose_in_brackets_is_not():
    calls = parse_tool_calls("[look(word='a'), other(x=1)]", TOOLS)
    assert [call.name for call in calls] == ["look", "other"]
    for text in ("So: [look(word='a')]", 'So: {"name": "look", "parameters": {"word": "a"}}'):
        assert parse_tool_calls(text, TOOLS) == [ToolCall(name="look", arguments=A)]
        assert parse_message(text, TOOLS)[0].content == "So:"
        assert parse_message(f"{text} is how.", TOOLS) == as_text(f"{text} is how.")
    for text in ("[look](page)", "[looks(1)]", "I look(word='a')", "[other(x=1)]", "[1, look()"):
        assert parse_tool_calls(text, TOOLS) == []


def test_a_block_of_code_that_ends_a_text_is_a_call_if_it_names_a_tool():
    block = '```json\n{"name": "NAME", "arguments": {"word": "a"}}\n```'
    look, other = block.replace("NAME", "look"), block.replace("NAME", "Ada")
    message, malformed = parse_message(f"So:\n{look}", TOOLS)
    assert (message.content, len(message.tool_calls), malformed) == ("So:", 1, 0)
    for text in (other, f"{look} is how.", f"{other}\n{other}"):
        assert parse_message(text, TOOLS) == as_text(text)
    (error,) = parse_tool_calls(look.replace("}}", "}"), TOOLS)
    assert isinstance(error, ToolCallError)


def test_a_malformed_call_stays_text_and_is_counted():
    bad = '<tool_call>{"name": "f", "arguments": {"x": </tool_call>'
    good = format_tool_call("f", {"x": "</tool_call>"})
    message, malformed = parse_message(f"so {bad} and {good}")
    assert malformed == 1
    assert bad in message.content
    assert message.tool_calls == (ToolCall(name="f", arguments={"x": "</tool_call>"}),)
    cut, malformed = parse_message('<tool_call>{"name": "f"')
    assert (cut.content, cut.tool_calls, malformed) == ('<tool_call>{"name": "f"', (), 1)


def test_json_or_xml_that_is_an_answer_is_no_call():
    answer = '{"name": "Ada", "parameters": {}}'
    assert parse_message(answer, [a_tool("f")])[0].content == answer
    for text in ('<function name="g"></function>', '<invoke name="g">', "<function name="):
        assert parse_message(text, [a_tool("f")]) == as_text(text)
    for text in ('{"name": "Ada"}', '{"name": "f", "parameters": {}} is it', "{}"):
        assert parse_message(text) == as_text(text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>hm\n</think>\n\nyes", "hm", "yes"),
        ("In HTML-like text, </think> ends it.", None, "In HTML-like text, </think> ends it."),
        ("</think>", None, "</think>"),
        ("<think>\nit never en", "it never en", ""),
        ("the tag <think> and </think> in a text", None, "the tag <think> and </think> in a text"),
        *(
            (f"{start}{format_tool_call('f', {})}{end}no", format_tool_call("f", {}), "no")
            for start, end in [
                ("<think>", "</think>"),
                ("[THINK]", "[/THINK]"),
                ("<|channel>thought\n", "<channel|>"),
                ("<|channel|>analysis<|message|>", "<|end|>"),
                (" to=self<|message|>", "<|eom|>"),
                ("<|START_THINKING|>", "<|END_THINKING|>"),
                ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
                ("<|inner_prefix|>", "<|inner_suffix|>"),
                ("<think></think>\n\n<think>", "</think>"),
            ]
        ),
    ],
)
def test_reasoning_is_split_off_and_has_no_calls(text, reasoning, content):
    assert parse_message(text) == as_text(content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "malformed"),
    [
        ("hm\n</think>\n\nyes", "hm", "yes", 0, 0),
        ("hm", "hm", "", 0, 0),
        (f"hm</think>{format_tool_call('f', {})}", "hm", "", 1, 0),
        (f"so {format_tool_call('f', {})}", f"so {format_tool_call('f', {})}", "", 0, 1),
    ],
)
def test_reasoning_that_the_prompt_opens_ends_at_its_mark(
    text, reasoning, content, calls, malformed
):
    message, errors = parse_message(text, in_reasoning=True)
    assert (message.reasoning, message.content) == (reasoning, content)
    assert (len(message.tool_calls), errors) == (calls, malformed)


@pytest.mark.parametrize("before", ["<think>", ""])
def test_a_call_in_reasoning_that_nothing_follows_is_an_error_for_the_policy(before):
    text = f"{before}I look.\n{format_tool_call('leave', {})}\n</think>\n\n"
    (call,) = parse_tool_calls(text, in_reasoning=not before)
    assert "write it behind </think>" in call.message
    assert parse_message(text, in_reasoning=not before)[1] == 1
    assert not parse_tool_calls(f"{text}I don't.", in_reasoning=not before)


def test_a_call_behind_a_mark_of_reasoning_that_was_never_opened_is_made():
    text = f"{format_tool_call('leave', {})} The tag </think> ends it."
    assert calls_in_tool_env(text) == ([ToolCall(name="leave", arguments={})], 0)


LOOK_IN = ToolCall(name="look", arguments={"word": "stone"})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "look", "parameters": {"word": "stone"}}', None),
        (
            '{"type": "function", "function": {"name": "look", "arguments": {"word": "stone"}}}',
            None,
        ),
        ('[{"name": "look", "arguments": "{\\"word\\": \\"stone\\"}"}]', None),
        ('{"name": "look", "args": {"word": "stone"}}', "unknown key 'args'"),
        ('{"name": "look", "input": {"word": "stone"}}', "unknown key 'input'"),
        ('{"name": "look", "word": "stone"}', "unknown key 'word'"),
        ('{"tool": "look", "arguments": {}}', "unknown key 'tool'"),
        ('{"function": "look", "arguments": {}}', "unknown key 'function'"),
        ('{"action": "look", "action_input": {}}', "unknown key 'action"),
        ('{"name": "look", "arguments": {}, "parameters": {"word": "a"}}', "both"),
        ('{"name": "look", "arguments": {}, "x\\ny": 1}', "unknown key"),
    ],
)
@pytest.mark.parametrize("mark", ["<tool_call>{}</tool_call>", "{}"])
def test_a_call_with_a_key_that_is_not_read_is_malformed_and_never_made_without_it(
    text, error, mark
):
    action = mark.replace("{}", text)
    calls = parse_tool_calls(action, TOOLS)
    if error is None:
        assert calls_in_tool_env(action) == ([LOOK_IN], 0)
    else:
        assert error in calls[0].message
        assert calls_in_tool_env(action) == ([], 1)


@pytest.mark.parametrize("empty", ["null", '""', "{}"])
def test_a_call_without_arguments_has_an_empty_object(empty):
    text = f'<tool_call>{{"name": "leave", "arguments": {empty}}}</tool_call>'
    assert calls_in_tool_env(text) == ([ToolCall(name="leave", arguments={})], 0)


def test_calls_of_mistral_that_follow_one_another_need_one_mark():
    first = '[TOOL_CALLS]look[ARGS]{"word": "a"}'
    message, malformed = parse_message(f"{first}\nleave[ARGS]{{}} bye", TOOLS)
    assert [call.name for call in message.tool_calls] == ["look", "leave"]
    assert (message.content, malformed) == ("bye", 0)
    message, malformed = parse_message(f'{first}look[ARGS]{{"word"', TOOLS)
    assert (len(message.tool_calls), malformed) == (1, 1)


def test_mistral_gives_the_ids_of_its_calls():
    message, _ = parse_message('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"x": 1}')
    assert message.tool_calls == (ToolCall(name="f", arguments={"x": 1}, id="abc123def"),)


def strict(schema, kind="chat"):
    """The tools of a request with one strict tool, in each wire format."""
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
    conversation = {"input": hi} if kind == "responses" else {"messages": hi}
    return wire.read({"model": "m", **conversation, **body}, "id").tools


def sent_back(kind, reply):
    """The calls of a request that continues an answer as the wire format has written it."""
    request = Request(messages=(), tools=(), id="id")
    wire = {"chat": Chat, "messages": Messages, "responses": Responses}[kind]()
    answer, question = wire.write(request, reply), {"role": "user", "content": "hi"}
    body = {
        "chat": lambda: {"messages": [answer["choices"][0]["message"], question]},
        "messages": lambda: {
            "messages": [{"role": "assistant", "content": answer["content"]}, question],
            "max_tokens": 9,
        },
        "responses": lambda: {"input": [*answer["output"], question]},
    }[kind]()
    read = wire.read(parse_json(json.dumps({"model": "m", **body}).encode()), "id")
    return [call for message in read.messages for call in message.tool_calls]


DEEP = functools.reduce(lambda inner, _: {"x": inner}, range(89), 1)


@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("look up", {}), ("r\u00fcck", {}), ("a/b:0\n", {}), ("x" * 200, {}), ("look", DEEP)],
)
def test_an_answer_with_any_call_that_was_read_can_be_sent_back(kind, name, arguments):
    reply, malformed = to_reply(format_tool_call(name, arguments), TOOLS)
    named = tuple(dataclasses.replace(call, id="1") for call in reply.message.tool_calls)
    message = dataclasses.replace(reply.message, tool_calls=named)
    calls = sent_back(kind, dataclasses.replace(reply, message=message))
    assert (calls, malformed) == ([ToolCall(name=name, arguments=arguments, id="1")], 0)


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
        assert read_action(text, tools) == as_text(text, malformed=1)
        call = ToolCall(name="look", arguments=arguments)
        parsed = Message(role="assistant", content="", tool_calls=(call,))
        assert read_action(text, tools, parsed) == as_text(text, malformed=1)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"properties": {"a": {"enum": 3}}},
        {"properties": {"a": {"$ref": "https://127.0.0.1:1/x.json"}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"pattern": "(a+)+$"}}},
        {"patternProperties": {"(a+)+$": {}}},
        {"description": "x" * 2**17},
    ],
)
def test_the_schema_of_a_strict_tool_has_to_be_one_that_is_checked_in_bounded_time(schema):
    pytest.importorskip("jsonschema")
    with pytest.raises(RefusedError, match="schema of a strict tool"):
        strict(schema)


@pytest.mark.parametrize("doubled", [False, True])
def test_references_in_the_schema_of_a_strict_tool_that_never_end_fit_no_call(doubled):
    pytest.importorskip("jsonschema")
    twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**twice, "d40": {}}} if doubled else {"$ref": "#"}
    text = format_tool_call("look", {"key": 1})
    assert read_action(text, strict({"type": "object", **schema}))[1] == 1


def test_strict_without_the_package_is_refused_and_not_ignored(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(RefusedError, match="jsonschema"):
        strict({**KEY, "title": "one that no other test has checked"})


@pytest.mark.parametrize("family", FORMATS)
def test_sound_calls_repeat_no_mark(family):
    text = FORMATS[family]
    controls = re.findall(r"<[|\uff5c][^>]*[|\uff5c]>|\[[A-Z_]+\]|</?think>", text)
    turns = turn(text=f"{text}\n{text}"), turn(text=f"<think>a</think>{text}")
    group = Group(task=episode().task, episodes=(episode(*turns), episode(turns[1])))
    assert control_metrics([group], controls)["rollout/repeated_marks"] == 0


def test_control_tokens_and_repeated_marks_are_counted_without_failed_episodes():
    broken = turn(text="<tool_call><tool_call>{<|x|><|x|><|x|>", action_ids=tuple(range(10)))
    played = episode(turn(text="a"), broken), episode(turn(text="<|x|> b"), turn(text="c"))
    lost = episode(broken, reason=StopReason.ERROR, error="it broke")
    group = Group(task=lost.task, episodes=(*played, lost))
    metrics = control_metrics([group], ["<|x|>", "<|end|>"])
    assert metrics == {"rollout/control_tokens": 6 / 16, "rollout/repeated_marks": 3 / 4}
    assert not any(control_metrics([], []).values())
