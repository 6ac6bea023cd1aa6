"""Parts of the HTML pages that load nothing and run nothing: every text is escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from gspo_env.redaction import visible

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #333; max-width: 80rem; margin: 2rem auto;
  padding: 0 1rem; }
img { max-width: 100%; }
pre { background: #f5f6f8; padding: 0.8rem; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 0.85rem; }
summary { cursor: pointer; }
div.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid #e3e6ea;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
table.first tr:nth-child(2) td { font-weight: 600; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def escape(text: str) -> str:
    """Escapes a text; hidden characters, such as those that turn the direction, are visible."""
    return html.escape(visible(text))


def page(title: str, body: Sequence[str]) -> str:
    """Returns a page.

    Args:
        title: As plain text.
        body: HTML.
    """
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{''.join(body)}</html>"
    )


def table(lines: Sequence[Sequence[str]], kind: str = "") -> str:
    """Returns a table of plain texts; the first line is the header."""

    def row(tag: str, line: Sequence[str]) -> str:
        cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line)
        return f"<tr>{cells}</tr>"

    rows = row("th", lines[0]) + "".join(row("td", line) for line in lines[1:])
    return f'<div class="scroll"><table class="{kind}">{rows}</table></div>'


def picture(path: Path, alt: str) -> str:
    """Returns a PNG as part of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def folded(summary: str, text: str) -> str:
    """Returns a text that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
