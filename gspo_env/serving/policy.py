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

from gspo_env.chat import ChatTokenizer, PromptIds, Transcript
from gspo_env.engines import Engine, Sampling, check_completion
from gspo_env.errors import ChatTemplateError, PromptLengthError, RefusedError
from gspo_env.rollout import RolloutConfig
from gspo_env.seeding import derive_seed
from gspo_env.serving.session import Reply, Request
from gspo_env.tools.request import read_action
from gspo_env.types import Message, Prompt, StepInfo

_KEPT = 256
"""Conversations whose sampled ids are kept, so that later requests can continue them."""
_COLDEST = 1e-6
"""Lowest temperature that is sampled with; logits divided by a lower one are infinite."""
_END_SECONDS = 10.0
_MOST_TURNS = 64
"""Turns of one transcript, after which it begins anew, so that each request takes bounded time."""


@dataclass(kw_only=True, slots=True)
class _Conversation:
    """A conversation that the policy has answered."""

    transcript: Transcript
    session: str
    turns: int = 0
    caches: set[str] = field(default_factory=set)


class ChatPolicy:
    """Answers any number of requests at the same time, batched by the engine.

    A request that follows an earlier answer continues its sampled ids, as in training.

    Args:
        engine: Samples the answers; it is used in a thread of this object's own.
        chat: The tokenizer.
        limits: The temperature, and the limits of an answer and of the context.
        vocab_size: Number of ids of the model, if known.
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
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
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
        if request.counts:
            return self._count(request)
        number = next(self._numbers)
        conversation = self._take(request, number)
        try:
            return await self._continue(conversation, request, number)
        except BaseException:  # such as a program that hangs up
            self._release(conversation)
            raise

    async def _continue(self, conversation: _Conversation, request: Request, number: int) -> Reply:
        """Answers a request in its conversation, which is kept unless there is no answer."""
        try:
            prompt = _read(conversation, request)
            limit = self._limits.answer_tokens(len(prompt.ids), request.max_tokens, fills=True)
        except PromptLengthError as error:
            self._release(conversation)
            return _refuse(error)
        temperature, seed = request.temperature, request.seed
        temperature = self._limits.temperature if temperature is None else temperature
        sampling = Sampling(
            max_tokens=limit,
            temperature=temperature if temperature >= _COLDEST else 0.0,
            stop_ids=self._chat.stop_ids,
            ends=self._chat.ends(request.stop),
            seed=derive_seed("serve", self._seed, number) if seed is None else seed % 2**63,
        )
        name = f"{conversation.session}/{prompt.session}"
        conversation.caches.add(name)
        completion = await self._engine.generate(prompt.ids, sampling, name)
        check_completion(completion, sampling, self._size)
        action = conversation.transcript.write(completion.token_ids)
        message, _ = read_action(
            action.text, request.tools, action.message, in_reasoning=action.in_reasoning
        )
        self._keep(request, message, conversation)
        return Reply(
            message=message,
            finish_reason="length" if completion.finish_reason == "length" else "stop",
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(completion.token_ids),
            stop_text=action.stop_text,
        )

    def _count(self, request: Request) -> Reply:
        """Returns the number of tokens of a prompt; the conversation that it continues stays."""
        key = self._find(request)
        conversation = None if key is None else self._conversations[key]
        if conversation is None or conversation.turns >= _MOST_TURNS:
            conversation = self._begin(request)
        try:
            tokens = len(_read(conversation, request).ids)
        except PromptLengthError as error:
            return _refuse(error)
        return Reply(message=Message(role="assistant", content=""), prompt_tokens=tokens)

    def _find(self, request: Request) -> str | None:
        """Returns the name of the kept conversation that a request continues."""
        names = reversed(list(_keys(request.messages)))
        return next((name for name in names if name in self._conversations), None)

    def _take(self, request: Request, number: int) -> _Conversation:
        """Returns the conversation that a request continues, or a new one."""
        if (key := self._find(request)) is not None:
            conversation = self._conversations.pop(key)
            if conversation.turns < _MOST_TURNS:
                return conversation
            self._release(conversation)
        return self._begin(request, number)

    def _begin(self, request: Request, number: int = -1) -> _Conversation:
        prompt = Prompt(tools=request.tools)
        return _Conversation(
            transcript=Transcript(self._chat, prompt, self._limits.max_context),
            session=f"serve:{number}",
        )

    def _keep(self, request: Request, message: Message, conversation: _Conversation) -> None:
        """Keeps a conversation for the request that continues it."""
        conversation.turns += 1
        *_, key = _keys((*request.messages, message))
        if (other := self._conversations.pop(key, None)) is not None:
            self._release(other)
        self._conversations[key] = conversation
        while len(self._conversations) > _KEPT:
            self._release(self._conversations.popitem(last=False)[1])

    def _release(self, conversation: _Conversation) -> None:
        for name in conversation.caches:
            self._engine.release(name)
        conversation.caches.clear()


def _read(conversation: _Conversation, request: Request) -> PromptIds:
    """Returns the prompt of a request.

    Raises:
        PromptLengthError: It is too long by its characters.
        RefusedError: The template refuses the conversation.
    """
    info = StepInfo(messages=request.messages, tools=request.tools, stop=request.stop)
    try:
        return conversation.transcript.read("", request=info)
    except PromptLengthError:
        raise
    except ChatTemplateError as error:
        raise RefusedError(str(error), param="messages") from None


def _refuse(error: PromptLengthError) -> Reply:
    """Returns the reply to a prompt that does not fit."""
    message = Message(role="assistant", content=str(error))
    return Reply(message=message, finish_reason="context", prompt_tokens=error.tokens)


def _keys(messages: tuple[Message, ...]) -> Iterator[str]:
    """Yields a name for the conversation up to each of the assistant's messages."""
    digest = hashlib.sha256()
    for message in messages:
        calls = [[call.name, call.arguments] for call in message.tool_calls]
        fields = [message.role, message.content.strip(), calls]
        digest.update(json.dumps(fields, sort_keys=True).encode())
        if message.role == "assistant":
            yield digest.hexdigest()
