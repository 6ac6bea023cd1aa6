"""Bounds of what a chat template, which anybody may have written, can compute.

Jinja's sandbox keeps a template from files and attributes, but not from time and memory.
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.utils import Namespace

from gspo_env.errors import ChatTemplateError

_MOST_LINES = 1_000_000
"""Lines that a template may run for one rendering, its loops included."""
_LONGEST_TEMPLATE = 1 << 20
"""Characters of a template."""
_LONGEST = 1 << 24
"""Characters or items of a value in a template."""
_LARGEST = 10**6
"""Largest number in a template."""
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "wordwrap"}
_WIDTH = re.compile(r"%[^%a-zA-Z]{0,8}(?:\d{5}|\*)|\{[^{}]{0,99}:(?:[^{}]{0,9}\d{5}|[^{}]{0,9}\{)")
"""A place of a format string that is 10,000 characters wide or more, or as wide as an argument."""


def check_template(template: Any) -> None:
    """Refuses templates that can make a huge value in one operation.

    Args:
        template: The text, or texts by name.

    Raises:
        ChatTemplateError: It raises to a power, repeats a text or a list, has a huge number, or
            pads texts.
    """
    texts = template.values() if isinstance(template, dict) else [template]
    for text in map(str, texts):
        if len(text) > _LONGEST_TEMPLATE:
            raise ChatTemplateError(
                f"the chat template has {len(text):,} characters; expected at most "
                f"{_LONGEST_TEMPLATE:,}"
            )
        try:
            tree = parser().parse(text)
        except (TemplateSyntaxError, RecursionError):
            continue  # rendering says what is wrong
        for node in tree.find_all(nodes.Node):
            if what := _huge(node):
                raise ChatTemplateError(
                    f"line {node.lineno} of the chat template {what}, which may take any amount of "
                    "memory; expected a template without it"
                )


def parser() -> Environment:
    """Returns the environment with which `transformers` parses templates."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: Environment = _compile_jinja_template("").environment
    return environment


def _huge(node: nodes.Node) -> str:
    """Describes an operation whose result may be huge; empty for all others."""
    if isinstance(node, nodes.Pow):
        return "raises to a power"
    if isinstance(node, nodes.Mul):
        return "" if _is_number(node.left) and _is_number(node.right) else "multiplies"
    if isinstance(node, nodes.Const) and isinstance(node.value, (int, float)):
        return "has a huge number" if abs(node.value) > _LARGEST else ""
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return "has a huge width" if _WIDTH.search(node.value) else ""
    if isinstance(node, (nodes.Filter, nodes.Getattr)):
        name = node.name if isinstance(node, nodes.Filter) else node.attr
        formats = name == "format" and isinstance(node.node, nodes.Const)
        return f"uses {name}" if name in _PADDING and not formats else ""
    return ""


def _is_number(node: nodes.Node) -> bool:
    """Returns whether a factor is a number: a constant, a counter of a loop or a length."""
    if isinstance(node, nodes.Const):
        return isinstance(node.value, (int, float))
    if isinstance(node, nodes.Filter):
        return node.name in ("length", "count", "int", "float", "round", "abs")
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == "loop"
    if isinstance(node, (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod)):
        return _is_number(node.left) and _is_number(node.right)
    return False


class Bounds:
    """Raises an error when templates run too many lines in this thread, or make a huge value."""

    def __enter__(self) -> None:
        """Begins to count."""
        self._count, self._before = 0, sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *exception: object) -> None:
        """Ends the count."""
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        return self._line if frame.f_code.co_filename == "<template>" else None

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        self._count += 1
        if self._count > _MOST_LINES:
            raise ChatTemplateError(
                f"it runs more than {_MOST_LINES:,} lines for one rendering; expected fewer"
            )
        for held in frame.f_locals.values():
            parts = held._Namespace__attrs.values() if isinstance(held, Namespace) else (held,)
            for part in parts:
                if isinstance(part, (str, list, tuple, dict)) and len(part) > _LONGEST:
                    raise ChatTemplateError(
                        f"it makes a value of {len(part):,} characters or items; expected at most "
                        f"{_LONGEST:,}"
                    )
        return self._line
