"""Keeps secrets out of everything that a run writes: settings, texts, messages.

A setting names a secret by its environment variable, as `${NAME}`. A value that stands in its place
is replaced by a mark when it is written, and so is text that looks like a key or a password.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_env.errors import ConfigError
from gspo_env.files import write_file

MARK = "[redacted]"

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PRIVATE_TABLES = ("env", "headers")
"""Tables of which every value may be a secret."""
_SECRET_NAME = re.compile(
    r"(?:^|[-_.])(?:password|passwd|passphrase|secret|credentials?|authorization|cookie|token"
    r"|(?:(?:api|access|secret|private|signing|auth)[-_.]?)key)$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile("key|token|secret|pass|auth|cred|cookie", re.IGNORECASE)
_CAMEL = re.compile("(?<=[a-z0-9])(?=[A-Z])")
_HARMLESS = re.compile(r"(?:[A-Za-z]{0,16}[\s:/@.,;=])*[A-Za-z]{0,16}")
"""What may stand beside the name of a variable, such as `Bearer ` or parts of an address."""
_OPTION = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]*)")
_ASSIGNMENT = re.compile(r"(-{0,2}([A-Za-z_][A-Za-z0-9_-]*)=)(.+)", re.DOTALL)
_LOOKS = re.compile(
    r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"
    r"|\bsk_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\bhf_[A-Za-z0-9]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}"
    r"|\bxox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8,2000}"
    r"|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"
    r"|(?:(?<=[Bb]earer )|(?<=[Bb]asic ))(?=\S{0,50}\d)[A-Za-z0-9._~+/=-]{8,}"
    r"|(?:(?<=[?&]key=)|(?<=[?&]sig=)|(?<=[?&]token=)|(?<=[?&]api_key=)|(?<=[?&]apikey=)"
    r"|(?<=[?&]access_token=)|(?<=[?&]password=)|(?<=[?&]secret=))[^\s&\"'#]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_HINTS = (
    *("sk-", "pk-", "rk-", "sk_", "ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-"),
    *("hf_", "AKIA", "ASIA", "AIza", "xox", "eyJ", "://", "earer ", "asic ", "-----BEGIN "),
    *("key=", "sig=", "token=", "password=", "secret="),
)
"""Every match of `_LOOKS` holds one of these or follows it; a search for them is much faster."""
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and newline: escape sequences, \r
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # directions of writing
    r"\u2028\u2029\ufeff"  # line and paragraph separators, byte order mark
    r"\U000e0000-\U000e007f"  # tags, which are invisible
    r"\ud800-\udfff]"  # lone surrogates, which no file takes
)
_SHORTEST = 8
_secrets: set[str] = set()
"""The values of variables that settings name and that may be secrets."""


def resolve(text: str) -> str:
    """Replaces each `${NAME}` by the environment variable.

    If its name is that of a secret, such as `MY_TOKEN`, its value is redacted from then on.

    Raises:
        ConfigError: A variable is not set.
    """

    def look_up(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if value is None:
            raise ConfigError(
                f"the settings name the environment variable {match[1]}; expected it to be set"
            )
        if len(value) >= _SHORTEST and _SECRET_VARIABLE.search(match[1]):
            _secrets.add(value)
        return value

    return _REFERENCE.sub(look_up, text)


def redact(value: Any, name: str = "") -> Any:
    """Returns settings without what is or looks like a secret.

    Args:
        value: A string, or nested mappings and lists; other values are returned as they are.
        name: Name of the setting.

    Example:
        >>> redact({"env": {"KEY": "1234"}, "url": "https://me:pw@host", "password": "${PW}"})
        {'env': {'KEY': '[redacted]'}, 'url': 'https://[redacted]@host', 'password': '${PW}'}
    """
    if isinstance(value, Mapping):
        private = name in _PRIVATE_TABLES
        return {
            key: _hide(item) if private else redact(item, str(key)) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return _redact_list(value)
    if not isinstance(value, str):
        return value
    return _hide(value) if _is_secret(name) else redact_text(value)


def redact_text(text: str) -> str:
    """Returns a text without what looks like a secret or is the value of a named variable."""
    for value in sorted(_secrets, key=len, reverse=True):
        text = text.replace(value, MARK)
    for hint in _HINTS:  # a loop is faster than any()
        if hint in text:
            return _LOOKS.sub(MARK, text)
    return text


def visible(text: str) -> str:
    r"""Returns a text in which no character acts on a terminal; a hidden one is its escape.

    Example:
        >>> visible("\x1b[31mred\r")
        '\\x1b[31mred\\r'
    """
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def clean(text: str, limit: int | None = None) -> str:
    """Replaces lone surrogates, which no tokenizer can encode, and cuts the text at a limit."""
    text = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    return text[:limit]


def write_text(path: Path, text: str) -> None:
    """Writes a text, in UTF-8; only its owner can read one in which something was redacted."""
    text = redact_text(text)

    def write(part: Path) -> None:
        if MARK in text:
            part.touch(0o600)
        part.write_text(text, "utf-8")

    write_file(path.parent, path.name, write)


def log_to_terminal() -> None:
    """Shows warnings of this process in the terminal, unless the program has set up logging."""
    handler = _ToStderr()
    handler.setFormatter(TerminalFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class _ToStderr(logging.Handler):
    """Writes to the stderr of the moment: while a live line is shown, lines go above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        print(self.format(record), file=sys.stderr, flush=True)


class TerminalFormatter(logging.Formatter):
    """Hides secrets, shows hidden characters, and indents all but a record's first line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the lines of a record."""
        return visible(redact_text(super().format(record))).replace("\n", "\n    ")


def find_mark(value: Any, name: str = "") -> str:
    """Returns the dotted name of the first setting that was redacted, or an empty string."""
    if isinstance(value, str):
        return name if MARK in value else ""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    names = (find_mark(item, f"{name}.{key}" if name else str(key)) for key, item in items)
    return next(filter(None, names), "")


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(_CAMEL.sub("_", name)) is not None


def _hide(value: Any) -> Any:
    """Hides a value, but not the names of variables in it."""
    if not isinstance(value, str):
        return redact(value)
    rest, references = _REFERENCE.subn("", value)
    return value if references and _HARMLESS.fullmatch(rest) else MARK


def _redact_list(values: Any) -> list[Any]:
    """Redacts a list, which may be a command with options such as `--token VALUE`."""
    redacted: list[Any] = []
    for index, value in enumerate(values):
        option = _OPTION.fullmatch(str(values[index - 1])) if index else None
        assigned = _ASSIGNMENT.fullmatch(value) if isinstance(value, str) else None
        if isinstance(value, str) and option and _is_secret(option[1]):
            redacted.append(_hide(value))
        elif assigned and _is_secret(assigned[2]):
            redacted.append(assigned[1] + _hide(assigned[3]))
        else:
            redacted.append(redact(value))
    return redacted
