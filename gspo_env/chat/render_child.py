"""Renders chat templates in a child process; `gspo_env.runtime.limited` loads this file."""

from __future__ import annotations

import json
import pickle
import time
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OUTPUT, _OUTPUT_PER_BYTE, _LONGEST_OUTPUT = 1 << 18, 8, 1 << 23
"""Characters that a template may write, further ones for a byte of what it renders, and at most."""
_SLOW, _PER_BYTE = 0.05, 1e-7
"""CPU seconds of a usual rendering, and of a byte of what it renders."""
_MOST_SLOW = 2.0
"""CPU seconds that the renderings of a template may take beyond that, failed ones included."""
_templates: dict[bytes, Template] = {}
_spent: dict[bytes, float] = {}


def answer(digest: bytes, tree: bytes, names: bytes) -> bytes:
    """Renders a template: `=` and the text, `!` and an error, or `?` if it needs the tree first.

    Args:
        digest: Identifies the template.
        tree: The pickled tree of the template; empty if it may be known.
        names: The pickled values of its names.
    """
    if not tree and digest not in _templates:
        return b"?"
    started = time.process_time()
    text = _render(digest, tree, names)
    excess = time.process_time() - started - _SLOW - _PER_BYTE * len(names)
    _spent[digest] = _spent.get(digest, 0.0) + max(0.0, excess)
    if _spent[digest] > _MOST_SLOW:
        return b"*it is slow again and again: more than %d seconds in all" % _MOST_SLOW
    return text


def _render(digest: bytes, tree: bytes, names: bytes) -> bytes:
    try:
        if tree:
            _templates[digest] = _compile(pickle.loads(tree))
        text = _templates[digest].render(**pickle.loads(names))
        longest = min(_OUTPUT + _OUTPUT_PER_BYTE * len(names), _LONGEST_OUTPUT)
        if len(text) > longest:
            return b"*it writes more than %d characters" % longest
        return b"=" + text.encode("utf-8", "surrogatepass")
    except (MemoryError, RecursionError) as error:
        return b"*it takes too much memory (%s)" % type(error).__name__.encode()
    except Exception as error:  # a template may raise anything
        return b"!" + str(error)[:2000].encode("utf-8", "surrogatepass")


def _compile(tree: Any) -> Template:
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    tree.set_environment(environment)
    code = environment.compile(tree)
    return Template.from_code(environment, code, environment.make_globals(None))


# as in `transformers.utils.chat_template_utils`, which takes seconds to import


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
