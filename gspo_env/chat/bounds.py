"""Bounds of what a chat template, which anybody may have written, can compute.

Jinja's sandbox keeps a template from files and attributes, but not from time and memory. So a child
process renders it, within limits of both. This process only parses it.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

from gspo_env.errors import ChatTemplateError, TemplateBoundsError, raised_as
from gspo_env.runtime.limited import LimitedPool

_LONGEST_TEMPLATE = 1 << 17
"""Characters of a template."""
_SECONDS = 1.0
"""CPU time of one rendering, its template's compilation included."""
_MEMORY = 3 << 26
"""Bytes of one rendering."""
_LONGEST_ANSWER = 1 << 26
_NO_MEMORY = b"*it takes too much memory"
"""The start of such an answer of the child."""
_SEARCHES = {
    *("split", "rsplit", "startswith", "endswith", "replace", "strip", "lstrip", "rstrip", "find"),
    *("rfind", "index", "count", "partition", "rpartition", "removeprefix", "removesuffix"),
}
"""Methods and filters of texts whose arguments are searched for."""
_children = LimitedPool(
    str(Path(__file__).with_name("render_child.py")),
    memory=_MEMORY,
    longest=_LONGEST_ANSWER,
    path=[str(Path(str(package.__file__)).parents[1]) for package in (jinja2, markupsafe)],
)


def parser() -> Environment:
    """Returns the environment with which `transformers` parses templates."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: Environment = _compile_jinja_template("").environment
    return environment


class BoundedTemplate:
    """A template that a child process renders.

    Args:
        source: The text of the template.
        mark: Changes a text of the template's own; its second argument is whether the text may be
            a part of what the template writes, and not only something that it searches for.

    Raises:
        TemplateBoundsError: It is too long, or cannot be parsed.
    """

    def __init__(self, source: str, mark: Callable[[str, bool], str]) -> None:
        if len(source) > _LONGEST_TEMPLATE:
            raise TemplateBoundsError(
                f"it has {len(source):,} characters; expected at most {_LONGEST_TEMPLATE:,}"
            )
        causes = jinja2.TemplateError, ValueError, RecursionError
        with raised_as(TemplateBoundsError, "it cannot be parsed", *causes, reason=str):
            tree = _Marker(mark).visit(parser().parse(source))
            tree.set_environment(None)
            self._tree = pickle.dumps(tree)
        self._digest = hashlib.sha256(self._tree).digest()

    def render(self, **names: Any) -> str:
        """Returns the text for the values of the template's names.

        Raises:
            ChatTemplateError: The template raises.
            TemplateBoundsError: It takes more time or memory than one rendering may.
        """
        values = pickle.dumps(names)
        answer = _children.ask(_SECONDS, self._digest, b"", values)
        if answer == b"?":
            answer = _children.ask(_SECONDS, self._digest, self._tree, values)
        if answer is not None and answer.startswith(_NO_MEMORY):
            _children.end_idle()  # what a child keeps of other templates takes room
            answer = _children.ask(_SECONDS, self._digest, self._tree, values)
        if answer is None:
            raise TemplateBoundsError(
                f"it takes more than {_SECONDS:g} seconds of CPU time or crashes its process"
            )
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != b"=":
            raise (ChatTemplateError if answer[:1] == b"!" else TemplateBoundsError)(text)
        return text


class _Marker(NodeTransformer):
    """Marks the texts of a template's own."""

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
        if not isinstance(node.key, nodes.Const):
            node.key = self.visit(node.key)
        node.value = self.visit(node.value)
        return node

    def visit_Compare(self, node: Any) -> Any:
        return self._visit_fields(node, is_output=False)

    def visit_CallBlock(self, node: Any) -> Any:
        if isinstance(node.call.node, nodes.ExtensionAttribute):  # `{% generation %}`
            return self.generic_visit(nodes.Scope(node.body, lineno=node.lineno))
        return self.generic_visit(node)

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
