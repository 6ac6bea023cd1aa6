"""Answers requests with a model, from the same token ids as in training."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from gspo_env.chat import ChatTokenizer, Transcript
from gspo_env.engines import Engine, Sampling, check_completion
from gspo_env.errors import ChatTemplateError
from gspo_env.rollout import RolloutConfig
from gspo_env.seeding import derive_seed
from gspo_env.serving.records import RefusedError, Reply, Request
from gspo_env.tool_calls import read_action
from gspo_env.types import Message, Prompt, StepInfo

_KEPT = 256
"""Conversations whose sampled ids are kept, so that the next request continues them."""
_END_SECONDS = 10.0
_MOST_RESENT = 64
"""Turns of one transcript, after which it begins anew, so that each request takes bounded time."""


@dataclass(kw_only=True, slots=True)
class _Talk:
    """A conversation that the policy has answered."""

    transcript: Transcript
    session: str
    turns: int = 0
    caches: set[str] = field(default_factory=set)


class ChatPolicy:
    """Answers any number of requests at the same time, batched by the engine.

    A request that goes on with an earlier answer continues its sampled ids, as in training.

    Args:
        engine: Samples the answers; it is used in a thread of this object's own.
        chat: The tokenizer.
        limits: The temperature, and the limits of an answer and of the context.
        vocab_size: Number of ids of the model; None if it is not known.
        seed: Seed of requests that have none.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        limits: RolloutConfig,
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self._engine, self._chat, self._limits = engine, chat, limits
        self._size, self._seed = vocab_size, seed
        self._numbers = itertools.count()
        self._talks: OrderedDict[str, _Talk] = OrderedDict()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gspo-env-policy", daemon=True)
        self._thread.start()

    def __call__(self, request: Request) -> Future[Reply]:
        """Answers a request; see `gspo_env.serving.PolicyServer.open`."""
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    def close(self) -> None:
        """Ends the thread; the engine stays."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _answer(self, request: Request) -> Reply:
        number = next(self._numbers)
        talk = self._take(request, number)
        try:
            return await self._continue(talk, request, number)
        except BaseException:  # such as a program that hangs up
            self._release(talk)
            raise

    async def _continue(self, talk: _Talk, request: Request, number: int) -> Reply:
        """Answers a request in its conversation, which is kept unless there is no answer."""
        try:
            opening = talk.transcript.read(
                "",
                request=StepInfo(messages=request.messages, tools=request.tools, stop=request.stop),
            )
        except ChatTemplateError as error:
            raise RefusedError(str(error), param="messages") from None
        most = self._limits.max_turn_tokens
        limit = most if request.max_tokens is None else min(request.max_tokens, most)
        if len(opening.ids) + limit > self._limits.max_context:
            self._release(talk)
            nothing = Message(role="assistant", content="")
            return Reply(message=nothing, finish_reason="context", prompt_tokens=len(opening.ids))
        heat, seed = request.temperature, request.seed
        sampling = Sampling(
            max_tokens=limit,
            temperature=self._limits.temperature if heat is None else heat,
            stop_ids=self._chat.stop_ids,
            ends=self._chat.ends(request.stop),
            seed=derive_seed("serve", self._seed, number) if seed is None else seed % 2**63,
        )
        name = f"{talk.session}/{opening.session}"
        talk.caches.add(name)
        done = await self._engine.generate(opening.ids, sampling, name)
        check_completion(done, sampling, self._size)
        saying = talk.transcript.write(done.token_ids)
        message, _ = read_action(saying.text, request.tools, saying.message)
        self._keep(request, message, talk)
        return Reply(
            message=message,
            finish_reason="length" if done.finish_reason == "length" else "stop",
            prompt_tokens=len(opening.ids),
            completion_tokens=len(done.token_ids),
        )

    def _take(self, request: Request, number: int) -> _Talk:
        """Returns the conversation that a request continues, or a new one."""
        for key in reversed(list(_keys(request.messages))):
            if (talk := self._talks.pop(key, None)) is not None:
                if talk.turns < _MOST_RESENT:
                    return talk
                self._release(talk)
                break
        prompt = Prompt(tools=request.tools)
        return _Talk(transcript=Transcript(self._chat, prompt), session=f"serve:{number}")

    def _keep(self, request: Request, message: Message, talk: _Talk) -> None:
        """Keeps a conversation for the request that continues it."""
        talk.turns += 1
        *_, key = _keys((*request.messages, message))
        if (other := self._talks.pop(key, None)) is not None:
            self._release(other)
        self._talks[key] = talk
        while len(self._talks) > _KEPT:
            self._release(self._talks.popitem(last=False)[1])

    def _release(self, talk: _Talk) -> None:
        for name in talk.caches:
            self._engine.release(name)
        talk.caches.clear()


def _keys(messages: tuple[Message, ...]) -> Iterator[str]:
    """Yields a name for the conversation up to each of the assistant's messages."""
    digest = hashlib.sha256()
    for message in messages:
        calls = [[call.name, call.arguments] for call in message.tool_calls]
        told = [message.role, message.content.strip(), calls]
        digest.update(json.dumps(told, sort_keys=True).encode())
        if message.role == "assistant":
            yield digest.hexdigest()
