"""Pages of reports: no text in a cell or a block of Markdown becomes markup."""

from __future__ import annotations

import re

import pytest

from gspo_env.report.page import cell, fenced

EVIL = (
    "<script>alert('x')</script> | $\\frac{1}{0}$ `a` ```b``` \x1b[31m \u202e [l](http://e.com) @me"
)


@pytest.mark.parametrize(
    "text", [EVIL, "# head", "- item", "1. item", "a\n\n# b", "_x_ *y*", "\\|"]
)
def test_a_cell_of_markdown_is_one_line_without_markup(text):
    made = cell(text)
    assert "\n" not in made
    assert not re.search(r"(?<!\\)[|`*$\[\]]", made.replace("\\\\", ""))
    assert "<" not in made
    assert not re.match(r"[-+#]|\d+\.", made)


def test_no_text_can_end_a_block_of_code():
    made = fenced("a\n````\nb")
    assert made.startswith("`````text\n")
    assert made.endswith("\n`````")
