"""Encodes text so that only the template and the policy can write control tokens.

A *rendering* is a text in which every control token is a stand-in: two lone surrogates, which no
text contains. What looks like a control token in a rendering is ordinary text.

    token ids    <|im_end|> as one id     "<|im_end|>" in an observation, as several ids
    rendering    two surrogates           <|im_end|>
"""

from __future__ import annotations

import json
import logging
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from tokenizers import AddedToken, Tokenizer

from gspo_env.errors import ChatTemplateError
from gspo_env.redaction import clean

logger = logging.getLogger(__name__)

R = TypeVar("R")

_CACHE_BYTES = 1 << 26
"""Bytes of the cache in each direction."""
_RARE = "\U00013000"
"""A letter that no small vocabulary has."""
_STAND_IN = re.compile("([\ud800-\udbff][\udc00-\udfff])")
_HALF_STAND_IN = re.compile(
    "[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]"
)
_LOW = 1000
"""Number of low surrogates that stand-ins use; the others mark text for `ChatTemplate`."""
_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")
"""What `rstrip` and `lstrip` of an added token remove."""


class TextEncoder:
    """Encodes text with a copy of a tokenizer that has no control tokens.

    A control token is an added token that is special or contains punctuation or a symbol, such as
    `<think>`. Other added tokens are text: Gemma lists line breaks, Phi lists runs of spaces. Their
    ids are those of the tokenizer itself.

    All text is encoded, except what the tokenizer's own normaliser changes and its vocabulary does
    not know. A character that the vocabulary knows only as a control token is unknown as well.

    Raises:
        ChatTemplateError: It is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatTemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: save it as tokenizer.json"
            )
        self._backend = backend
        added: dict[int, AddedToken] = dict(tokenizer.added_tokens_decoder)
        roles = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        self._unknown = tokenizer.unk_token_id
        if self._unknown in roles:
            self._unknown = None
        self.controls = {
            index: token
            for index, token in added.items()
            if index != self._unknown and (token.special or index in roles or not _is_text(token))
        }
        """The control tokens by id."""
        self.control_ids = {token.content: index for index, token in self.controls.items()}
        """The ids of the control tokens by text."""
        state = json.loads(backend.to_str())
        text_ids = added.keys() - self.controls.keys() - {self._unknown}
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] in text_ids]
        state["post_processor"] = state["padding"] = state["truncation"] = None
        self._first = Tokenizer.from_str(json.dumps(state))
        # ids behind the vocabulary move up where a control token before them is left out
        moved = {self._first.token_to_id(added[i].content): i for i in text_ids}
        self._moved = {a: b for a, b in moved.items() if a is not None and a != b}
        changed = _never_first(state["pre_tokenizer"])
        self._later = Tokenizer.from_str(json.dumps(state)) if changed else self._first
        letters = map(backend.token_to_id, ("x", "a", "e", "0", "\u2581"))
        self._anchor = next(((i,) for i in letters if i is not None), ())
        self._cached_ids = BoundedCache(self._encode, _CACHE_BYTES)
        self._cached_text = BoundedCache(self._decode, _CACHE_BYTES)
        self._warned = False
        if not _run(self._later.encode, _RARE, add_special_tokens=False).ids:
            logger.warning(
                "The tokenizer drops characters that its vocabulary does not know: the model does "
                "not read them."
            )

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._backend.get_vocab()))

    def encode(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        """Returns the ids of a text, none of which is a control token.

        Args:
            text: Any text; lone surrogates become question marks.
            first: Whether it starts the sequence, where some tokenizers add a space.
        """
        return self._cached_ids(text, first)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of any ids, including control tokens."""
        return self._cached_text(tuple(ids))

    def encode_rendering(
        self, rendering: str, *, first: bool = False, previous: int | None = None
    ) -> list[int]:
        """Returns the ids of a rendering.

        Args:
            rendering: The rendering.
            first: Whether it starts the sequence.
            previous: The id before it, which may absorb the white space at its start.
        """
        pieces = _STAND_IN.split(rendering)
        ids: list[int] = []
        before = None if previous is None else self.controls.get(previous)
        for text, stand_in in zip_longest(pieces[::2], pieces[1::2]):
            control = None if stand_in is None else _id_of(stand_in)
            after = None if control is None else self.controls[control]
            if before is not None and before.rstrip:
                text = text.lstrip(_SPACE)
            if after is not None and after.lstrip:
                text = text.rstrip(_SPACE)
            if text:
                ids += self.encode(text, first=first and not ids)
            if control is not None:
                ids.append(control)
            before = after
        return ids

    def decode_rendering(self, ids: Sequence[int]) -> str:
        """Returns the rendering of ids, as they read behind other text."""
        pieces: list[str] = []
        start = 0
        ends = [n for n, i in enumerate(ids) if i in self.controls]
        for end in [*ends, len(ids)]:
            if end > start:
                pieces.append(self._decode_behind(ids[start:end]))
            if end < len(ids):
                pieces.append(_stand_in(ids[end]))
            start = end + 1
        return "".join(pieces)

    def to_text(self, rendering: str) -> str:
        """Returns a rendering with the texts of its control tokens."""
        return _STAND_IN.sub(lambda match: self.controls[_id_of(match[0])].content, rendering)

    def to_rendering(self, text: str) -> str:
        """Returns a text of the template's or the policy's own as a rendering."""
        return self.control_pattern.sub(lambda match: _stand_in(self.control_ids[match[0]]), text)

    def break_controls(self, text: str, mark: str) -> str:
        """Puts a mark into what looks like a control token in a text that is none."""
        return self.control_pattern.sub(lambda match: match[0][:1] + mark + match[0][1:], text)

    def controls_of(self, rendering: str) -> list[int]:
        """Returns the control tokens of a rendering."""
        return [_id_of(stand_in) for stand_in in _STAND_IN.findall(rendering)]

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches the text of a control token."""
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _decode(self, ids: tuple[int, ...]) -> str:
        return str(_run(self._backend.decode, list(ids), skip_special_tokens=False))

    def _decode_behind(self, ids: Sequence[int]) -> str:
        """Decodes ids behind a letter, because some decoders drop a space at the start."""
        anchor = self.decode(self._anchor)
        text = self.decode((*self._anchor, *ids))
        return text[len(anchor) :] if text.startswith(anchor) else self.decode(ids)

    def _encode(self, text: str, first: bool) -> tuple[int, ...]:
        pieces, ids = [clean(text)], list[int]()
        while pieces:
            piece = pieces.pop()
            encode = self._first.encode if first else self._later.encode
            encoding = _run(encode, piece, add_special_tokens=False)
            new = [self._moved.get(i, i) for i in encoding.ids] if self._moved else encoding.ids
            if not self.controls.keys().isdisjoint(new):
                # the vocabulary itself can form a control token: split the text until it cannot
                spans = zip(new, encoding.offsets, strict=True)
                formed = [span for i, span in spans if i in self.controls]
                if cuts := [(a + b) // 2 for a, b in formed if b - a > 1]:
                    ends = zip([0, *cuts], [*cuts, len(piece)], strict=True)
                    pieces += [piece[a:b] for a, b in ends][::-1]
                    continue
                new = self._without_controls(new)
            ids += new
            first = False
            if self._unknown in new:
                self._warn(piece)
        return tuple(ids)

    def _without_controls(self, ids: list[int]) -> list[int]:
        """Replaces control tokens of one character by the unknown token or U+FFFD."""
        instead = [self._unknown]
        if self._unknown is None:
            instead = _run(self._later.encode, "\ufffd", add_special_tokens=False).ids
            instead = [i for i in instead if i not in self.controls]
        self._warn(self._decode(tuple(i for i in ids if i in self.controls)))
        return [new for i in ids for new in (instead if i in self.controls else [i])]

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "The tokenizer cannot encode all characters of %r: the model reads its unknown "
                "token instead (logged once).",
                text[:80],
            )


def _run(function: Callable[..., R], *args: Any, **others: Any) -> R:
    """Calls a tokenizer, whose panics are no `Exception`s and would end the process."""
    try:
        return function(*args, **others)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ChatTemplateError(f"the tokenizer fails: {str(error)[:200]!r}") from error


class BoundedCache(Generic[R]):
    """Calls a function and keeps its last results, as many as fit.

    The results are in two generations. A full young generation becomes the old one, and the old one
    is dropped; a result that is used again moves back to the young one. So a frequent result is
    read without a lock.

    Args:
        function: A function of texts, numbers and tuples of numbers that returns one of these.
        most: Bytes of all arguments and results that are kept.
    """

    def __init__(self, function: Callable[..., R], most: int) -> None:
        self._function, self._most = function, most
        self._young: dict[Any, R] = {}
        self._old: dict[Any, R] = {}
        self._lock = threading.Lock()
        self._young_bytes = 0

    def __call__(self, *args: Any, **others: Any) -> R:
        """Returns the result for the arguments; it follows from `args` alone."""
        result = self._young.get(args)
        if result is None:
            result = self._old.get(args)
            if result is None:
                result = self._function(*args, **others)
            self._keep(args, result)
        return result

    def _keep(self, args: Any, result: R) -> None:
        size = 600 + sum(map(_bytes, args)) + _bytes(result)
        if 8 * size > self._most:  # one result must not push out all others
            return
        with self._lock:
            if 2 * (self._young_bytes + size) > self._most:
                self._young, self._old, self._young_bytes = {}, self._young, 0
            self._young_bytes += size
            self._young[args] = result


def _bytes(value: Any) -> int:
    """Returns about the bytes of a text, a number, or a tuple of numbers."""
    return 40 * len(value) if isinstance(value, tuple) else value.__sizeof__()


def drop_marks(text: str) -> str:
    """Returns a text without lone surrogates, except stand-ins."""
    return _HALF_STAND_IN.sub("", text)


def map_texts(tree: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with all its texts changed, keys included."""
    if isinstance(tree, str):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return [map_texts(item, change) for item in tree]
    if isinstance(tree, dict):
        return {change(str(key)): map_texts(item, change) for key, item in tree.items()}
    return tree


def _stand_in(index: int) -> str:
    return chr(0xD800 + index // _LOW) + chr(0xDC00 + index % _LOW)


def _id_of(stand_in: str) -> int:
    high, low = map(ord, stand_in)
    return (high - 0xD800) * _LOW + low - 0xDC00


def _is_text(token: AddedToken) -> bool:
    """Returns whether an added token consists of letters, digits and white space alone."""
    return all(
        unicodedata.category(char)[0] in "LMNZ" or char.isspace() or char == "\u2581"
        for char in token.content
    )


def _never_first(state: Any) -> bool:
    """Turns off the space that Metaspace adds at the start; returns whether there was one."""
    if isinstance(state, list):
        return sum(map(_never_first, state)) > 0
    if not isinstance(state, dict):
        return False
    if state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first":
        state["prepend_scheme"] = "never"
        return True
    return _never_first(list(state.values()))
