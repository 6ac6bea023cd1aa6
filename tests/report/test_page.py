"""Pages of sections: what a text of a policy, an environment or a name can do in them."""

import re
from html.parser import HTMLParser

import pytest

from gspo_env.report.page import Section, cell, fenced, html_page, markdown_page

EVIL = (
    "<script>alert('x')</script> | $\\frac{1}{0}$ `a` ```b``` \x1b[31m \u202e [l](http://e.com) @me"
)


class Tags(HTMLParser):
    """The tags, their attributes and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.text += data


def test_texts_do_nothing_in_a_page_that_loads_nothing(tmp_path):
    picture = tmp_path / "curve.png"
    picture.write_bytes(b"pixels")
    texts = {"title": EVIL, "text": EVIL, "strong": EVIL, "items": [EVIL], "caption": EVIL}
    more = {"table": [[EVIL, "b"], ["c", EVIL]], "blocks": {EVIL: EVIL}}
    sections = [Section(**texts, **more, picture=picture), Section(title="Two", folded=True)]
    page = Tags(html_page(EVIL, sections))
    assert {"script", "link", "iframe", "a"} & set(page.tags) == set()
    assert [link[:22] for link in page.links] == ["data:image/png;base64,"]
    assert "<script>alert('x')</script>" in page.text  # shown as text
    shown = markdown_page(EVIL, sections)
    assert not {"\x1b", "\u202e"} & set(shown + page.text)
    assert re.findall(r"!\[[^\n]*\]\(([\w.]+)\)", shown) == ["curve.png"]
    tables = re.findall(r"^\|.*\|$", shown, re.MULTILINE)
    assert {re.sub(r"\\.", "", line).count("|") for line in tables} == {3}
    outside = re.sub(r"^(`{3,})\w+\n.*?^\1$", "", shown, flags=re.MULTILINE | re.DOTALL)
    assert "```" not in outside
    assert "<script" not in outside
    assert not re.search(r"(?<!\\)\]\(http", outside)
    assert not re.search(r"(?<!\\)\$", outside)


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
