"""Which turn a prompt continues, and that every sampled token is trained where it was sampled."""

import copy
import dataclasses
import random

import numpy as np
import pytest
from support import forks, turns

from gspo_env.chat.conversation import Transcript, tokenize
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.engines.embedded.unpacked import UnbatchedEngine
from gspo_env.rollout.metrics import RolloutStats
from gspo_env.tools.calls import parse_message
from gspo_env.types import Group, Message, Prompt, StepInfo, Task, ToolCall, Turn

TASK = Task(env_id="test", seed=0)


@pytest.fixture(scope="module", params=["appends", "thinking"])
def chat(request):
    return forks.make_chat(request.param)


def sampled(chat, text):
    """The ids of an action: `<think>` and `</think>` are control tokens in it."""
    return [*chat.text.encode_rendering(chat.text.to_rendering(text)), chat.end_of_turn]


def user(text):
    return Message(role="user", content=text)


def assistant(text, **fields):
    return Message(role="assistant", content=text, **fields)


def ask(transcript, *messages, **fields):
    return transcript.read("", "user", StepInfo(messages=messages, **fields))


def begin(chat, action):
    """A conversation of one question and this action."""
    transcript = Transcript(chat, Prompt())
    ask(transcript, user("amber"))
    transcript.write(sampled(chat, action))
    return transcript


