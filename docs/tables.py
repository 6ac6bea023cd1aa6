"""Tables of the documentation that are written from the code.

    python docs/tables.py    # rewrites them

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A test compares the pages with the
code.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path

from gspo_env.chat import ChatTokenizer
from gspo_env.episodes import schema
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.marks import MARKS
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
    from gspo_env.health.run_rules import RULES

    rows = [f"| `{r.name}` | {first_line(r.check)} | {r.limit:g} |" for r in RULES]
    return ["| rule | finds | threshold |", "|---|---|---|", *rows]


@tool
def look(word: str, times: int = 1) -> str:
    """Look a word up."""
    return word * times


def first_line(function: Callable[..., object]) -> str:
    """Returns the first line of a function's docstring, without its full stop."""
    return (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")


TOOL = as_tool(look)
CALL = ToolCall(name="look", arguments={"word": "a", "times": 2})


def formats() -> list[str]:
    """Returns the rows of the formats of tool calls, each of which is read as `CALL`."""
    families = runpy.run_path(str(FOLDER.parent / "tests/support/chat_families.py"))["FAMILIES"]
    rows, marks = [], set()
    cases = json.loads((FOLDER.parent / "tests/data/tool_calls.json").read_text())["formats"]
    for family, case in cases.items():
        arguments, tokenizer, text = case["arguments"], case["tokenizer"], case["text"]
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
