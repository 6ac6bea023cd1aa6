"""Bounds of what a chat template, which anybody may have written, can compute.

Jinja's sandbox keeps a template from files and attributes, but not from time and memory.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment, Template, TemplateSyntaxError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from gspo_env.errors import ChatTemplateError

_MOST_LINES = 1_000_000
"""Statements that the loops and macros of a template may run for one rendering."""
_COUNT, _MEASURE = "gspo_count", "gspo_measure"
_LONGEST_TEMPLATE = 1 << 20
"""Characters of a template."""
_LONGEST = 1 << 24
"""Characters or items of a value in a template."""
_LARGEST = 10**6
"""Largest number in a template."""
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "wordwrap"}
_SEARCHES = {
    *("split", "rsplit", "startswith", "endswith", "replace", "strip", "lstrip", "rstrip", "find"),
    *("rfind", "index", "count", "partition", "rpartition", "removeprefix", "removesuffix"),
}
"""Methods and filters of texts whose arguments are searched for."""
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


class BoundedTemplate:
    """A template that raises an error when it runs too many lines, or makes a huge value.

    Every loop, macro and block counts the statements that it runs, and every assignment measures
    its value.

    Args:
        source: The text of the template.
        mark: Changes a text of the template's own; its second argument is whether the text may be
            a part of what the template writes, and not only something that it searches for.
    """

    def __init__(self, source: str, mark: Callable[[str, bool], str]) -> None:
        environment = parser().overlay()
        filters = {_COUNT: self._count, _MEASURE: self._measure}
        environment.filters = {**environment.filters, **filters}
        tree = _Instrument(mark).visit(environment.parse(source))
        names = environment.make_globals(None)
        self._template = Template.from_code(environment, environment.compile(tree), names)
        self._counts = threading.local()

    def render(self, **names: Any) -> str:
        """Returns the text for the values of the template's names."""
        self._counts.lines = 0
        return self._template.render(**names)

    @pass_context
    def _count(self, context: Context, lines: int) -> str:
        self._counts.lines += lines
        if self._counts.lines > _MOST_LINES:
            raise ChatTemplateError(
                f"it runs more than {_MOST_LINES:,} lines for one rendering; expected fewer"
            )
        return ""

    @pass_context
    def _measure(self, context: Context, value: Any) -> Any:
        if isinstance(value, (str, list, tuple, dict)):
            if len(value) > _LONGEST:
                raise ChatTemplateError(
                    f"it makes a value of {len(value):,} characters or items; expected at most "
                    f"{_LONGEST:,}"
                )
            if isinstance(value, tuple):  # several names are assigned at once
                for one in value:
                    self._measure(context, one)
        return value


class _Instrument(NodeTransformer):
    """Adds the filters of `BoundedTemplate` to a template, and marks its own texts."""

    def __init__(self, mark: Callable[[str, bool], str]) -> None:
        self._mark, self._is_output = mark, True

    def visit_TemplateData(self, node: Any) -> Any:
        node.data = self._mark(node.data, True)
        return node

    def visit_Const(self, node: Any) -> Any:
        if isinstance(node.value, str):
            node.value = self._mark(node.value, self._is_output)
        return node

    def visit_Getitem(self, node: Any) -> Any:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):  # the name of a field stays
            node.arg = self.visit(node.arg)
        return node

    def visit_Pair(self, node: Any) -> Any:
        node.value = self.visit(node.value)
        return node

    def visit_Compare(self, node: Any) -> Any:
        return self._visit_fields(node, is_output=False)

    def visit_Call(self, node: Any) -> Any:
        callee = node.node = self.visit(node.node)
        name = callee.attr if isinstance(callee, nodes.Getattr) else ""
        return self._visit_fields(node, is_output=name not in _SEARCHES, exclude=["node"])

    def visit_Filter(self, node: Any) -> Any:
        node.node = node.node and self.visit(node.node)
        return self._visit_fields(node, is_output=node.name not in _SEARCHES, exclude=["node"])

    def _visit_fields(self, node: Any, *, is_output: bool, exclude: Sequence[str] = ()) -> Any:
        outside, self._is_output = self._is_output, self._is_output and is_output
        for name, value in node.iter_fields(exclude=exclude):
            if isinstance(value, nodes.Node):
                setattr(node, name, self.visit(value))
            elif isinstance(value, list):
                value[:] = [self.visit(v) if isinstance(v, nodes.Node) else v for v in value]
        self._is_output = outside
        return node

    def _counted(self, node: Any) -> Any:
        lines = 1 + sum(1 for _ in node.find_all(nodes.Stmt))
        self.generic_visit(node)
        arguments = [nodes.Name(one.name, "load") for one in getattr(node, "args", ())]
        unused = nodes.Name("gspo_unused", "store")
        checks = [nodes.Assign(unused, _filter(one, _MEASURE)) for one in arguments]
        node.body = [nodes.Output([_filter(nodes.Const(lines), _COUNT)]), *checks, *node.body]
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _counted

    def visit_Assign(self, node: Any) -> Any:
        self.generic_visit(node)
        node.node = _filter(node.node, _MEASURE)
        return node

    def visit_AssignBlock(self, node: Any) -> Any:
        self.generic_visit(node)
        node.filter = _filter(node.filter, _MEASURE)
        return node

    def visit_With(self, node: Any) -> Any:
        self.generic_visit(node)
        node.values = [_filter(value, _MEASURE) for value in node.values]
        return node


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)
