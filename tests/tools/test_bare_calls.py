"""Calls that nothing marks but the name of a tool: in Python, in blocks of code and in tags."""

import dataclasses

import pytest
from support.shop import TOOLS, as_text, step
from support.tool_cases import CASES

from gspo_env.tools.calls import parse_message, parse_tool_calls
from gspo_env.tools.json_calls import ToolCallError
from gspo_env.tools.request import read_action
from gspo_env.types import ToolCall
from gspo_envs.program.env import to_reply

LOOK = ToolCall(name="look", arguments={"word": "a"})
LEAVE = ToolCall(name="leave", arguments={})


@pytest.mark.parametrize("text", CASES["texts"])
def test_a_text_that_only_mentions_a_tool_is_text(text):
    assert parse_message(text, TOOLS) == as_text(text)
    assert parse_tool_calls(text) == []


@pytest.mark.parametrize("before", ["", "I look.\n\n", "<think>look(word='b')</think>\n"])
@pytest.mark.parametrize("case", CASES["bare"], ids=lambda case: case["text"][:40])
def test_a_call_that_can_mean_nothing_else_is_made(case, before):
    text, calls = case["text"], [ToolCall(**call) for call in case["calls"]]
    message, malformed = parse_message(before + text, TOOLS)
    assert (list(message.tool_calls), malformed) == (calls, 0)
    assert message.content == ("I look." if "I" in before else "")
    assert read_action(before + text, TOOLS) == (message, 0)
    assert to_reply(before + text, TOOLS)[0].message.tool_calls == message.tool_calls


@pytest.mark.parametrize("before", ["", "I look.\n"])
@pytest.mark.parametrize("text", CASES["malformed"])
def test_a_call_that_cannot_be_read_is_an_error_for_the_policy_and_counted(text, before):
    calls = parse_tool_calls(before + text, TOOLS)
    assert [type(call) for call in calls] == [ToolCallError]
    observation, info, _ = step(before + text)
    assert observation == f"Error: {calls[0].message}"
    assert info["malformed_calls"] == 1
    assert read_action(before + text, TOOLS) == as_text(before + text, malformed=1)


@pytest.mark.parametrize("text", CASES["decorated"])
def test_a_call_with_decoration_or_with_text_behind_it_is_counted(text):
    (call,) = parse_tool_calls(text, TOOLS)
    assert isinstance(call, ToolCallError)
    assert step(text)[1]["malformed_calls"] == 1
    assert read_action(text, TOOLS) == as_text(text, malformed=1)


@pytest.mark.parametrize(
    "before",
    ['{"name": "x"} is it.', "[1, 2] are it.", '{"a": 1}\nSo I look:', '{"a": 1} {"b": 2}, so'],
)
@pytest.mark.parametrize(
    "call", ['{"name": "leave", "arguments": {}}', '[{"name": "leave", "arguments": {}}]']
)
def test_a_sentence_that_begins_with_json_hides_no_call_after_it(before, call):
    message, malformed = parse_message(f"{before}\n{call}", TOOLS)
    assert (message.tool_calls, message.content, malformed) == ((LEAVE,), before, 0)
    assert parse_message(f"{before}\n{call} or so.", TOOLS)[0].tool_calls == ()


MARKED = '<tool_call>{"name": "look", "arguments": {"word": "a"}}</tool_call>'
BARE = [
    "leave()",
    "<leave></leave>",
    '{"name": "leave", "arguments": {}}',
    "[leave()]",
    "<code>\nleave()\n</code>",
]


@pytest.mark.parametrize("bare", BARE)
def test_a_call_without_a_mark_beside_one_with_a_mark_is_counted_and_not_lost(bare):
    for text in (f"{bare}\n{MARKED}", f"{MARKED}\n{bare}"):
        first, error = parse_tool_calls(text, TOOLS)
        assert first == LOOK
        assert error.message == "the call of 'leave' needs the mark that the others have."
    said = bare.replace("leave()", "look(word='a')").replace("leave", "look")
    said = said.replace("{}", '{"word": "a"}').replace("><", "><word>a</word><")
    message, malformed = parse_message(f"{said}\n{MARKED}", TOOLS)
    assert (message.content, message.tool_calls, malformed) == (said, (LOOK,), 0)
    text = f"I could look.\n{MARKED}\nThe tag <look> and look() are not calls."
    assert parse_message(text, TOOLS)[1] == 0


@pytest.mark.parametrize("bare", BARE)
def test_a_call_without_a_mark_in_reasoning_that_nothing_follows_is_an_error(bare):
    for text in (f"<think>I leave.\n{bare}\n</think>\n", f"<think>I leave.\n{bare}"):
        (error,) = parse_tool_calls(text, TOOLS)
        assert "in the reasoning" in error.message
    assert parse_tool_calls(f"<think>I leave.\n{bare}</think>No.", TOOLS) == []
    assert parse_tool_calls("<think>I could call leave() or not.", TOOLS) == []


def test_a_block_of_code_before_the_last_is_counted_and_not_lost():
    block = "Thought: so.\nCode:\n```py\n{}\n```\n<end_code>\n"
    text = block.format("look(word='a')") + block.format("leave()")
    error, call = parse_tool_calls(text, TOOLS)
    assert (error.message, call) == ("a block of code before the last is not run.", LEAVE)


@pytest.mark.parametrize(
    "text",
    ['<a class="x" href="#">this</a>', "<a>this</a>", "<a/>", "<a></a>", "<p>x</p>\n<a>y</a>"],
)
def test_html_is_text_if_a_tool_has_the_name_of_an_element(text):
    tools = [dataclasses.replace(TOOLS[0], name="a", parameters={"properties": {"href": {}}})]
    assert parse_message(text, tools) == as_text(text)
    call = ToolCall(name="a", arguments={"href": "x"})
    assert parse_tool_calls("<a><href>x</href></a>", tools) == [call]
