"""The marks that begin tool calls, and what shows that a text may have calls without one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gspo_env.tools.json_calls import Schemas

SPACE = r"(?:\w{1,16}:|[ |\uff5c\u2016]{0,5}DSML[ |\uff5c\u2016]{0,5})"
"""What precedes the names of XML tags: a namespace, or DSML in any bars."""
MINIMAX = "]<]minimax[>["
_LIST = (
    rf"(?:\w+:|dots_|ifm\|)?(?:tool|function)_calls?>"
    rf"|{SPACE} ?\w{{0,16}}(?:calls|_use)[|\uff5c]?>?"
)
_OPENINGS = re.compile(
    rf"(?:\s*(?:<(?:{_LIST})"
    r"|<[|\uff5c]tool[_\u2581]calls?(?:_section)?(?:[_\u2581]begin)?[|\uff5c]>(?:function<\uff5ctool_sep\uff5c>)?|<\|plamo:begin_tool_requests?:plamo\|>"
    r"|<\|open\|>tools<\|sep\|>|<\|channel\|>(?:commentary|analysis)|<\|start\|>assistant))+\s*\Z"
)
"""Marks before the first call that belong to none."""
_CLOSING = (
    rf"(?:\s*(?:</(?:{_LIST})|<[|\uff5c]tool[_\u2581]calls?(?:_section)?[_\u2581]end[|\uff5c]>"
    r"|<\|plamo:end_tool_requests?:plamo\|>|<\|close\|>(?:tools|message)<\|sep\|>|<\|/tool_call\|>"
    r"|<\|tool_response>|<tool_call\|>|<\|(?:calls|eom_id|eot_id|eom)\|>))"
)
_CLOSINGS, _CLOSINGS_AT_END = re.compile(f"{_CLOSING}*"), re.compile(rf"{_CLOSING}+\s*\Z")
"""Marks behind a call that belong to none."""
_LONGEST_MARKS = 256
"""Characters at the end of a text in which such marks are removed."""
MARKS: Mapping[str, tuple[str, str]] = {
    "<tool_call>": ("</tool_call>", "hermes"),
    "<ifm|tool_call>": ("</ifm|tool_call>", "ifm"),
    "<function=": ("</function>", "function"),
    "<|open|>call tool=": ("<|close|>call<|sep|>", "kimi 3"),
    "<invoke name=": ("</invoke>", "invoke"),
    "<function name=": ("</function>", "minicpm"),
    f"{MINIMAX}<tool_call>": (f"{MINIMAX}</tool_call>", "minimax"),
    "<tool_use>": ("</tool_use>", "described"),
    "<use_mcp_tool>": ("</use_mcp_tool>", "described"),
    "<invoke>": ("</invoke>", "described"),
    "[TOOL_CALLS]": ("", "mistral"),
    "<|tool_call|>": ("", "mistral"),
    "<|python_tag|>": ("", "json"),
    "<|function_call|>": ("", "json"),
    "<function_call>": ("</function_call>", "json"),
    "<tool_calls>": ("</tool_calls>", "json"),
    "<TOOLCALL>": ("</TOOLCALL>", "json"),
    "[TOOL_REQUEST]": ("[END_TOOL_REQUEST]", "json"),
    "[TOOL_CALL]": ("[/TOOL_CALL]", "json"),
    "<|START_ACTION|>": ("<|END_ACTION|>", "json"),
    "<longcat_tool_call>": ("</longcat_tool_call>", "json"),
    "<|action_start|><|plugin|>": ("<|action_end|>", "json"),
    "functools[": ("]", "json"),
    "<|tools_prefix|>": ("<|tools_suffix|>", "apertus"),
    "<|tool_call_start|>": ("<|tool_call_end|>", "python"),
    "<|python_start|>": ("<|python_end|>", "python"),
    "<function_calls>": ("</function_calls>", "python lines"),
    "```tool_code": ("```", "python lines"),
    "<|tool_call>call:": ("<tool_call|>", "gemma"),
    "<start_function_call>call:": ("<end_function_call>", "function gemma"),
    "<\uff5ctool\u2581call\u2581begin\uff5c>": (
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        "deepseek",
    ),
    "to=functions.": ("<|call|>", "harmony"),
    "<|channel|>commentary to=": ("<|call|>", "harmony"),
    "<|tool_call_begin|>": ("<|tool_call_end|>", "kimi"),
    "<|tool_call:begin|>": ("<|tool_call:end|>", "solar"),
    "<|plamo:begin_tool_name:plamo|>": ("<|plamo:end_tool_arguments:plamo|>", "plamo"),
}
"""The mark that ends a call and the family of its body, by the mark that begins it."""
MARK = re.compile("|".join([*map(re.escape, MARKS), rf"<{SPACE}invoke name=(?=\")"]))
"""A mark that begins a call, with a namespace or without one."""
_TAGS = {mark for pair in MARKS.items() for mark in (pair[0], pair[1][0])}
_TAGS = {mark for mark in _TAGS if mark[:1] in ("<", "[") or mark.startswith(MINIMAX)}
REPEATABLE = {'<|"|>', "<escape>", "<function_call>"} | {m for m in MARKS if not MARKS[m][0]}
"""Control tokens that a sound text may repeat: quotation marks, and marks of calls without an end.

Granite writes no `</function_call>`."""
_STARTS = ("{", "[", "Action:", "\u273fFUNCTION\u273f:")


def control_marks(controls: Iterable[str]) -> re.Pattern[str]:
    """Returns what finds control tokens and the marks of calls in a text.

    Example:
        >>> control_marks(["<|im_end|>"]).findall("<tool_call><tool_call>{}</tool_call>")
        ['<tool_call>', '<tool_call>', '</tool_call>']
    """
    marks = sorted(_TAGS | set(controls), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)))


def first_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of special tokens, and of tokens that have a mark of calls or begin one.

    The marks are those that the chat template has, or else `<tool_call>` and its end. A mark that
    is not a token of its own may begin at the end of any token.
    """
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    template = str(tokenizer.chat_template)
    tags = {tag for tag in _TAGS if tag in template} or {"<tool_call>", "</tool_call>"}
    starts = tuple(tag[:n] for tag in tags - vocabulary.keys() for n in range(1, len(tag)))
    ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    held = {t: i for t, i in vocabulary.items() if t.endswith(starts) or any(m in t for m in tags)}
    return sorted(ids.union(held.values()))


def may_have_calls(text: str, schemas: Schemas) -> bool:
    """Returns whether a text may have calls without a mark: most texts have none."""
    has_start = bool(text) and any(start in text for start in _STARTS)
    return has_start or (bool(text) and names_tool(text, schemas))


def names_tool(text: str, schemas: Schemas) -> bool:
    """Returns whether a text has what begins a call of a tool in Python or in an element."""
    return any(f"{name}(" in text or f"<{name}" in text for name in schemas)


def without_openings(text: str) -> str:
    """Returns the text before a call without the marks at its end that open a list of calls."""
    return _without_marks(_OPENINGS, text)


def without_closings(text: str) -> str:
    """Returns a text without white space and the marks at its end that belong to no call."""
    return _without_marks(_CLOSINGS_AT_END, text).rstrip()


def skip_closings(text: str, start: int) -> int:
    """Returns the position behind the marks that follow a call and belong to none."""
    return _CLOSINGS.match(text, start).end()  # type: ignore[union-attr]  # it may be empty


def _without_marks(marks: re.Pattern[str], text: str) -> str:
    start = text.find("<", max(len(text) - _LONGEST_MARKS, 0))
    match = marks.search(text, start) if start >= 0 else None
    return text[: match.start()] if match else text
