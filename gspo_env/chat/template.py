"""Renders conversations with a tokenizer's chat template.

A template may edit texts: strip them, split and join them, remove `/think`, decide by what they
say. It therefore reads every text as it is. What it writes itself is told apart from what it copies
by construction: its source is compiled with a stand-in for each control token (see
`gspo_env.chat.encode`), and no message or tool contains a stand-in, so no edit can make one.

Some templates put control tokens together, as in `'<|' + message.role + '|>'`. A mark before `<|`
shows them. They count only if the same ones appear, in the same order, in a rendering whose texts
cannot be a part of one.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

from gspo_env.chat.bounds import BoundedTemplate
from gspo_env.chat.encode import BoundedCache, TextEncoder, drop_marks, map_texts
from gspo_env.errors import ChatTemplateError, TemplateBoundsError
from gspo_env.redaction import clean
from gspo_env.registry import load_function
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.types import ToolCall

logger = logging.getLogger(__name__)

Chat = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`; some with `tool_calls` and other fields."""
Schemas = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's function format."""

_ID, _LONG_ID = "call00000", "call_0123456789abcdef"
_CACHE_BYTES = 1 << 24
"""Bytes of the conversations that are kept with their renderings."""
_LONGEST_ERROR = 500
_GLUE, _SEPARATOR = "\udfff", "\udffe"
"""Marks what may begin a control token in a template, and the letters of texts; in no rendering."""
_LETTER = re.compile("[\ud800-\udbff][\udc00-\udfff]|\\S")
_SCHEMA_WORDS = """type function name description parameters object properties required string
number integer boolean array null items enum default title format anyOf oneOf allOf const $ref
id arguments"""
"""Words of JSON schemas and calls, which templates compare with."""


