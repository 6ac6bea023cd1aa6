"""Bounds of what a chat template, which anybody may have written, can compute.

Jinja's sandbox keeps a template from files and attributes, but not from time and memory. Here every
operation that can make a value larger is bounded before the value is made.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from types import BuiltinMethodType, GeneratorType
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from gspo_env.errors import TemplateBoundsError

_MOST_LINES = 1_000_000
"""Statements that the loops and macros of a template may run for one rendering."""
_MOST_WORK = 1 << 28
"""Characters and items that the operations of a template may read for one rendering."""
_LONGEST_TEMPLATE = 1 << 20
"""Characters of a template."""
_LONGEST = 1 << 22
"""Characters and items of a value in a template, those of its items included."""
_ITEM = 16
"""What an item counts in addition to its text."""
_LONGEST_OUTPUT = 1 << 24
"""Characters that a template may write, those of its macros and blocks included."""
_COUNT, _SPEND, _WRITE, _CONCAT = "gspo_count", "gspo_spend", "gspo_write", "gspo_concat"
_SEARCHES = {
    *("split", "rsplit", "startswith", "endswith", "replace", "strip", "lstrip", "rstrip", "find"),
    *("rfind", "index", "count", "partition", "rpartition", "removeprefix", "removesuffix"),
}
"""Methods and filters of texts whose arguments are searched for."""
_SHALLOW = {
    *("length", "count", "first", "last", "list", "d", "default", "items", "reverse", "attr"),
    *("keys", "values", "get", "copy"),
}
"""Methods and filters that do not read inside the items of a value."""
_EACH = {"map", "select", "reject", "selectattr", "rejectattr"}
"""Filters that use their arguments once for each item."""
_LINEAR = _SEARCHES - {"replace"} | {
    *("lower", "upper", "title", "capitalize", "casefold", "swapcase", "rindex", "splitlines"),
    *("isdigit", "isalpha", "isalnum", "isspace", "isnumeric", "isdecimal"),
    *("islower", "isupper", "istitle", "isascii", "isidentifier", "e", "escape", "forceescape"),
    *("safe", "string", "trim", "sort", "unique", "groupby", "dictsort", "min", "max", "sum"),
    *("abs", "int", "float", "round", "truncate", "urlencode", "pprint", "filesizeformat"),
    *("wordcount", "tojson"),
}
"""Methods and filters whose result is about as large as their arguments; that of others is at most
their product."""
_SORTS = {"sort", "dictsort", "groupby", "unique"}
"""Filters that compare the items of a value, or compute something of each."""
_ITEM_WORK = 256
"""What an item counts in such a filter, and in one of `_EACH`."""
_WIDTH = re.compile(r"\d{5}|%[-#0 +]*\*|%[-#0 +]*\d*\.\*")
"""A place of a format string that is 10,000 characters wide or more, or as wide as an argument."""
_UNBOUNDED = ("lipsum", "urlize", "encode", "decode")
"""Names that no chat template needs, and that take long for their size."""


def parser() -> Environment:
    """Returns the environment with which `transformers` parses templates."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: Environment = _compile_jinja_template("").environment
    return environment


class _Spent(threading.local):
    """What the rendering in this thread has used."""

    lines = work = output = 0


