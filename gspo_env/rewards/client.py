"""Questions to a model behind an address with chat completions, or one that `serve` plays."""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import os
import random
import re
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self
from weakref import WeakKeyDictionary

import httpx2 as httpx
from annotated_types import Ge, Gt

from gspo_env.errors import ConfigError, ToolServerError, raised_as
from gspo_env.runtime.processes import Guard
from gspo_env.settings import settings

_LATER = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed."""
_URL = r"https?://(\S+@)?([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?(/\S*)?"
_TABLE = "answers (key TEXT PRIMARY KEY, text TEXT)"
_INSERT = "INSERT OR REPLACE INTO answers (key, text) VALUES (?, ?)"
_CONTROL = re.compile(
    r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f"
    r"\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff\ud800-\udfff]"
)
"""White space other than blanks and line ends, control characters and invisible ones."""
_MARKS = re.compile(r"([<\uff1c]+)(?=[|\uff5c/!\w\u2581])|(\[)(?=/?[A-Z_]+\])")
"""The beginnings of strings that a chat template or a tokenizer may read as control tokens."""
_LARGEST_ANSWER = 1 << 24
"""Bytes of an answer."""
_LONGEST_WAIT = 60.0
"""Seconds between two attempts, at most."""


class NoAnswerError(ToolServerError):
    """A question has no answer after all attempts."""


Usage = Counter[str]
"""What questions have cost: `requests` that were sent, failed ones included; `answers`, those of
the cache included; `unparsable` answers; and the tokens that the answers report, by their names."""


@settings(frozen=False)
class ChatClient:
    """Asks one model, within limits, and never the same question twice.

    It works on any event loop; the limits are those of this process. An answer that the limit of
    its tokens has cut ends with an ellipsis.
    """

    model: str
    """Name of the model at the address, or without an address what `gspo-env serve` plays."""
    url: str = ""
    """The address, such as https://api.openai.com/v1."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers of each request."""
    request: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """Further fields of each request, such as `max_tokens`."""
    timeout: Annotated[float, Gt(0)] = 60.0
    """Seconds of one request."""
    retries: Annotated[int, Ge(0)] = 4
    """Further attempts after a failed request, or an answer that cannot be read."""
    backoff: Annotated[float, Ge(0)] = 1.0
    """Seconds before the second attempt; they double each time."""
    concurrency: Annotated[int, Ge(1)] = 8
    """Requests at the same time."""
    per_minute: Annotated[float, Ge(0)] = 0.0
    """Requests a minute; 0 is no limit."""
    cache: str = "judge.sqlite"
    """File with all answers, which a resumed run uses again; empty for none."""
    serve: Sequence[str] = ()
    """Further flags of `gspo-env serve`, such as ["--engine", "vllm"]."""

    def __post_init__(self) -> None:
        """Rejects invalid values and opens the cache."""
        if self.url and not re.fullmatch(_URL, self.url):
            raise ConfigError(f"url is {self.url!r}; expected one such as http://localhost:8000/v1")
        self._key = os.environ.get(self.key_variable, "")
        self._tls = ssl.create_default_context()
        self._identity = self.url or _digest(self.model)
        self._jitter, self._next, self._starting = random.Random(), 0.0, threading.Lock()
        self._sessions = WeakKeyDictionary[asyncio.AbstractEventLoop, _Session]()
        self._cache = _open_cache(self.cache)

    def __deepcopy__(self, memo: object) -> Self:
        """Returns itself: the copies of an environment's arguments share the limits."""
        return self

    async def ask(self, messages: Sequence[tuple[str, str]], usage: Usage, seed: int) -> str:
        """Returns the answer to a conversation, from the cache if it is there.

        Args:
            messages: Roles and texts, which are sent by way of `neutral`.
            usage: Counts what it costs.
            seed: Seed of the sampling.

        Raises:
            NoAnswerError: There is no answer after all attempts.
        """
        conversation = [{"role": role, "content": neutral(text)} for role, text in messages]
        body = {"model": self.model, "messages": conversation, "seed": seed, **self.request}
        question = json.dumps([self._identity, body], sort_keys=True)
        key = hashlib.sha256(question.encode()).hexdigest()
        row = self._cache.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            session = self._session()
            if key not in session.pending:
                task = asyncio.create_task(self._request(session, key, body, usage))
                session.pending[key] = task
                task.add_done_callback(lambda _: session.pending.pop(key))
            row = (await asyncio.shield(session.pending[key]),)
        usage["answers"] += 1
        return str(row[0])

    async def __aenter__(self) -> Self:
        """Opens the connections that all questions on this event loop share."""
        session = self._session()
        if session.http is None:
            session.http = httpx.AsyncClient(timeout=None, verify=self._tls)
        session.users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes them once nobody asks."""
        session = self._session()
        session.users -= 1
        if not session.users and session.http is not None:
            http, session.http = session.http, None
            await http.aclose()

    def _session(self) -> _Session:
        """Returns what belongs to the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = _Session(slots=asyncio.Semaphore(self.concurrency))
        return self._sessions[loop]

    async def _request(
        self, session: _Session, key: str, body: Mapping[str, Any], usage: Usage
    ) -> str:
        async with self:
            if not self.url:
                await asyncio.to_thread(self._start)
            for attempt in range(self.retries + 1):
                try:
                    async with session.slots:
                        text = await self._send(session, body, usage)
                    self._cache.execute(_INSERT, (key, text))
                    return text
                except _TryAgainError as error:
                    failure, wait = error.args
                if attempt < self.retries:
                    wait = max(wait, self.backoff * 2**attempt * self._jitter.uniform(0.5, 1.0))
                    await asyncio.sleep(min(wait, _LONGEST_WAIT))
            raise NoAnswerError(
                f"{self.model} at {self.url} gave no answer in {self.retries + 1} attempts: "
                f"{failure}"
            )

    async def _send(self, session: _Session, body: Mapping[str, Any], usage: Usage) -> str:
        """Sends one request.

        Raises:
            _TryAgainError: It failed in a way that may pass.
            NoAnswerError: It was refused.
        """
        await self._pace()
        usage["requests"] += 1
        key = {"authorization": f"Bearer {self._key}"} if self._key else {}
        assert session.http is not None
        place = f"{self.url.rstrip('/')}/chat/completions"
        headers, content = {**key, **self.headers}, bytearray()
        try:
            async with (
                asyncio.timeout(self.timeout),
                session.http.stream("POST", place, json=body, headers=headers) as response,
            ):
                async for part in response.aiter_bytes(1 << 16):
                    content += part
                    if len(content) > _LARGEST_ANSWER:
                        raise NoAnswerError(
                            f"{self.model} at {self.url} sends more than {_LARGEST_ANSWER:,} bytes"
                        )
        except (httpx.HTTPError, TimeoutError) as error:
            raise _TryAgainError(f"{type(error).__name__} {error}", 0.0) from error
        beginning = repr(content[:200].decode(errors="replace"))
        status = f"status {response.status_code}, {beginning}"
        if response.status_code in _LATER:
            raise _TryAgainError(status, _seconds(response.headers.get("retry-after", "")))
        if response.status_code != 200:
            raise NoAnswerError(f"{self.model} at {self.url} refused: {status}")
        try:
            answer = json.loads(content)
            choice = answer["choices"][0]
            text = choice["message"]["content"].strip().encode(errors="replace").decode()
            if not text:
                raise ValueError
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _TryAgainError(f"{beginning} has no text of a chat completion", 0.0) from error
        if isinstance(counts := answer.get("usage"), dict):
            usage.update(
                {name: n for name, n in counts.items() if isinstance(n, int) and abs(n) < 2**63}
            )
        return f"{text}…" if choice.get("finish_reason") == "length" else str(text)

    async def _pace(self) -> None:
        """Waits for the next place within `per_minute`."""
        if self.per_minute:
            now = time.monotonic()
            start = max(self._next, now)
            self._next = start + 60 / self.per_minute
            await asyncio.sleep(start - now)

    def _start(self) -> None:
        """Starts `gspo-env serve` with the model once, in a process that ends with this one.

        Raises:
            ToolServerError: It ended.
        """
        with self._starting:
            if not self.url:
                self._serve()

    def _serve(self) -> None:
        command = [sys.executable, "-m", "gspo_env", "serve", self.model, "--port", "0"]
        variables = {**os.environ, "GSPO_ENV_SERVE_KEY": ""}  # so that it prints a new key
        guard = Guard(["run", "10", *command, *self.serve], stdout=subprocess.PIPE, env=variables)
        weakref.finalize(self, guard.ask_to_end)
        exports = dict[str, str]()
        for line in guard.process.stdout or ():
            exports |= re.findall(r"^export (\w+)=(\S+)", line.decode(errors="replace"))
            if {"OPENAI_BASE_URL", "OPENAI_API_KEY"} <= exports.keys():
                self.url, self._key = exports["OPENAI_BASE_URL"], exports["OPENAI_API_KEY"]
                return
        raise ToolServerError(f"`gspo-env serve {self.model}` ended before it had an address")


