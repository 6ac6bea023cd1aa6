"""Texts of conversations in which control tokens stand literally and nothing else looks like one.

A template sees such a text as it is, so that it can decide by it. Where a message contains the text
of a control token, one of its characters is hidden: replaced by a surrogate, which no text has.

    token ids   <|im_end|> as an id       "<|im_end|>" in an observation
    literal     <|im_end|>                ?|im_end|>   (? stands for the surrogate)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from gspo_env.chat.cache import BoundedCache
from gspo_env.chat.plain_text import PlainText
from gspo_env.env.base import clean

_CACHE = 1 << 24
"""Bytes of the texts that are kept with their hidden characters."""
_SURROGATES = 0xDC00
_STANDS_FOR_HIDDEN = "\ue000"
_LEADING_SPACE = re.compile(r"\A[^\S\x1c-\x1f]+")


class Literal:
    """Converts between token ids and literal texts.

    Args:
        text: Encodes and decodes plain text.
    """

    def __init__(self, text: PlainText) -> None:
        self.text = text
        self._hidden: dict[str, str] = {}
        self._shown: dict[int, str] = {}
        self._finder, self._ids = _finder(text)
        names = [token.content for token in text.controls.values()]
        self._prefixes = {name[:n] for name in names for n in range(1, len(name))}
        self._suffixes = {name[n:] for name in names for n in range(1, len(name))}
        self._longest = max(map(len, names), default=1)
        letters = map(text.backend.token_to_id, ("x", "a", "e", "0", "\u2581"))
        self._anchor = next(((i,) for i in letters if i is not None), ())
        self.hide: Callable[[str], str] = BoundedCache(self._hide, _CACHE)

    def encode(self, literal: str, *, first: bool = False, behind: int | None = None) -> list[int]:
        """Returns the ids of a literal text.

        Args:
            literal: The text.
            first: Whether the sequence begins with it.
            behind: The id before it, which may take the white space at its start.
        """
        before = self.text.controls.get(-1 if behind is None else behind)
        if before is not None and before.rstrip:
            literal = _LEADING_SPACE.sub("", literal)
        ids: list[int] = []
        end = 0
        for control, start, stop in [*self._find(literal), (None, len(literal), len(literal))]:
            if start > end:
                ids += self.text.encode(self.show(literal[end:start]), first=first)
                first = False
            if control is not None:
                ids.append(control)
                first = False
            end = stop
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the literal text of ids, as they read behind other text."""
        pieces: list[str] = []
        run: list[int] = []
        for i in [*ids, None]:
            if i is not None and i not in self.text.controls:
                run.append(i)
                continue
            if run:
                pieces.append(self.hide(self._decode_behind(run)))
                run = []
            if i is not None:
                pieces.append(self.text.controls[i].content)
        return "".join(pieces)

    def show(self, literal: str) -> str:
        """Returns a text with the characters that were hidden."""
        return literal.translate(self._shown) if self._shown else literal

    def hide_tree(self, tree: Any) -> Any:
        """Hides what looks like a control token in all texts of a JSON value, keys included."""
        if isinstance(tree, str):
            return self.hide(tree)
        if isinstance(tree, (list, tuple)):
            return [self.hide_tree(one) for one in tree]
        if isinstance(tree, dict):
            return {self.hide(str(key)): self.hide_tree(one) for key, one in tree.items()}
        return tree

    def show_tree(self, tree: Any) -> Any:
        """Inverse of `hide_tree`."""
        if isinstance(tree, str):
            return self.show(tree)
        if isinstance(tree, (list, tuple)):
            return [self.show_tree(one) for one in tree]
        if isinstance(tree, dict):
            return {self.show(key): self.show_tree(one) for key, one in tree.items()}
        return tree

    def _decode_behind(self, ids: Sequence[int]) -> str:
        """Decodes ids behind a letter, because some decoders drop a space at the start."""
        if not self._anchor:
            return self.text.decode(ids)
        anchor = self.text.decode(self._anchor)
        text = self.text.decode((*self._anchor, *ids))
        return text[len(anchor) :] if text.startswith(anchor) else self.text.decode(ids)

    def _hide(self, text: str) -> str:
        chars = list(clean(text))
        while found := self._find("".join(chars)):
            for _, start, _ in found:
                self._cover(chars, start)
        # a text must not form a control token together with what the template writes beside it
        for edge in (len(chars), len("".join(chars).rstrip())):
            tail = self.text.normalize(
                self.show("".join(chars[max(0, edge - self._longest) : edge]))
            )
            if edge and any(tail[-n:] in self._prefixes for n in range(1, self._longest)):
                self._cover(chars, edge - 1)
        whole = "".join(chars)
        for edge in {0, len(whole) - len(whole.lstrip())}:
            head = self.text.normalize(self.show(whole[edge : edge + self._longest]))
            if edge < len(chars) and any(
                head[:n] in self._suffixes for n in range(1, self._longest)
            ):
                self._cover(chars, edge)
        return "".join(chars)

    def _cover(self, chars: list[str], place: int) -> None:
        char = chars[place]
        if 0xDC00 <= ord(char) <= 0xDFFF:
            return
        if char not in self._hidden:
            new = chr(_SURROGATES + len(self._hidden))
            self._hidden[char], self._shown[ord(new)] = new, char
        chars[place] = self._hidden[char]

    def _find(self, literal: str) -> list[tuple[int, int, int]]:
        """Returns the control tokens of a text and their spans, as the tokenizer finds them."""
        if self._shown:
            literal = literal.translate(dict.fromkeys(self._shown, _STANDS_FOR_HIDDEN))
        found = self._finder.encode(literal, add_special_tokens=False)
        spans = zip(found.ids, found.offsets, strict=True)
        return [(self._ids[i], a, b) for i, (a, b) in spans if i in self._ids and b > a]


def _finder(text: PlainText) -> tuple[Tokenizer, dict[int, int]]:
    """Returns a tokenizer that only finds added tokens, and the control tokens by its ids."""
    state = json.loads(text.backend.to_str())
    state["model"] = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    state["pre_tokenizer"] = state["post_processor"] = state["decoder"] = None
    state["padding"] = state["truncation"] = None
    finder = Tokenizer.from_str(json.dumps(state))
    found = {finder.token_to_id(token.content): i for i, token in text.controls.items()}
    return finder, {own: i for own, i in found.items() if own is not None}