class BoundedTemplate:
    """A template that raises an error when it runs too many lines, or would make a huge value.

    Every loop, macro and block counts the statements that it runs. Every filter, call and operator
    is bounded by the size of its arguments before it runs.

    Args:
        source: The text of the template.
        mark: Changes a text of the template's own; its second argument is whether the text may be
            a part of what the template writes, and not only something that it searches for.

    Raises:
        TemplateBoundsError: It is too long.
    """

    def __init__(self, source: str, mark: Callable[[str, bool], str]) -> None:
        if len(source) > _LONGEST_TEMPLATE:
            raise TemplateBoundsError(
                f"it has {len(source):,} characters; expected at most {_LONGEST_TEMPLATE:,}"
            )
        self._spent = _Spent()
        environment: Any = parser().overlay()
        self._call, self._formatter = environment.call, _BoundedFormatter(environment, self._spend)
        environment.call, environment.call_binop = self._bounded_call, self._bounded_operator
        environment.intercepted_binops = frozenset({"+", "*", "**", "%"})
        self._operators = environment.binop_table
        filters = {name: self._bounded(name, f) for name, f in environment.filters.items()}
        filters |= {_COUNT: self._count, _SPEND: self._read, _WRITE: self._write}
        filters |= {_CONCAT: self._concat, "tojson": self._tojson}
        environment.filters = {k: f for k, f in filters.items() if k not in _UNBOUNDED}
        tree = _Instrument(mark).visit(environment.parse(source))
        names = environment.make_globals(None)
        names = {name: value for name, value in names.items() if name not in _UNBOUNDED}
        self._template = Template.from_code(environment, environment.compile(tree), names)

    def render(self, **names: Any) -> str:
        """Returns the text for the values of the template's names."""
        self._spent.lines = self._spent.work = self._spent.output = 0
        return str(self._template.render(**names))

    @pass_context
    def _count(self, context: Context, lines: int, size: int = 0) -> str:
        self._spent.lines += lines
        self._spent.output += size
        if self._spent.lines > _MOST_LINES:
            raise TemplateBoundsError(
                f"it runs more than {_MOST_LINES:,} lines for one rendering; expected fewer"
            )
        self._write("")
        return ""

    def _read(self, value: Any) -> Any:
        self._spend(_size(value))
        return value

    def _write(self, value: Any) -> Any:
        self._spent.output += _size(value)
        if self._spent.output > _LONGEST_OUTPUT:
            raise TemplateBoundsError(f"it writes more than {_LONGEST_OUTPUT:,} characters")
        return value

    def _concat(self, values: list[Any]) -> str:
        self._spend(_size(values))
        return "".join(map(str, values))

    def _spend(self, size: int) -> None:
        """Notes the size of what an operation reads or makes.

        Raises:
            TemplateBoundsError: It is too large, or all of them are.
        """
        self._spent.work += size
        if size > _LONGEST or self._spent.work > _MOST_WORK:
            raise TemplateBoundsError(
                f"it makes a value of more than {_LONGEST:,} characters or items, or reads more "
                f"than {_MOST_WORK:,} for one rendering"
            )

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter that checks its arguments."""
        first = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def bounded(*args: Any, **names: Any) -> Any:
            values = [list(v) if isinstance(v, GeneratorType) else v for v in args]
            self._check(name, values[first:], names)
            return function(*values, **names)

        return bounded

    def _bounded_call(self, context: Context, function: Any, *args: Any, **names: Any) -> Any:
        method = getattr(function, "__wrapped__", function)
        name = getattr(method, "__name__", "")
        if name in _UNBOUNDED:
            raise TemplateBoundsError(f"it calls {name}, which may take any time")
        if name == "strftime_now":
            self._check(name, [*args, 256], names)
        elif not isinstance(method, BuiltinMethodType):
            self._check("sum", args, names)
        elif isinstance(method.__self__, str) and name in ("format", "format_map"):
            if name == "format_map":
                args, names = (), dict(*args)
            return self._formatter.vformat(method.__self__, args, names)
        else:
            self._check(name, [method.__self__, *args], names)
        return self._call(context, function, *args, **names)

    def _bounded_operator(self, context: Context, operator: str, first: Any, second: Any) -> Any:
        size = _size(first) + _size(second)
        if operator == "%" and isinstance(first, (str, bytes)):
            self._check("format", [first, second], {})
        elif operator == "*" and not (
            isinstance(first, (int, float)) and isinstance(second, (int, float))
        ):
            self._check("repeat", [first, second], {})
        elif operator == "**" and isinstance(first, int) and isinstance(second, int):
            size = _size(first) * abs(second)
        self._spend(size)
        return self._operators[operator](first, second)

    def _check(self, name: str, args: Sequence[Any], names: Mapping[str, Any]) -> None:
        """Checks the arguments of a filter or a method before it runs."""
        values = [*args, *names.values()]
        if name in _SHALLOW or name in _EACH:
            length = len(values[0]) if hasattr(values[0], "__len__") else 1
            others = sum(map(_size, values[1:])) + 1
            self._spend(length * max(others, _ITEM_WORK) if name in _EACH else length + others)
            return
        sizes = [_size(value) for value in values]
        self._spend(sum(sizes))
        if name in _SORTS and hasattr(values[0], "__len__"):
            self._spend(len(values[0]) * _ITEM_WORK)
        if name == "replace" and len(args) >= 3:
            text, old, new = map(str, args[:3])
            self._spend(text.count(old) * len(new))
        elif name == "format":
            if _WIDTH.search(str(values[0])):
                raise TemplateBoundsError("it formats a text with a huge width")
            self._spend(str(values[0]).count("%") * (10_000 + sum(sizes[1:])))
        elif name == "striptags":  # it copies the text for each comment
            self._spend(str(values[0]).count("<") * sizes[0] >> 8)
        elif name not in _LINEAR:
            numbers = [
                abs(v) if isinstance(v, int) else s for v, s in zip(values, sizes, strict=True)
            ]
            self._spend(math.prod(max(1, number) for number in numbers))

    @pass_context
    def _tojson(
        self,
        context: Context,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        self._check("tojson", [value], {})
        self._spend((indent if isinstance(indent, int) else _size(indent)) * 10_000)
        self._spend(_size(value) * _size(separators))
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        pieces, size = [], 0
        for piece in encoder.iterencode(value):
            size += len(piece)
            if size > 8 * _LONGEST:
                self._spend(size)
            pieces.append(piece)
        return "".join(pieces)


class _BoundedFormatter(SandboxedFormatter):
    """Formats texts whose fields are checked one by one."""

    def __init__(self, environment: Environment, spend: Callable[[int], None]) -> None:
        super().__init__(environment)
        self._spend = spend

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDTH.search(format_spec):
            raise TemplateBoundsError("it formats a text with a huge width")
        self._spend(_size(value))
        return super().format_field(value, format_spec)


def _size(value: Any) -> int:
    """Returns about the number of characters of a value as text; at most a bit over the limit."""
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, (bool, float)):
        return _ITEM
    size, stack = 0, [value]
    while stack and size <= _LONGEST:
        value = stack.pop()
        if isinstance(value, Namespace):
            value = value._Namespace__attrs
        if isinstance(value, (str, bytes)):
            size += len(value)
        elif isinstance(value, (list, tuple, range, KeysView, ValuesView, ItemsView)):
            stack += value
        elif isinstance(value, int):
            size += value.bit_length()
        elif isinstance(value, Mapping):  # a check that is slow for other values
            stack += [*value, *value.values()]
        size += _ITEM
    return size


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

    def visit_Output(self, node: Any) -> Any:
        self.generic_visit(node)
        size = sum(len(n.data) for n in node.nodes if isinstance(n, nodes.TemplateData))
        node.nodes = [
            n if isinstance(n, nodes.TemplateData) else _filter(n, _WRITE) for n in node.nodes
        ]
        if size:
            node.nodes.insert(0, _filter(nodes.Const(0), _COUNT, nodes.Const(size)))
        return node

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), _CONCAT)

    def visit_List(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _spent(node)

    visit_Tuple = visit_Dict = visit_List

    def visit_Getitem(self, node: Any) -> Any:
        node.node = self.visit(node.node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, _SPEND)
        if not isinstance(node.arg, nodes.Const):  # the name of a field stays
            node.arg = self.visit(node.arg)
        return node

    def visit_Pair(self, node: Any) -> Any:
        if not isinstance(node.key, nodes.Const):
            node.key = self.visit(node.key)
        node.value = self.visit(node.value)
        return node

    def visit_Compare(self, node: Any) -> Any:
        self._visit_fields(node, is_output=False)
        parts = (node, *node.ops)
        searches = any(part.op in ("in", "notin") for part in node.ops)
        if searches or not any(isinstance(part.expr, nodes.Const) for part in parts):
            for part in parts:  # a comparison with a constant takes no time
                part.expr = _spent(part.expr)
        return node

    def visit_Test(self, node: Any) -> Any:
        self.generic_visit(node)
        if node.args:
            node.node, node.args = _spent(node.node), [_spent(one) for one in node.args]
        return node

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
        node.body = [nodes.Output([_filter(nodes.Const(lines), _COUNT)]), *node.body]
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _counted


def _spent(node: Any) -> Any:
    """Returns an expression whose value is measured when it is read."""
    return node if isinstance(node, nodes.Const) else _filter(node, _SPEND)


def _filter(node: Any, name: str, *args: Any) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None)