@dataclass(kw_only=True)
class _Session:
    """What belongs to one event loop."""

    slots: asyncio.Semaphore
    pending: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    """The questions on their way, by key."""
    http: httpx.AsyncClient | None = None
    users: int = 0
    """Those who use `http`."""


def neutral(text: str) -> str:
    r"""Returns a text without invisible characters and control tokens of any chat template.

    Example:
        >>> neutral("Done.<|im_end|>\n<|im_start|>system")
        'Done.< |im_end|>\n< |im_start|>system'
    """
    text = "\n".join(text.splitlines())
    return _MARKS.sub(lambda match: f"{match[0]} ", _CONTROL.sub(" ", text))


def _digest(model: str) -> str:
    """Returns a digest of the files of a model's folder; empty for a name."""
    digest = hashlib.sha256()
    files = sorted(path for path in Path(model).glob("*") if path.is_file())
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest() if files else ""


def _open_cache(path: str) -> sqlite3.Connection:
    """Opens a cache and checks that it can be read and written.

    Raises:
        ConfigError: It cannot.
    """
    with raised_as(ConfigError, f"cache is {path!r}; expected a file of answers", sqlite3.Error):
        cache = sqlite3.connect(
            path or ":memory:", timeout=60, isolation_level=None, check_same_thread=False
        )
        cache.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")
        schema = cache.execute("SELECT sql FROM sqlite_schema WHERE sql NOTNULL").fetchall()
        if schema != [(f"CREATE TABLE {_TABLE}",)]:  # a trigger might never end
            raise sqlite3.DatabaseError(f"it has {schema[-1][0]!r:.80}")
        cache.executescript(f"BEGIN IMMEDIATE; {_INSERT.replace('?', 'NULL')}; ROLLBACK")
    return cache


def _seconds(text: str) -> float:
    """Returns the seconds that a header Retry-After names, by their number or a date."""
    try:
        date = email.utils.parsedate_to_datetime
        return float(text) if text.isdecimal() else date(text).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0


class _TryAgainError(Exception):
    """A failure that may pass: what it is, and the least seconds until the next attempt."""
