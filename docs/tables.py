"""Tables of the documentation that are written from the code.

    python docs/tables.py    # rewrites them

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A test compares the pages with the
code.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import runpy
from collections.abc import Callable
from pathlib import Path

from gspo_env.chat import ChatTokenizer
from gspo_env.episodes import schema
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.formats import FORMATS as MARKS
from gspo_env.tools.tool import as_tool, tool
from gspo_env.types import ResetInfo, StepInfo, ToolCall

FOLDER = Path(__file__).parent
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def field_texts(cls: type) -> dict[str, str]:
    """Returns the documentation of each field of a class: the string below it."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    texts = {}
    for field, text in itertools.pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def info_keys(cls: type) -> list[str]:
    """Returns the rows of the keys of `info`."""
    texts = {name: text for name, text in field_texts(cls).items() if name != "extra"}
    return ["| key | meaning |", "|---|---|", *(f"| `{k}` | {v} |" for k, v in texts.items())]


def episode_columns() -> list[str]:
    """Returns the rows of the columns of kept episodes."""
    texts = field_texts(schema.EpisodeRecord) | field_texts(schema.TurnRecord)
    rows = [f"| `{f.name}` | {f.type} | {texts[f.name]} |" for f in schema.schema()]
    return ["| column | type | meaning |", "|---|---|---|", *rows]


def rules() -> list[str]:
    """Returns the rows of the rules of `gspo-env diagnose`."""
    from gspo_env.health.rules import RULES

    rows = [f"| `{r.name}` | {first_line(r.check)} | {r.limit:g} |" for r in RULES]
    return ["| rule | finds | threshold |", "|---|---|---|", *rows]


@tool
def look(word: str, times: int = 1) -> str:
    """Look a word up."""
    return word * times


_ARGUMENTS = '{"word": "a", "times": 2}'
_OBJECT = f'{{"name": "look", "arguments": {_ARGUMENTS}}}'
_LLAMA = f'{{"name": "look", "parameters": {_ARGUMENTS}}}'
_PYTHON = "look(word='a', times=2)"