class ChatTemplate:
    """Renders conversations in which no text can become a control token.

    Raises:
        ChatTemplateError: The tokenizer has no chat template or is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "the tokenizer has no chat template, which multi-turn prompts need: set "
                "`tokenizer.chat_template` or use an instruction-tuned model"
            )
        self.tokenizer = tokenizer
        self.text = TextEncoder(tokenizer)
        self._nonce = f"{secrets.randbits(64):020d}"
        self._compile = lru_cache(8)(lambda source: BoundedTemplate(source, self._mark))
        self._rendered = BoundedCache(self._render_fitted, _CACHE_BYTES)
        special = tokenizer.special_tokens_map
        self._variables = {"documents": None} | {
            k: self._with_stand_ins(v) for k, v in special.items()
        }
        names = self.text.control_ids
        self._longest = max(map(len, names), default=0)
        self._glued = re.compile(f"{_GLUE}({self.text.control_pattern.pattern})?")
        self._beginnings = {n[:k].casefold() for n in names for k in range(1, len(n))}
        bare_names = {re.sub(r"\W", "", name) for name in names}
        self._kept_words = set(_SCHEMA_WORDS.split()) - bare_names
        self._warnings: set[str] = set()

    def ids(self, messages: Chat, schemas: Schemas = (), *, generation: bool = True) -> list[int]:
        """Returns the ids of a conversation of plain texts; see `render`."""
        messages = [map_texts(message, clean) for message in messages]
        rendering = self.render(messages, schemas, generation=generation)
        return self.text.encode_rendering(rendering, first=True)

    def render(self, messages: Chat, schemas: Schemas = (), *, generation: bool = True) -> str:
        """Returns the rendering of a conversation.

        What the template does not accept is changed. A system message that it refuses goes before
        the first user message, and later ones that it refuses or drops are the user's. Messages of
        the user that it refuses in a row are joined. Tools that it does not show are listed in the
        system message, the role `tool`, if refused, is `user`, and calls that it does not show are
        appended to the text of their message.

        Args:
            messages: The conversation. Texts of the policy may be renderings.
            schemas: The tools.
            generation: Whether the start of the assistant's next message follows.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        conversation = messages, schemas, generation
        # the episodes of a group begin with the same prompt
        rendering = self._rendered(repr(conversation), conversation=conversation)
        if any(m.get("tool_calls") and m["content"].strip() not in rendering for m in messages):
            self._warn("drops what an answer says beside its tool calls")
        return rendering

    def _render_fitted(self, key: str, conversation: tuple[Chat, Schemas, bool]) -> str:
        """Renders a conversation; `key` identifies it in the cache."""
        messages, schemas, generation = conversation
        if any(m.get("tool_calls") for m in messages) and self._limits_ids:
            messages = _change("with_ids", messages, names=self._call_id != _ID)
        shown = [self.shows(message) for message in messages]
        if self.reads_calls and not all(shown):
            self._warn("does not show these tool calls; the text of their message has them")
        write = _change_of("with_text_arguments") if self.takes_text_arguments else dict
        messages = [
            (write if is_shown else _change_of("with_calls"))(m) if m.get("tool_calls") else m
            for m, is_shown in zip(messages, shown, strict=True)
        ]
        schemas = map_texts(schemas, clean)
        try:
            return self._render(*self._fit(messages, schemas), generation)
        except ChatTemplateError as error:
            if not schemas or not self.shows_tools:
                raise
            self._warn(f"cannot show these tools ({error}); the system message lists them")
            return self._render(
                *self._fit(_change_of("list_tools")(messages, schemas), ()), generation
            )

    def marker(self, index: int) -> str:
        """Returns a text that stands for a message; nobody can guess it, and its case is none."""
        return f"{self._nonce}{index:06d}"

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template lists tools."""
        if not self.reads_calls:
            return False
        name = self.marker(0)
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": name, "description": "x", "parameters": parameters}
        schema = {"type": "function", "function": function}
        roles = ("system", "user") if self.takes_system else ("user",)
        return name in self._probe(_chat(roles), [schema])

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows the calls of an assistant's message."""
        return self.reads_calls and bool(self._shown_call({}) or self.takes_text_arguments)

    def shows(self, message: Mapping[str, Any]) -> bool:
        """Returns whether the template shows the calls of a message.

        Some templates refuse or drop the second call, or calls beside a text.
        """
        calls = message.get("tool_calls", ())
        is_alone = len(calls) < 2 or self._shows_several
        is_plain = not message["content"] or self._shows_beside_text
        return not calls or (self.shows_calls and is_alone and is_plain)

    @cached_property
    def _shows_several(self) -> bool:
        one, two = (self._shown_call(self._empty, calls=n).count(self._called) for n in (1, 2))
        return two > one

    @cached_property
    def _shows_beside_text(self) -> bool:
        return bool(self._shown_call(self._empty, contents=("x",)))

    @property
    def _empty(self) -> Any:
        return "{}" if self.takes_text_arguments else {}

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether the template shows calls only if their arguments are JSON text."""
        return not self._shown_call({}) and bool(self._shown_call("{}"))

    @cached_property
    def reads_calls(self) -> bool:
        """Whether the calls that the template shows, if it does, are read back."""
        texts = [
            self._shown_call(arguments, n, contents=("", "x"))
            for arguments in ({"key": "x"}, '{"key": "x"}')
            for n in (2, 3)
        ]
        shown = next(filter(None, texts), "")
        if not shown or getattr(self.tokenizer, "response_template", None) is not None:
            return True
        user, action = _chat(("user", "assistant"))
        plain = self._probe([user, action | {"content": self.marker(1)}], generation=False)
        before, _, after = plain.partition(self.marker(1))
        # a call without a mark is read only where it is the whole action
        actions = (
            shown.removeprefix(self._probe([user])),
            shown.removeprefix(before).removesuffix(after),
        )
        parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
        tool: Any = SimpleNamespace(name=self._called, parameters=parameters, strict=False)
        calls = chain(*(parse_tool_calls(self.text.to_text(text), [tool]) for text in actions))
        return ToolCall(name=self._called, arguments={"key": "x"}) in [
            replace(call, id="") for call in calls if isinstance(call, ToolCall)
        ]

    @property
    def _called(self) -> str:
        return f"f{self.marker(0)}"

    @cached_property
    def _call_id(self) -> str:
        """The id with which a call shows its name; some of Kimi's templates write only ids."""
        ids = (_ID, f"functions.{self._called}:0")
        shown = (
            i for i in ids if self._shown_call({}, call_id=i) or self._shown_call("{}", call_id=i)
        )
        return next(shown, _ID)

    @cached_property
    def _limits_ids(self) -> bool:
        """Whether the template takes only some ids of calls."""
        return self.shows_calls and not self._shown_call(self._empty, call_id=_LONG_ID)

    @cached_property
    def _takes_results(self) -> bool:
        """Whether the template shows the role `tool` behind a call."""
        return self.marker(1) in self._shown_call(self._empty, roles=("tool",))

    def _shown_call(
        self,
        arguments: Any,
        messages: int = 3,
        calls: int = 1,
        call_id: str = "",
        roles: Sequence[str] = ("tool", "user"),
        contents: Sequence[str] = ("x", ""),
    ) -> str:
        """Returns the rendering of messages, the second with a call, or nothing if it is absent."""
        name, call_id = self._called, call_id or self._call_id
        function = {"name": name, "arguments": arguments}
        call = {"type": "function", "id": call_id, "function": function}
        for content in contents:
            for role in roles:
                user, action, result = _chat(("user", "assistant", role))
                action |= {"tool_calls": [call] * calls, "content": content}
                result |= {"content": self.marker(1)}
                result |= {"tool_call_id": call_id, "name": name} if role == "tool" else {}
                shown = self._probe([user, action, result][:messages], generation=messages > 2)
                if name in shown:
                    return shown
        return ""

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template accepts a system message."""
        return self._accepts("system", "user")

    @cached_property
    def takes_tool_role(self) -> bool:
        """Whether the template accepts a message of the role `tool` after an action."""
        return self._accepts("user", "assistant", "tool")

    @cached_property
    def _takes_systems(self) -> bool:
        return self._accepts("system", "system", "user", "assistant", "system", "user")

    @cached_property
    def _takes_repeats(self) -> bool:
        return self._accepts("user", "user")

    @cached_property
    def _takes_empty(self) -> bool:
        chat = _chat(("user", "assistant", "user"))
        return bool(self._probe([chat[0], chat[1] | {"content": ""}, chat[2]]))

    def _accepts(self, *roles: str) -> bool:
        """Returns whether the template shows messages of these roles, each once."""
        chat = [{"role": role, "content": self.marker(n)} for n, role in enumerate(roles)]
        rendering = self._probe(chat)
        return all(rendering.count(message["content"]) == 1 for message in chat)

    def _probe(self, messages: Chat, schemas: Schemas = (), generation: bool = True) -> str:
        """Returns the rendering of a short conversation, or nothing if the template refuses it."""
        try:
            return self._render(messages, schemas, generation)
        except TemplateBoundsError:  # every rendering would fail, and take as long
            raise
        except ChatTemplateError as error:
            logger.info("%s", error)
            return ""

    def _render(self, messages: Chat, schemas: Schemas = (), generation: bool = True) -> str:
        rendering, composed = self._join(self._run(messages, schemas, generation))
        if not composed:
            return rendering
        separate = [
            {key: value if key == "role" else self._separate(value) for key, value in m.items()}
            for m in messages
        ]
        run = self._run(separate, self._separate(schemas), generation)
        safe, expected = self._join(run)
        return rendering if composed == expected else safe

    def _run(self, messages: Chat, schemas: Schemas, generation: bool) -> str:
        """Returns the text of a conversation, with marks.

        Raises:
            ChatTemplateError: The template raises, or runs too many lines.
        """
        tools = list(schemas) or None
        try:
            template = self._compile(self.tokenizer.get_chat_template(tools=tools))
            return template.render(
                messages=[dict(message) for message in messages],
                tools=tools,
                add_generation_prompt=generation,
                **self._variables,
            )
        except ValueError as error:
            roles = "messages of " + ", ".join(message["role"] for message in messages)
            text = f"the chat template refuses {roles[:_LONGEST_ERROR]}: "
            exceeds = isinstance(error, TemplateBoundsError)
            kind = TemplateBoundsError if exceeds else ChatTemplateError
            raise kind(text + str(error)[:_LONGEST_ERROR]) from error

    def _join(self, text: str) -> tuple[str, list[str]]:
        """Returns the rendering without marks, and the control tokens that were put together."""
        composed: list[str] = []

        def join(match: re.Match[str]) -> str:
            if not match[1]:
                return ""
            composed.append(match[1])
            return self.text.to_rendering(match[1])

        return drop_marks(self._glued.sub(join, text)), composed

    def _mark(self, text: str, is_output: bool) -> str:
        """Returns a text of the template with stand-ins and marks."""
        text = self._with_stand_ins(text)
        if not is_output:
            return text
        # a place for a value, as in `<|{}|>` and `<|%s|>`, ends a piece too
        spans = [(m.start(), m.end()) for m in re.finditer(r"[^{%]+", text)]
        starts = {
            n
            for start, end in spans
            for n in range(max(start, end - self._longest), end)
            if text[n:end].casefold() in self._beginnings
        }
        return "".join(_GLUE * (n in starts) + char for n, char in enumerate(text))

    def _with_stand_ins(self, text: Any) -> Any:
        return self.text.to_rendering(text) if isinstance(text, str) else text

    def _separate(self, tree: Any) -> Any:
        """Returns texts with their letters apart, which cannot be part of a control token."""
        return map_texts(
            tree,
            lambda text: (
                text
                if text in self._kept_words
                else _LETTER.sub(rf"{_SEPARATOR}\g<0>{_SEPARATOR}", text)
            ),
        )

    def _fit(self, messages: Chat, schemas: Schemas) -> tuple[Chat, Schemas]:
        """Returns messages and tools that the template accepts."""
        if schemas and not self.shows_tools:
            what = "does not list tools" if self.reads_calls else "writes calls that are not read"
            self._warn(f"{what}; the system message lists the tools and how to call one")
            messages, schemas = _change_of("list_tools")(messages, schemas), ()
        if any(m["role"] == "system" for m in messages[1:]) and not self._takes_systems:
            self._warn("refuses or drops system messages behind the first; the user says them")
            messages = _change("with_one_system", messages)
        roles = [message["role"] for message in messages[:2]]
        if roles[0] == "system" and not self.takes_system:
            self._warn("refuses system messages; the first user message begins with the text")
            messages = _change("folded", messages)
        elif roles[0] == "system" and roles[1:] != ["user"] and not self._accepts(*roles):
            self._warn("drops or refuses a system message without a user's; the user says it")
            messages = _change("folded", messages)
        if any(m["role"] == "tool" for m in messages) and not self.takes_tool_role:
            messages = _change("without_results", messages, keeps=self._takes_results)
        if not self._takes_repeats:
            messages = _change("without_repeats", messages)
        if not self._takes_empty:
            messages = _change("without_empty", messages)
        return messages, schemas

    def _warn(self, what: str) -> None:
        if what not in self._warnings:
            self._warnings.add(what)
            logger.warning("The chat template %s.", what)


def _change_of(name: str) -> Any:
    return load_function(f"gspo_env.chat.fit:{name}", "change")


def _change(name: str, messages: Chat, **options: bool) -> Chat:
    changed: Chat = _change_of(name)(messages, **options)
    return changed


def _chat(roles: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": "x"} for role in roles]
