"""The tests that SECURITY.md names exist."""

from __future__ import annotations

import ast
import re


def named(root):
    """Each (file, test) of the table of attacks; the test is empty if the whole file is named."""
    text = (root / "SECURITY.md").read_text()
    return re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)


def test_every_attack_has_a_test_that_exists(request):
    root = request.config.rootpath
    rows = [row for row in (root / "SECURITY.md").read_text().splitlines() if "`tests/" in row]
    assert len(rows) > 20
    for file, name in named(root):
        tests = {
            node.name
            for node in ast.walk(ast.parse((root / file).read_text()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        assert name in tests if name else any(t.startswith("test_") for t in tests), (file, name)