def first_line(function: Callable[..., object]) -> str:
    """Returns the first line of a function's docstring, without its full stop."""
    return (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")


TOOL = as_tool(look)
CALL = ToolCall(name="look", arguments={"word": "a", "times": 2})
JSON, TYPED, LITERAL = "JSON", "text, typed by the schema", "Python literals"
MARKED = "text, typed by the call"
_DSML = (
    '<\uff5cDSML\uff5cinvoke name="look">\n'
    '<\uff5cDSML\uff5cparameter name="word" string="true">a</\uff5cDSML\uff5cparameter>\n'
    '<\uff5cDSML\uff5cparameter name="times" string="false">2</\uff5cDSML\uff5cparameter>\n'
    "</\uff5cDSML\uff5cinvoke>"
)
_NAMESPACE = "]<]minimax[>["
FORMATS = {
    "Hermes, Qwen": (JSON, "qwen3", f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    "GLM": (
        TYPED,
        "glm4",
        "<tool_call>look\n<arg_key>word</arg_key>\n<arg_value>a</arg_value>\n"
        "<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "Qwen3-Coder": (
        TYPED,
        "qwen3_coder",
        "<function=look>\n<parameter=word>\na\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
        "</function>",
    ),
    "Muse": (
        TYPED,
        "",
        '<atem:invoke name="look"><atem:parameter name="word">a</atem:parameter>'
        '<atem:parameter name="times">2</atem:parameter></atem:invoke>',
    ),
    "MiniMax": (
        TYPED,
        "",
        '<invoke name="look">\n<parameter name="word">a</parameter>\n'
        '<parameter name="times">2</parameter>\n</invoke>',
    ),
    "MiniMax M3": (
        TYPED,
        "",
        f'{_NAMESPACE}<tool_call>\n{_NAMESPACE}<invoke name="look">{_NAMESPACE}<word>a{_NAMESPACE}'
        f"</word>{_NAMESPACE}<times>2{_NAMESPACE}</times>{_NAMESPACE}</invoke>\n{_NAMESPACE}"
        "</tool_call>",
    ),
    "Step 3": (
        TYPED,
        "",
        '<steptml:invoke name="look"><steptml:parameter name="word">a</steptml:parameter>'
        '<steptml:parameter name="times">2</steptml:parameter></steptml:invoke>',
    ),
    "K2 Horizon": (
        TYPED,
        "",
        "<ifm|tool_call>look<ifm|arg_key>word</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
        "<ifm|arg_value>a</ifm|arg_value><ifm|arg_key>times</ifm|arg_key><ifm|arg_type>integer"
        "</ifm|arg_type><ifm|arg_value>2</ifm|arg_value></ifm|tool_call>",
    ),
    "DeepSeek 3.2, 4": (MARKED, "", _DSML),
    "DeepSeek 4.1": (MARKED, "", re.sub("\uff5c(?=[ip])", "\uff5c ", _DSML)),
    "Kimi K3": (
        MARKED,
        "",
        '<|open|>call tool="look" index="1"<|sep|><|open|>argument key="word" type="string"<|sep|>a'
        '<|close|>argument<|sep|><|open|>argument key="times" type="number"<|sep|>2'
        "<|close|>argument<|sep|><|close|>call<|sep|>",
    ),
    "MiniCPM 5": (
        TYPED,
        "",
        '<function name="look"><param name="word">a</param><param name="times">2</param>'
        "</function>",
    ),
    "Apertus": (JSON, "", f'<|tools_prefix|>[{{"look": {_ARGUMENTS}}}]<|tools_suffix|>'),
    "Llama 3": (JSON, "llama3", _LLAMA),
    "Llama 3, tagged": (JSON, "llama3", f"<|python_tag|>{_LLAMA}"),
    "Llama 3, Python": (LITERAL, "llama3", f"[{_PYTHON}]"),
    "Llama 4": (LITERAL, "", f"<|python_start|>[{_PYTHON}]<|python_end|>"),
    "LFM2": (LITERAL, "", f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>"),
    "Mistral, older": (JSON, "mistral", f"[TOOL_CALLS][{_OBJECT}]"),
    "Mistral": (JSON, "mistral", f"[TOOL_CALLS]look[ARGS]{_ARGUMENTS}"),
    "Granite, Phi-4-mini": (JSON, "granite", f"<|tool_call|>[{_OBJECT}]<|/tool_call|>"),
    "DeepSeek": (
        JSON,
        "deepseek",
        f"<\uff5ctool\u2581call\u2581begin\uff5c>look<\uff5ctool\u2581sep\uff5c>{_ARGUMENTS}"
        "<\uff5ctool\u2581call\u2581end\uff5c>",
    ),
    "Solar": (
        JSON,
        "",
        f"<|tool_call:begin|>a1<|tool_call:name|>look<|tool_call:args|>{_ARGUMENTS}"
        "<|tool_call:end|>",
    ),
    "Kimi": (
        JSON,
        "",
        f"<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{_ARGUMENTS}"
        "<|tool_call_end|>",
    ),
    "gpt-oss": (
        JSON,
        "harmony",
        f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
    ),
    "Gemma 4": (JSON, "", '<|tool_call>call:look{word:<|"|>a<|"|>,times:2}<tool_call|>'),
    "FunctionGemma": (
        JSON,
        "",
        "<start_function_call>call:look{word:<escape>a<escape>,times:2}<end_function_call>",
    ),
    "Gemma 3": (LITERAL, "", f"```tool_code\n{_PYTHON}\n```"),
    "Olmo 3": (LITERAL, "", f"<function_calls>{_PYTHON}</function_calls>"),
    "Command": (
        JSON,
        "",
        f'<|START_ACTION|>[{{"tool_name": "look", "parameters": {_ARGUMENTS}}}]<|END_ACTION|>',
    ),
    "Hunyuan, Jamba": (JSON, "", f"<tool_calls>[{_OBJECT}]</tool_calls>"),
    "Nemotron Nano 2": (JSON, "", f"<TOOLCALL>[{_OBJECT}]</TOOLCALL>"),
    "LongCat": (JSON, "", f"<longcat_tool_call>{_OBJECT}</longcat_tool_call>"),
    "InternLM": (JSON, "", f"<|action_start|><|plugin|>{_OBJECT}<|action_end|>"),
    "PLaMo 3": (
        JSON,
        "",
        "<|plamo:begin_tool_name:plamo|>look<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
        f"{_ARGUMENTS}<|plamo:end_tool_arguments:plamo|>",
    ),
    "ReAct": (JSON, "", f"Action: look\nAction Input: {_ARGUMENTS}"),
    "OpenAI, parallel": (
        JSON,
        "",
        f'{{"tool_uses": [{{"recipient_name": "functions.look", "parameters": {_ARGUMENTS}}}]}}',
    ),
    "LM Studio": (JSON, "", f"[TOOL_REQUEST]{_OBJECT}[END_TOOL_REQUEST]"),
    "MiniMax M2, prompted": (JSON, "", f"[TOOL_CALL]{_OBJECT}[/TOOL_CALL]"),
    "Cherry Studio": (
        JSON,
        "",
        f"<tool_use><name>look</name><arguments>{_ARGUMENTS}</arguments></tool_use>",
    ),
    "Claude 2": (
        TYPED,
        "",
        "<invoke>\n<tool_name>look</tool_name>\n<parameters>\n<word>a</word>\n<times>2</times>\n"
        "</parameters>\n</invoke>",
    ),
    "Cline, MCP": (
        JSON,
        "",
        "<use_mcp_tool>\n<server_name>s</server_name>\n<tool_name>look</tool_name>\n"
        f"<arguments>{_ARGUMENTS}</arguments>\n</use_mcp_tool>",
    ),
    "Cline, Roo Code": (TYPED, "", "<look><word>a</word><times>2</times></look>"),
    "smolagents": (LITERAL, "", f"<code>\n{_PYTHON}\n</code>"),
    "GigaChat": (JSON, "", f"<|function_call|>{_OBJECT}"),
    "Granite 20B": (JSON, "", f"<function_call>{_OBJECT}"),
    "Phi-4-mini, functools": (JSON, "", f"functools[{_OBJECT}]"),
}
"""The form of each family's arguments, its tokenizer in the tests, and `CALL` as it writes it."""


def formats() -> list[str]:
    """Returns the rows of the formats of tool calls, each of which is read as `CALL`."""
    families = runpy.run_path(str(FOLDER.parent / "tests/support/chat_families.py"))["FAMILIES"]
    rows, marks = [], set()
    for family, (arguments, tokenizer, text) in FORMATS.items():
        assert parse_tool_calls(text, [TOOL]) == [CALL], family
        marks |= {mark for mark in MARKS if mark in text}
        chat = ChatTokenizer(families[tokenizer]()) if tokenizer else None
        stops = [] if chat is None else [code(chat.decode_all([i])) for i in chat.stop_ids]
        rows.append(f"| {family} | {code(text)} | {arguments} | {' '.join(stops)} |")
    assert marks == set(MARKS), set(MARKS) - marks
    return ["| family | a call | arguments | stops |", "|---|---|---|---|", *rows]


def code(text: str) -> str:
    """Returns a text as code in a table."""
    return f"`{text.replace('|', chr(92) + '|').replace(chr(10), '↵')}`"


TABLES: dict[str, Callable[[], list[str]]] = {
    "reset": lambda: info_keys(ResetInfo),
    "step": lambda: info_keys(StepInfo),
    "columns": episode_columns,
    "rules": rules,
    "formats": formats,
}


def filled(page: str) -> str:
    """Returns a page with its tables as the code has them."""
    return TABLE.sub(lambda m: "\n".join([m[1].rstrip(), "", *TABLES[m[2]](), "", m[3]]), page)


if __name__ == "__main__":
    for path in FOLDER.glob("*.md"):
        path.write_text(filled(path.read_text()))
