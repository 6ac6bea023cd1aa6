"""Makes characters visible that would change how a terminal or an editor shows other text."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and newline: escape sequences, \r
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # directions of writing
    r"\u2028\u2029\ufeff"  # line and paragraph separators, byte order mark
    r"\U000e0000-\U000e007f"  # tags, which are invisible
    r"\ud800-\udfff]"  # lone surrogates, which no file takes
)


def visible(text: str) -> str:
    r"""Returns a text in which no character acts on a terminal; a hidden one is its escape.

    Example:
        >>> visible("\x1b[31mred\r")
        '\\x1b[31mred\\r'
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