def rendered(chat, *messages):
    messages_in = [{"role": m.role, "content": m.content} for m in messages]
    return chat.tokenizer.apply_chat_template(
        messages_in, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize(
    ("template", "kind", "count"),
    [
        ("appends", TransformersEngine, 15),
        ("thinking", TransformersEngine, 15),
        ("thinking", UnbatchedEngine, 4),
    ],
)
def test_the_engine_and_the_trainer_agree_on_every_token_however_a_conversation_is_cut(
    template, kind, count
):
    chat = forks.make_chat(template)
    model = forks.make_model(chat)
    engine = kind(copy.deepcopy(model), max_slots=16, max_context=300)
    episodes = forks.play(engine, chat, count, seed=3)
    assert forks.differences(model, episodes).max() < 1e-4
    for episode in episodes:  # each sampled token is in one sequence once
        trained = np.concatenate([s.turn_ids[s.turn_ids >= 0] for s in episode.sequences])
        sizes = [len(turn.action_ids) for turn in episode.turns]
        assert np.bincount(trained, minlength=len(sizes)).tolist() == sizes
    assert {t.fork for e in episodes for t in e.turns} >= {"edited", "compacted", "new"}
    wrong = [forks.in_wrong_context(episode) for episode in episodes]
    assert forks.differences(model, wrong).max() > 1e-2


@pytest.fixture(scope="module")
def on_vllm():
    """A model, which both templates share, and vLLM with its weights."""
    from gspo_env.engines.vllm import VLLM

    model = forks.make_model(forks.make_chat(), shape=forks.VLLM_SHAPE)
    config = VLLM(dtype="float32", enforce_eager=True)
    engine = config.start(model, max_slots=16, max_context=300)
    yield model, engine
    engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize("template", ["appends", "thinking"])
def test_vllm_and_the_trainer_agree_on_every_token_however_a_conversation_is_cut(on_vllm, template):
    model, engine = on_vllm
    episodes = forks.play(engine, forks.make_chat(template), 15, seed=3)
    assert forks.differences(model, episodes).max() < 1e-4
    assert any(turn.info.stop for episode in episodes for turn in episode.turns)


@pytest.mark.parametrize("history", ["template", "keep"])
@pytest.mark.parametrize("system", [None, "obey"])
def test_a_stop_text_is_in_a_later_prompt_only_if_earlier_turns_are_kept(history, system):
    chat = forks.make_chat(history=history)
    transcript = Transcript(chat, Prompt(system=system))
    for n, (action, stop) in enumerate([("birch", ()), ("cedar## stone", ("##",)), ("river", ())]):
        prompt = transcript.read(f"amber {n}", "user", StepInfo(stop=stop))
        transcript.write(list(chat.encode(action)))
    shown = "<|im_start|>assistant\ncedar## stone<|im_end|>" in chat.decode_all(prompt.ids)
    assert shown == (history == "keep")
    messages = [Message(role="system", content=system)] if system else []
    messages += [user("amber 0"), assistant("birch"), user("amber 1"), assistant("cedar")]
    if history == "template":
        assert prompt.ids == rendered(chat, *messages, user("amber 2"))


def test_an_episode_that_compacts_computes_about_the_tokens_of_its_tree(chat):
    episode = forks.compacting(chat)
    computed, distinct = forks.computed_and_distinct(episode)
    assert computed <= 1.3 * distinct
    stats = RolloutStats([Group(task=TASK, episodes=(episode,))], 1.0).metrics()
    assert stats["rollout/sequences_per_episode"] == len(episode.sequences)
    if len(episode.sequences) == 5:
        assert stats["rollout/forks/compacted"] == 4


def test_a_conversation_that_grows_keeps_the_sampled_ids(chat):
    transcript = Transcript(chat, Prompt())
    first = ask(transcript, user("amber"))
    odd = [*chat.encode("st"), *chat.encode("one"), chat.end_of_turn]
    transcript.write(odd)
    second = ask(transcript, user("amber"), assistant("stone"), user("birch"))
    assert second.ids == [*first.ids, *odd, *second.prompt_ids]
    assert (second.parent, second.fork) == (0, None)


def test_reasoning_that_a_message_lacks_is_shown_where_the_template_shows_it():
    chat = forks.make_chat("thinking")
    transcript = Transcript(chat, Prompt())
    first = ask(transcript, user("amber"))
    action = sampled(chat, "<think>two links</think>stone")
    transcript.write(action)
    tool = Message(role="tool", content="river")
    second = ask(transcript, user("amber"), assistant("stone"), tool)
    assert second.ids[: len(first.ids) + len(action)] == [*first.ids, *action]
    transcript.write(sampled(chat, "cedar"))
    third = ask(
        transcript, user("amber"), assistant("stone"), tool, assistant("cedar"), user("again")
    )
    assert (third.parent, third.fork) == (None, "template")
    plain = [user("amber"), assistant("stone"), tool, assistant("cedar"), user("again")]
    assert third.ids == rendered(chat, *plain)


def test_reasoning_that_differs_is_not_the_sampled_action():
    chat = forks.make_chat("thinking")
    transcript = begin(chat, "<think>two links</think>stone")
    tool = Message(role="tool", content="river")
    other = assistant("stone", reasoning="follow")
    assert ask(transcript, user("amber"), other, tool).parent is None


@pytest.mark.parametrize(
    ("messages_in", "reason"),
    [
        ([user("amber"), assistant("cedar"), user("birch")], "edited"),
        ([user("amber"), user("birch")], "compacted"),
        ([user("summary"), user("birch")], "new"),
    ],
)
def test_a_new_sequence_names_its_reason(chat, messages_in, reason):
    transcript = begin(chat, "stone")
    ask(transcript, user("amber"), assistant("stone"), user("river"))
    transcript.write(sampled(chat, "stone"))
    opening = ask(transcript, *messages_in)
    assert (opening.parent, opening.fork) == (None, reason)
    assert opening.ids == rendered(chat, *messages_in)


def test_agents_that_take_turns_continue_their_own_sequences():
    chat = forks.make_chat()
    transcript = Transcript(chat, Prompt())
    talks = {name: [user(name)] for name in ("amber", "birch")}
    parents = []
    for k in range(6):
        name = ("amber", "birch")[k % 2]
        opening = ask(transcript, *talks[name])
        parents.append(opening.parent)
        transcript.write(sampled(chat, "stone"))
        talks[name] += [assistant("stone"), user("again")]
    assert parents == [None, None, 0, 1, 2, 3]
    assert len(transcript.session_ids()) == 2


def test_a_question_asked_twice_is_two_branches_of_one_turn(chat):
    transcript = Transcript(chat, Prompt())
    messages_in = [user("amber"), assistant("stone"), user("birch")]
    ask(transcript, *messages_in[:1])
    transcript.write(sampled(chat, "stone"))
    openings = []
    for _ in range(2):
        openings.append(ask(transcript, *messages_in))
        transcript.write(sampled(chat, "cedar"))
    assert [o.parent for o in openings] == [0, 0]
    assert [o.fork for o in openings] == [None, "edited"]
    assert openings[0].ids == openings[1].ids


def test_a_sampled_control_token_stays_one_and_its_text_does_not_become_one():
    chat = forks.make_chat("appends")
    controls = chat.text.controls
    transcript = begin(chat, "<think>birch</think>stone")
    messages_in = [user("amber"), assistant("<think>birch</think>stone"), user("again")]
    grown = ask(transcript, *messages_in)
    assert grown.parent == 0
    other = ask(Transcript(chat, Prompt()), *messages_in)
    inside = [chat.tokenizer.convert_tokens_to_ids(t) for t in ("<think>", "</think>")]
    assert sum(i in inside for i in grown.ids) == 2
    assert not set(inside) & set(other.ids)
    assert set(inside) <= set(controls)


SPELLED = ['{"word": "amber \\u00e9 \\/"}', '{"n": 1e3, "x": 1.50}', '{"word": null}']


@pytest.mark.parametrize(
    "text",
    [
        *(f'<tool_call>{{"name": "look", "arguments": {a}}}</tool_call>' for a in SPELLED),
        "<|tool_call_start|>[look(flag=True, word='it\\'s')]<|tool_call_end|>",
        'functools[{"name": "look", "arguments": {"word": "a"}}]',
        'So: <tool_call>{"name": "look", "arguments": {}}</tool_call>\nBye.',
        '<think>hm</think>So: <tool_call>{"name": "look", "arguments": {}}</tool_call>',
    ],
)
@pytest.mark.parametrize("template", ["appends", "thinking"])
def test_a_sampled_call_that_comes_back_is_recognized_however_it_is_spelled(text, template):
    chat = forks.make_chat(template)
    transcript = Transcript(chat, Prompt())
    ask(transcript, user("amber"))
    action = transcript.write(sampled(chat, text))
    message, _ = parse_message(action.text, in_reasoning=action.in_reasoning)
    assert message.tool_calls
    for reasoning in {message.reasoning, "", None}:
        returned = dataclasses.replace(message, reasoning=reasoning)
        tool = Message(role="tool", content="river")
        assert ask(transcript, user("amber"), returned, tool).parent == 0
    other = dataclasses.replace(message, content="other")
    assert ask(transcript, user("amber"), other, tool).fork == "edited"


def test_sampled_calls_keep_their_form_where_the_template_has_none():
    chat = forks.make_chat("appends")
    transcript = Transcript(chat, Prompt())
    ask(transcript, user("amber"))
    text = '<tool_call>{"name":"look","arguments":{"key":  "two"}}</tool_call>'
    transcript.write(sampled(chat, text))
    call = ToolCall(name="look", arguments={"key": "two"})
    tool = Message(role="tool", content="river")
    assert ask(transcript, user("amber"), assistant("", tool_calls=(call,)), tool).parent == 0
    other = ToolCall(name="look", arguments={"key": "three"})
    edited = ask(transcript, user("amber"), assistant("", tool_calls=(other,)), tool)
    assert edited.parent is None
    assert '"three"' in chat.decode_all(edited.ids)


@pytest.mark.parametrize("history", ["template", "keep"])
def test_a_plain_environment_of_a_template_that_appends_has_one_sequence(history):
    chat = forks.make_chat("appends", history)
    rng = random.Random(0)
    transcript, kept = Transcript(chat, Prompt(system="stone")), []
    for k in range(6):
        text = " ".join(rng.choices(forks.WORDS.split(), k=3)) + rng.choice(forks.HOSTILE)
        before = list(transcript.ids)
        opening = transcript.read(text, "tool" if k % 2 else "user")
        assert opening.ids[: len(before)] == before
        kept.append((opening.parent, opening.prompt_ids))
        transcript.write(sampled(chat, "birch"))
    other = Transcript(forks.make_chat("appends", "keep"), Prompt(system="stone"))
    rng = random.Random(0)
    for k, (parent, ids) in enumerate(kept):
        text = " ".join(rng.choices(forks.WORDS.split(), k=3)) + rng.choice(forks.HOSTILE)
        opening = other.read(text, "tool" if k % 2 else "user")
        assert (opening.parent, opening.prompt_ids) == (parent, ids)
        other.write(sampled(chat, "birch"))


def test_keep_keeps_a_conversation_that_grows_and_begins_again_otherwise():
    chat = forks.make_chat("thinking", "keep")
    transcript = Transcript(chat, Prompt())
    first = ask(transcript, user("amber"))
    action = sampled(chat, "<think>two</think>stone")
    transcript.write(action)
    second = ask(transcript, user("amber"), assistant("stone"), user("birch"))
    assert second.ids[: len(first.ids) + len(action)] == [*first.ids, *action]
    assert (
        chat.decode_all(second.prompt_ids)
        .strip()
        .endswith("birch<|im_end|>\n<|im_start|>assistant")
    )
    transcript.write(sampled(chat, "cedar"))
    assert ask(transcript, user("summary")).parent is None


def test_a_first_conversation_of_reset_is_the_first_prompt(chat):
    messages_in = (
        Message(role="system", content="say"),
        user("amber"),
        assistant("stone"),
        user("birch"),
    )
    prompt = Prompt(system="say", messages=messages_in[1:])
    assert Transcript(chat, prompt).read("ignored").ids == rendered(chat, *messages_in)


def test_an_episode_keeps_a_few_caches_at_most():
    chat = forks.make_chat()
    transcript = Transcript(chat, Prompt())
    for k in range(12):
        ask(transcript, user(f"amber {k}"))
        transcript.write(sampled(chat, "stone"))
        assert len(transcript.session_ids()) <= 4


@pytest.mark.parametrize(
    ("mark", "end"),
    [
        ("<think>", "</think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ],
)
def test_a_call_in_reasoning_that_the_prompt_opens_is_not_made_whatever_the_template_keeps(
    mark, end
):
    chat = forks.make_chat()
    tokenizer = copy.deepcopy(chat.tokenizer)
    source, start = tokenizer.chat_template, "<|im_start|>assistant\n"
    before, found, after = source.rpartition(start)
    assert found
    tokenizer.chat_template = f"{before}{start}{mark}\n{after}"
    tokenizer.add_tokens([mark, end], special_tokens=True)
    transcript = Transcript(ChatTokenizer(tokenizer), Prompt())
    ask(transcript, user("amber"))
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    action = transcript.write(sampled(chat, f"river {call}{end}stone"))
    message, malformed = parse_message(action.text, in_reasoning=action.in_reasoning)
    assert (message.tool_calls, malformed, message.content) == ((), 0, "stone")


def test_a_demonstration_is_cut_before_a_text_that_cannot_fit_is_encoded(chat, monkeypatch):
    """The tokens of a long text take some hundred bytes for each of its characters."""
    lengths, encode = [], chat.text.encode_rendering

    def measured(text, **how):
        lengths.append(len(text))
        return encode(text, **how)

    monkeypatch.setattr(chat.text, "encode_rendering", measured)
    texts = ("amber", "birch", "x" * 3_000_000, "amber")
    played = [Turn(observation=text, text="yes", reward=0.0) for text in texts]
    shown, short = turns.episode(*played), turns.episode(*played[:2])
    assert tokenize(shown, chat, 300).turns == tokenize(short, chat, 300).turns
    assert len(tokenize(short, chat, 300).turns) == 2
    assert max(lengths) < 300
