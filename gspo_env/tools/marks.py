"""The marks that begin tool calls, and what shows that a text may have calls without one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gspo_env.tools.json_calls import Schemas

SPACE = r"(?:\w{1,16}:|[ |\uff5c\u2016]{0,5}DSML[ |\uff5c\u2016]{0,5})"
"""What precedes the names of XML tags: a namespace, or DSML in any bars."""
MINIMAX = "]<]minimax[>["
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
_STARTS = ("{", "[", "Action:", "\u273fFUNCTION\u273f:")


def may_have_calls(text: str, schemas: Schemas) -> bool:
    """Returns whether a text may have calls without a mark: most texts have none."""
    has_start = bool(text) and any(start in text for start in _STARTS)
    return has_start or (bool(text) and names_tool(text, schemas))


def names_tool(text: str, schemas: Schemas) -> bool:
    """Returns whether a text has what begins a call of a tool in Python or in an element."""
    return any(f"{name}(" in text or f"<{name}" in text for name in schemas)
