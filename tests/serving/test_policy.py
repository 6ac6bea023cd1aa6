"""A real tiny model behind the address."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.jails import eventually
from support.scripted_engine import Scripted

from gspo_env.chat import Transcript
from gspo_env.engines import TransformersEngine
from gspo_env.rollout import RolloutConfig
from gspo_env.serving import ChatPolicy
from gspo_env.types import Message, Prompt, StepInfo

LIMITS = RolloutConfig(max_turn_tokens=8, max_context=128, concurrency=8)
HI = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "amber"}]}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


class Watched:
    """An engine that notes what it is asked."""

    def __init__(self, engine):
        self.engine, self.asked, self.now, self.most = engine, [], 0, 0
        self.sessions, self.released = [], set()

    async def generate(self, prompt_ids, sampling, session=None):
        self.now += 1
        self.most = max(self.most, self.now)
        self.sessions.append(session)
        done = await self.engine.generate(prompt_ids, sampling, session)
        self.now -= 1
        self.asked.append((list(prompt_ids), sampling, done))
        return done

    def release(self, session):
        self.released.add(session)
        self.engine.release(session)


@pytest.fixture
def served(model, chat, opened):
    engine = TransformersEngine(model, max_slots=8, max_context=128)
    watched = Watched(engine)
    policy = ChatPolicy(watched, chat, LIMITS, len(chat.tokenizer))
    client = opened(policy, training=False)
    client.engine = watched
    yield client
    policy.close()
    engine.close()


def post(client, **more):
    return client.post("/chat/completions", json={**HI, **more})


def test_a_prompt_has_the_ids_of_the_chat_template(served, chat):
    got = post(served).json()
    rendered = chat.tokenizer.apply_chat_template(
        HI["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    prompt, sampling, done = served.engine.asked[0]
    assert prompt == rendered
    assert sampling.temperature == 0
    assert got["usage"]["prompt_tokens"] == len(prompt)
    assert got["usage"]["completion_tokens"] == len(done.token_ids)
    assert got["choices"][0]["message"]["content"] == chat.decode(done.token_ids)


def test_tokens_are_counted_as_the_prompt_has_them(served):
    """Also where a request continues sampled ids, which are not those of the text."""
    tool = {"name": "lookup", "input_schema": {"type": "object"}}
    body = {**HI, "system": "be brief", "tools": [tool], "max_tokens": 8, "temperature": 1}
    sampled = []
    for seed in range(4):
        counted = {name: body[name] for name in ("model", "system", "tools", "messages")}
        count = served.post("/messages/count_tokens", json=counted).json()
        count_again = served.post("/messages/count_tokens", json=counted).json()
        got = served.post("/messages", json=body).json()
        assert count == count_again == {"input_tokens": got["usage"]["input_tokens"]}
        prompt, _, done = served.engine.asked[-1]
        assert count["input_tokens"] == len(prompt)
        assert prompt[: len(sampled)] == sampled
        sampled = [*prompt, *done.token_ids]
        said = {"role": "assistant", "content": got["content"]}
        messages = [*body["messages"], said, {"role": "user", "content": f"birch {seed}"}]
        body = {**body, "messages": messages}
    assert len(served.engine.asked) == 4


def test_counted_tokens_may_be_more_than_fit(served):
    long = [{"role": "user", "content": "amber " * 200}]
    count = served.post("/messages/count_tokens", json={"messages": long}).json()
    assert count["input_tokens"] > 200
    long = [{"role": "user", "content": "x" * 1_000_000}]
    error = served.post("/messages/count_tokens", json={"messages": long})
    assert (error.status_code, error.json()["type"]) == (400, "error")
    assert "tokens" in error.json()["error"]["message"]


def test_the_next_request_continues_the_sampled_ids(served, chat):
    """As in training: what was sampled is not tokenised again."""
    message = post(served, temperature=2.0, seed=3).json()["choices"][0]["message"]
    follow = {"role": "user", "content": "birch"}
    post(served, messages=[*HI["messages"], message, follow])
    (first, _, done), (second, _, _) = served.engine.asked
    assert second[: len(first) + len(done.token_ids)] == [*first, *done.token_ids]
    transcript = Transcript(chat, Prompt())
    answer = Message(role="assistant", content=message["content"])
    start = Message(role="user", content="amber")
    transcript.read("", request=StepInfo(messages=(start,), tools=()))
    transcript.write(done.token_ids)
    request = StepInfo(messages=(start, answer, Message(role="user", content="birch")), tools=())
    assert transcript.read("", request=request).ids == second


def test_requests_of_many_programs_are_batched_and_each_seed_gives_its_answer(served):
    def answer_for_seed(seed):
        return post(served, temperature=1.0, seed=seed).json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(answer_for_seed, range(8)))
    assert served.engine.most > 1
    assert together == [answer_for_seed(seed) for seed in range(8)]
    assert len(set(together)) > 1


def test_limits_are_those_of_training(served):
    assert post(served, max_tokens=2).json()["choices"][0]["finish_reason"] == "length"
    assert served.engine.asked[-1][1].max_tokens == 2
    post(served, max_tokens=10_000)
    assert served.engine.asked[-1][1].max_tokens == 8
    long = [{"role": "user", "content": "amber " * 200}]
    error = post(served, messages=long).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_a_prompt_that_leaves_less_room_than_the_limit_is_answered_within_it(served):
    words, room = ["amber"] * 50, 100
    while room > 7:
        words.append("amber")
        messages = [{"role": "user", "content": " ".join(words)}]
        room = 128 - post(served, messages=messages).json()["usage"]["prompt_tokens"]
    assert served.engine.asked[-1][1].max_tokens == room
    error = post(served, messages=messages, max_tokens=8).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"is 128 tokens; {128 - room} in the prompt, 8 for the answer" in error["message"]


@pytest.mark.parametrize("channel", ["user", "earlier", "call"])
def test_a_prompt_that_is_too_long_by_its_characters_is_not_encoded(
    served, chat, monkeypatch, channel
):
    encode, text = chat.text.encode, "amber river " * 20_000
    lengths = []
    monkeypatch.setattr(
        chat.text, "encode", lambda t, **m: lengths.append(len(t)) or encode(t, **m)
    )
    hi, function = HI["messages"], {"name": "f", "arguments": json.dumps({"key": text})}
    call = {"id": "1", "type": "function", "function": function}
    body = {
        "user": {"messages": [{"role": "user", "content": text}]},
        "earlier": {"messages": [*hi, {"role": "assistant", "content": text}, *hi]},
        "call": {"messages": [*hi, {"role": "assistant", "tool_calls": [call]}, *hi]},
    }[channel]
    response = post(served, **body)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert max(lengths, default=0) < 2**16


def test_a_conversation_that_the_template_refuses_is_the_requests_fault(served, monkeypatch, chat):
    template = "{{ raise_exception('no such talk') }}"
    monkeypatch.setattr(chat.tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "a text that no other test renders"}]
    assert post(served, messages=messages).status_code == 400


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-45, 1e-38, 1e-7, 1e-6, 2])
def test_an_extreme_temperature_is_sampled_or_greedy(served, temperature):
    texts = [post(served, temperature=t, seed=0).json()["choices"][0] for t in (temperature, 0)]
    assert temperature > 1 or texts[0] == texts[1]


def test_a_stop_text_ends_an_answer_and_is_not_part_of_it(served):
    whole = post(served, temperature=1.5, seed=1).json()["choices"][0]["message"]["content"]
    middle = whole[len(whole) // 2 : len(whole) // 2 + 3]
    cut = post(served, temperature=1.5, seed=1, stop=[middle]).json()["choices"][0]
    assert cut["message"]["content"] == whole[: whole.find(middle)]
    assert cut["finish_reason"] == "stop"
    body = {**HI, "temperature": 0, "max_tokens": 8}
    plain = served.post("/messages", json=body).json()
    assert plain["stop_reason"] in ("end_turn", "max_tokens")
    assert plain["stop_sequence"] is None
    first = plain["content"][0]["text"][:1]
    ended = served.post("/messages", json={**body, "stop_sequences": ["no such", first]}).json()
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", first)
    streamed = served.post("/messages", json={**body, "stop_sequences": [first], "stream": True})
    assert f'"stop_sequence": {json.dumps(first, ensure_ascii=False)}' in streamed.text


def test_an_answer_that_fails_or_is_given_up_leaves_no_cache(served, monkeypatch):
    monkeypatch.setattr(served.engine.engine, "_max_context", 2)
    assert post(served).status_code == 500
    started = threading.Event()

    async def stall(*_):
        started.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(served.engine.engine, "generate", stall)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, served)
        started.wait(10)
        served.session.close()
        assert waiting.result().status_code == 410
    assert len(served.engine.sessions) == 2
    assert eventually(lambda: served.engine.released == set(served.engine.sessions))


def test_calls_reach_a_program_only_if_it_gave_tools(chat, opened):
    text = '<tool_call>{"name": "lookup", "arguments": {"key": "amber"}}</tool_call>'

    calls = Scripted(lambda *_: (*chat.encode(text), chat.stop_ids[0]))
    policy = ChatPolicy(calls, chat, replace(LIMITS, max_turn_tokens=64))
    client = opened(policy, training=False)
    message = post(client, tools=[TOOL]).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "lookup"
    assert post(client).json()["choices"][0]["message"]["content"] == text
    policy.close()
