"""Calls that nothing marks but the name of a tool: in Python, in blocks of code and in tags."""

import dataclasses

import pytest
from support.shop import TOOLS, as_text, step

from gspo_env.tools.arguments import ToolCallError
from gspo_env.tools.calls import parse_message, parse_tool_calls, read_action
from gspo_env.types import ToolCall
from gspo_envs.program.env import to_reply

LOOK = ToolCall(name="look", arguments={"word": "a"})
TWICE = ToolCall(name="look", arguments={"word": "a", "times": 2})
LEAVE = ToolCall(name="leave", arguments={})
CLIMB = ToolCall(name="climb", arguments={})
USES = '{"tool_uses": [%s]}'
USE = '{"recipient_name": "functions.look", "parameters": {"word": "a"}}'


TEXTS = [
    *("Use look(word='a') to look a word up.", "look(word='a') looks a word up."),
    *("I look(word='a')", "The function is `look(word='a')`.", "look(word, times) is a function"),
    *("look (inside)", "looks(word='a')", "outlook(word='a')"),
    "```python\nlook(word='a')\n```\nThis is how.",
    "```python\nx = look(word='a')\nprint(x)\n```",
    "```python\nfor word in 'ab':\n    look(word=word)\n```",
    "So:\n```python\nfrom shop import look\n\nlook(word='a')\n```",
    *("def look(word):\n    return word", "from shop import look\n\nlook(word='a')"),
    *("import shop\nshop.look(word='a')", "x = {\n    1: 2,\n}\nlook(word='a')"),
    *('"""\nLooks.\n"""\nlook(word="a")', "class Shop:\n    look(word='a')"),
    *("```\nThe code:\nlook(word='a')", "x = look(word='a')", "print(look(word='a'))"),
    *("other(word='a')", "<p>Use <code>look(word='a')</code>.</p>"),
    *("Use <code>look(word='a')</code>", "<pre><code>\nlook(word='a')\n</code></pre>"),
    *("<code>\nprint(1)\n</code>", "Code:\n```py\nprint(1)\n```<end_code>", "<look>"),
    *("The tag <look> is a tag.", "Write <look><word>a</word></look> to look a word up."),
    *("The tag is <look></look>", "- <look>amber</look> is bad", "<look>amber</look> is bad"),
    *("<ul>\n<li>a</li>\n<look>b</look>\n</ul>", "<div>\n<p>a</p>\n<look>b</look>"),
    *("<search>\n<form action='x'><input></form>\n</search>", "<looking><word>a</word></looking>"),
    *("</look>", "A <lookup> and a </look>.", "The tag <tool_use> has a <name>.", "<tool_use>"),
    *("<invoke> or <use_mcp_tool>", '{"tool_uses": 3}', '{"tool_uses": []}'),
    *(f"{USES % USE} is how.", "The signature is:\n\nlook(word, times=1)"),
    "<html><body><look><word>a</word></look></body></html>",
    "Ask Ada: look(word=...) is what she likes",
    *("Ask Ada: look(word='a')", "- look(word='a')\n- leave()", "* look(word='a') looks a word up"),
    *("You can:\n- look(word='a')", "A call: look(word='a')", "Call look(word='a') to look."),
    '{"name": "look", "arguments": {"word": "a"}} is how.',
    'So:\n{"name": "look", "arguments": {"word": "a"}}\nis how.',
    '{"name": "Ada", "arguments": {"word": "a"}}\nThis is Ada.',
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_only_mentions_a_tool_is_text(text):
    assert parse_message(text, TOOLS) == as_text(text)
    assert parse_tool_calls(text) == []


CALLS = [
    (USES % USE, [LOOK]),
    (USES % f"{USE}, {USE}", [LOOK, LOOK]),
    (USES % USE.replace("functions.", ""), [LOOK]),
    (USE, [LOOK]),
    ("```json\n%s\n```" % (USES % USE), [LOOK]),
    ('{"tool_calls": [{"name": "climb", "arguments": {}}]}', [CLIMB]),
    (f"multi_tool_use.parallel({USES % USE})", [LOOK]),
    ('[TOOL_REQUEST]{"name": "look", "arguments": {"word": "a"}}[END_TOOL_REQUEST]', [LOOK]),
    ('{"role": "assistant", "content": null, "tool_calls": [{"name": "leave"}]}', [LEAVE]),
    ("look(word='a')", [LOOK]),
    ("look(word='a');", [LOOK]),
    ('look(word = "a", times = 2)', [TWICE]),
    ("look(\n    word='a',\n)", [LOOK]),
    ("look(word='a')\nlook(word='a', times=2)", [LOOK, TWICE]),
    ("look(word='a')\nleave()", [LOOK, LEAVE]),
    ("leave()", [LEAVE]),
    ("functions.look(word='a')", [LOOK]),
    ("`look(word='a')`", [LOOK]),
    ("look(word='a')\nclimb(n=1)", [LOOK, ToolCall(name="climb", arguments={"n": 1})]),
    ("```python\nlook(word='a')\n```", [LOOK]),
    ("```py\nlook(word='a')\nleave()\n```", [LOOK, LEAVE]),
    ("<code>\nlook(word='a')\n</code>", [LOOK]),
    ("<code>look(word='a')</code>", [LOOK]),
    ("<code>\nx = look(word='a')\nprint(x)\n</code>", [LOOK]),
    ("<code>\n# once\nprint(look(word='a'))\n", [LOOK]),
    ("Code:\n```py\nx = look(word='a')\nprint(x)\n```<end_code>", [LOOK]),
    ("Code:\n```py\nlook(word='a')\n```<end_code>", [LOOK]),
    ("Code:\n```python\nx: str = look(word='a')\n```", [LOOK]),
    ("<look><word>a</word></look>", [LOOK]),
    ("<look>\n<word>a</word>\n<times>2</times>\n</look>", [TWICE]),
    ("<look>\n<word>\na\n</word>\n</look>", [LOOK]),
    ("<look><word>a</word></look>\n<leave></leave>", [LOOK, LEAVE]),
    ("<tools><look><word>a</word></look></tools>", [LOOK]),
    ("```python\nlook(word='a')\n</code>", [LOOK]),
    ("<leave/>", [LEAVE]),
    ("<leave />", [LEAVE]),
    ("```xml\n<look>\n<word>a</word>\n</look>\n```", [LOOK]),
    ("<search>\n<query>a</query>\n</search>", [ToolCall(name="search", arguments={"query": "a"})]),
    (
        "<look><word>the tags <word></word> and </look></word></look>",
        [ToolCall(name="look", arguments={"word": "the tags <word></word> and </look>"})],
    ),
    ('<tool_use><name>look</name><arguments>{"word": "a"}</arguments></tool_use>', [LOOK]),
    (
        '<tool_use>\n  <name>look</name>\n  <arguments>\n{"word": "a"}\n</arguments>\n</tool_use>',
        [LOOK],
    ),
    (
        '<tool_use><name>look</name><arguments>{"word": "</arguments>"}</arguments></tool_use>',
        [ToolCall(name="look", arguments={"word": "</arguments>"})],
    ),
    ("<tool_use><name>leave</name></tool_use>", [LEAVE]),
    ("<tool_use><name>leave</name><arguments></arguments></tool_use>", [LEAVE]),
    ("<tool_use><name>climb</name></tool_use>", [CLIMB]),
    ('<tool_use>{"name": "look", "arguments": {"word": "a"}}</tool_use>', [LOOK]),
    (
        "<tool_use><tool_name>look</tool_name><parameters><word>a</word><times>2</times>"
        "</parameters></tool_use>",
        [TWICE],
    ),
    (
        "<function_calls>\n<invoke>\n<tool_name>look</tool_name>\n<parameters>\n<word>a</word>\n"
        "</parameters>\n</invoke>\n</function_calls>",
        [LOOK],
    ),
    (
        "<use_mcp_tool>\n<server_name>shop</server_name>\n<tool_name>look</tool_name>\n<arguments>"
        '\n{"word": "a"}\n</arguments>\n</use_mcp_tool>',
        [LOOK],
    ),
    ('<tool_call><name>look</name><arguments>{"word": "a"}</arguments></tool_call>', [LOOK]),
]


@pytest.mark.parametrize("before", ["", "I look.\n\n", "<think>look(word='b')</think>\n"])
@pytest.mark.parametrize(("text", "calls"), CALLS)
def test_a_call_that_can_mean_nothing_else_is_made(text, calls, before):
    message, malformed = parse_message(before + text, TOOLS)
    assert (list(message.tool_calls), malformed) == (calls, 0)
    assert message.content == ("I look." if "I" in before else "")
    assert read_action(before + text, TOOLS) == (message, 0)
    assert to_reply(before + text, TOOLS)[0].message.tool_calls == message.tool_calls


FAULTS = [
    *("look('a')", "look('a', times=2)", "look({'word': 'a'})", "look(word=word)"),
    *("look(word='a'", "look(word='a", "look(", "look(word=", "look('a"),
    "look(word='a', word='b')",
    *("```python\nlook('a')\n```", "```py\nlook(word='a'"),
    "<code>\nlook('a')\n</code>",
    "<code>\nfor word in 'ab':\n    print(look(word=word))\n</code>",
    "<code>\nx = look(word='a')\nfinal_answer(x + 1)\n</code>",
    "<code>\nlook(word='a",
    "Code:\n```py\nx = look('a')\n```<end_code>",
    "Code:\n```py\nx = look(word='a",
    "<search>what</search>",
    '[TOOL_CALL] {"tool": "look", "args": {"word": "a"}} [/TOOL_CALL]',
    *("look(word: 'a')", "{'name': 'look', 'arguments': {'word': 'a'}}", '{name: "look"}'),
    '<toolcall><look>{"word": "a"}</look></toolcall>',
    "<look>\n<parameter=word>\na\n</parameter>\n</function>",
    '<tool_use><name>look</name><args>{"word": "a"}</args></tool_use>',
    *("<look>amber</look>", "<look><what>a</what></look>", "<look word='a'></look>"),
    *("<look word='a'/>", "<look><word>a", "<look><wo", "<look>\n<word>a</word>"),
    "<look><word>a</look>",
    "<look><word>a</word><times>two</times></look>",
    "<look><word>a</word><word>b</word></look>",
    "<look><word>a</word><what>b</what></look>",
    *("<tool_use><name>look</name><arguments>", '<tool_use><name>look</name><arguments>{"word":'),
    '<tool_use><name>look</name><arguments>{"word": "a"}</tool_use>',
    "<tool_use>look</tool_use>",
    '<tool_use><name>look</name><arguments>{"word": a}</arguments></tool_use>',
    '<tool_use><name>look</name><input>{"word": "a"}</input><more>1</more></tool_use>',
    '{"tool_uses": [{"recipient_name": "functions.look", "parameters": {"word":',
    '{"tool_uses": [{"recipient_name": "functions.look", "word": "a"}]}',
    '{"tool_calls": [{"name": "look", "arguments": {"word":',
]  # fmt: skip


@pytest.mark.parametrize("before", ["", "I look.\n"])
@pytest.mark.parametrize("text", FAULTS)
def test_a_call_that_cannot_be_read_is_an_error_for_the_policy_and_counted(text, before):
    calls = parse_tool_calls(before + text, TOOLS)
    assert [type(call) for call in calls] == [ToolCallError]
    observation, info, _ = step(before + text)
    assert observation == f"Error: {calls[0].message}"
    assert info["malformed_calls"] == 1
    assert read_action(before + text, TOOLS) == as_text(before + text, malformed=1)


BESIDE = [
    *("- look(word='a')", "1. look(word='a')", "**look(word='a')**", "**`look(word='a')`**"),
    *("Call: look(word='a')", "Tool call: look(word='a')", ">>> look(word='a')"),
    *("await look(word='a')", "return look(word='a')", "call leave()"),
    *(
        "look(word='a')\nThis looks it up.",
        "look(word='a')  \nThis looks it up.",
        "\n\nlook(word='a')\n\nI wait for the word.",
    ),
    '{"name": "look", "arguments": {"word": "a"}}\nThis looks it up.',
    '[{"name": "look", "arguments": {"word": "a"}}]\n\nI wait for the word.',
    '{"name": "leave", "arguments": {}}\n{"name": "look", "arguments": {"word": "a"}}\nI wait.',
]


@pytest.mark.parametrize("text", BESIDE)
def test_a_call_with_decoration_or_with_text_behind_it_is_counted(text):
    (call,) = parse_tool_calls(text, TOOLS)
    assert isinstance(call, ToolCallError)
    assert step(text)[1]["malformed_calls"] == 1
    assert read_action(text, TOOLS) == as_text(text, malformed=1)


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
