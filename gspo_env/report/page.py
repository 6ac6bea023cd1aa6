"""Pages of sections: HTML that loads nothing and executes nothing, and Markdown without markup."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from gspo_env.redaction import visible

_ACTIVE = re.compile(r"[\\`*\[\]|~$#!^{}]|(?<!\w)_|_(?!\w)")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": ":&#47;/"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page; all texts are plain texts."""

    title: str = ""
    folded: bool = False
    """Whether HTML shows only the title until a click."""
    text: str = ""
    strong: str = ""
    """A sentence to stress."""
    items: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    """The first line is the header."""
    picture: Path | None = None
    """A PNG, in the folder of the page."""
    caption: str = ""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Preformatted texts by their titles, which HTML shows after a click."""
    side_by_side: Sequence[Mapping[str, str]] = ()
    """Rows of such texts in columns, which Markdown leaves out."""


def html_page(title: str, sections: Sequence[Section]) -> str:
    """Returns a page that contains its pictures."""
    return str(_template().render(title=title, sections=sections))


@cache
def _template() -> Any:
    from jinja2 import Environment

    def shown(value: Any) -> Any:
        """Makes hidden characters visible, such as those that turn the direction of a text."""
        return visible(value) if type(value) is str else value

    environment = Environment(autoescape=True, finalize=shown, trim_blocks=True)
    environment.filters["base64"] = lambda path: base64.b64encode(path.read_bytes()).decode()
    return environment.from_string((files("gspo_env.report") / "page.html").read_text("utf-8"))


def markdown_page(title: str, sections: Sequence[Section]) -> str:
    """Returns a page that links to its pictures."""
    parts = [f"# {cell(title)}", ""]
    for section in sections:
        parts += [f"## {cell(section.title)}", ""] if section.title else []
        parts += [f"**{cell(section.strong)}**", ""] if section.strong else []
        parts += [cell(section.text), ""] if section.text else []
        parts += [*(f"- {cell(item)}" for item in section.items), ""] if section.items else []
        if section.table:
            head, *rows = (f"| {' | '.join(map(cell, line))} |" for line in section.table)
            parts += [head, f"|{' --- |' * len(section.table[0])}", *rows, ""]
        if section.picture is not None:
            parts += [f"![{cell(section.caption)}]({section.picture.name})", ""]
            parts += [cell(section.caption), ""]
        for name, text in section.blocks.items():
            parts += [f"### {cell(name)}", "", fenced(text), ""]
    return "\n".join(parts)


def cell(text: str) -> str:
    """Escapes a text for a line or a cell of Markdown; it has no links, markup or formulas."""
    line = " ".join(visible(text).split())
    line = _ACTIVE.sub(lambda match: f"\\{match[0]}", line)
    for plain, entity in _ENTITIES.items():
        line = line.replace(plain, entity)
    # a list or a heading at the beginning of a line
    return re.sub(r"^(\d*)([-+=.)])(?=[-+=\s]|$)", r"\1\\\2", line)


def fenced(text: str) -> str:
    """Returns a block of code that no text can end."""
    block = visible(text).rstrip("\n")
    longest = max((len(run) for run in re.findall(r"`+", block)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{block}\n{fence}"
