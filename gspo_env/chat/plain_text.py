"""Encodes text so that no id of it is a control token."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gspo_env.chat.cache import BoundedCache
from gspo_env.env.base import clean
from gspo_env.errors import ChatTemplateError

logger = logging.getLogger(__name__)

_CACHE = 1 << 26
"""Bytes of the cache in each direction."""
_RARE = "\U00013000"
"""A letter that no small vocabulary has."""


class PlainText:
    """Encodes text with a copy of a tokenizer that has no control tokens.

    A control token is an added token that is special or contains punctuation or a symbol, such as
    `<think>`. Other added tokens are text: Gemma lists line breaks, Phi lists runs of spaces. Their
    ids are the ones that the tokenizer itself gives.

    All text is encoded, except what the tokenizer's own normaliser changes and its vocabulary does
    not know. A character of which the vocabulary only knows a control token is unknown as well.

    Raises:
        ChatTemplateError: It is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatTemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: save it as tokenizer.json"
            )
        self.backend = backend
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
        self._cached = BoundedCache(self._encode, _CACHE)
        self._cached_text = BoundedCache(self._decode, _CACHE)
        self._warned = False
        if not self._later.encode(_RARE, add_special_tokens=False).ids:
            logger.warning(
                "The tokenizer drops characters that its vocabulary does not know: the model does "
                "not read them."
            )

    def encode(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        """Returns the ids of a text.

        Args:
            text: Any text; lone surrogates become question marks.
            first: Whether it is the start of the sequence, where some tokenizers add a space.
        """
        return self._cached(text, first)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of any ids, including control tokens."""
        return self._cached_text(tuple(ids))

    def normalize(self, text: str) -> str:
        """Returns a text as the tokenizer's normaliser changes it."""
        normalizer = self.backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def _decode(self, ids: tuple[int, ...]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def _encode(self, text: str, first: bool) -> tuple[int, ...]:
        pieces, ids = [clean(text)], list[int]()
        while pieces:
            piece = pieces.pop()
            encode = self._first.encode if first else self._later.encode
            found = encode(piece, add_special_tokens=False)
            new = [self._moved.get(i, i) for i in found.ids] if self._moved else found.ids
            if not self.controls.keys().isdisjoint(new):
                # the vocabulary itself can form a control token: split the text until it cannot
                spans = zip(new, found.offsets, strict=True)
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
            instead = self._later.encode("\ufffd", add_special_tokens=False).ids
            instead = [i for i in instead if i not in self.controls]
        self._warn(self._decode(tuple(i for i in ids if i in self.controls)))
        return [new for i in ids for new in (instead if i in self.controls else [i])]

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "The tokenizer cannot encode all characters of %r: the model reads its unknown "
                "token instead (said once).",
                text[:80],
            )


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
