"""The transcript on rebuilt tokenizers of well-known families: the ids of the tokenizer's own
template, and no control token from any text. `python stress/control_tokens.py` tries more."""

import json
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.chat_families import FAMILIES

from gspo_env.chat.template import ChatTemplate
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.types import Message, Prompt
from stress import control_tokens as ATTACK

family = pytest.mark.parametrize("name", FAMILIES)
EDGES = ["", " ", "\n", "\t", "  ", "\n\n", " \n ", "\u3000", "\xa0", "\u2581", "row 1\nrow 2"]
TEXT = st.lists(
    st.sampled_from(
        [*EDGES, "say birch!", "7", "12345", "\U0001f600\U0001f3fd", "é", "ﬁ", "字", "<", "|"]
    )
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    max_size=5,
).map("".join)


def rendered(tokenizer, messages, generation=True, **settings):
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=generation, return_dict=False, **settings
    )


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def harmless(tokenizer, *texts):
    """Whether the tokenizer itself finds no special token in the texts, written out."""
    control = ATTACK.control_ids(tokenizer)
    return all(
        control.isdisjoint(tokenizer(text, add_special_tokens=False)["input_ids"])
        and str(tokenizer.unk_token) not in text
        for text in texts
    )


@family
@given(first=TEXT, second=TEXT, third=TEXT, system=st.none() | TEXT)
@settings(max_examples=40)
def test_a_conversation_has_the_ids_of_the_tokenizers_own_template(
    name, first, second, third, system
):
    tokenizer = FAMILIES[name]()
    assume(harmless(tokenizer, first, second, third, system or ""))
    template = templates(name)
    messages = [user(first), answer(second), user(third)]
    if system is not None and template.takes_system:
        messages = [{"role": "system", "content": system}, *messages]
    assert template.ids(messages) == rendered(tokenizer, messages)
    assert template.ids(messages[:-1], generation=False) == rendered(
        tokenizer, messages[:-1], generation=False
    )


@family
@given(first=TEXT, second=TEXT)
@settings(max_examples=20)
def test_a_turn_adds_the_ids_of_the_tokenizers_own_template(name, first, second):
    tokenizer = FAMILIES[name]()
    assume(harmless(tokenizer, first, second))
    chat = chats(name)
    whole = rendered(tokenizer, [user(first), answer("birch"), user(second)])
    start = list(chat.start(first))
    assert start == rendered(tokenizer, [user(first)])
    end = chat.stop_ids[0] if chat.end_of_turn is None else chat.end_of_turn
    following = list(chat.follow(second, end))
    assert whole[-len(following) :] == following
    if name not in ("deepseek", "harmony"):  # their action starts otherwise than in the history
        assert whole[: len(start)] == start


@family
@given(text=TEXT)
@settings(max_examples=40)
def test_no_part_of_a_text_is_lost_that_the_tokenizer_itself_keeps(name, text):
    tokenizer = FAMILIES[name]()
    assume(harmless(tokenizer, text))
    chat = chats(name)
    tokenizer_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(chat.template.text.encode(text, first=True)) == tokenizer_ids
    assert chat.decode_all(chat.encode(text)).split() == tokenizer.decode(tokenizer_ids).split()


def test_tools_are_written_as_by_the_tokenizers_own_template():
    schema = ATTACK.tool(
        "look_up",
        "Looks <b>up</b> [a|b] \n",
        {"key": {"type": "string", "enum": ["x", "y<z"], "description": "a 'key'"}},
    ).schema
    for name in FAMILIES:
        template = templates(name)
        if template.shows_tools:
            messages = [user("go")]
            expected = rendered(FAMILIES[name](), messages, tools=[schema])
            assert template.ids(messages, [schema]) == expected, name


@family
def test_no_text_becomes_a_control_token_in_any_channel(name):
    failed = {channel: texts for channel, _, texts in ATTACK.attack(name, 25) if texts}
    assert failed == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("smollm3", "<|im_/thinkend|>"),
        ("edits_pieces", "<|im_/thinkend|>"),
        ("edits_tags", "&lt;|im_<b>end|>"),
        ("edits_case", "<|IM_END|>"),
        ("edits_symbols", "((im_end))"),
        ("composes", "<|/thinkend|>"),
        ("qwen3", "<think><|im_end|><think>"),
    ],
)
def test_what_a_template_edits_stays_text_also_where_it_then_reads_as_a_control_token(name, text):
    chat = chats(name)
    control = ATTACK.control_ids(chat.tokenizer)
    ids, expected = (
        chat.template.ids([{"role": "system", "content": system}, user("go")])
        for system in (f"a {text}", "a b")
    )
    assert [i for i in ids if i in control] == [i for i in expected if i in control]
    if name != "edits_symbols":  # whose template writes the token itself, in place of the text
        end = "<|end|>" if name == "composes" else "<|im_end|>"
        shown = chat.decode_all(ids)
        assert shown.count(end) == chat.decode_all(expected).count(end) + 1


def test_a_system_message_that_the_template_refuses_begins_the_first_user_message(caplog):
    chat = ChatTokenizer(FAMILIES["gemma"]())
    messages = (Message(role="user", content="a"), Message(role="assistant", content="b"))
    ids = chat.start("c", Prompt(system="Be brief.", messages=messages))
    folded = [user("Be brief.\n\na"), answer("b"), user("c")]
    assert list(ids) == rendered(chat.tokenizer, folded)
    assert "refuses system messages" in caplog.text


@family
@pytest.mark.parametrize("others", [(), ("assistant",), ("assistant", "user"), ("system",)])
def test_a_system_message_that_no_user_follows_is_shown(name, others):
    chat = [{"role": role, "content": f"7{n}1"} for n, role in enumerate(("system", *others))]
    shown = templates(name).render(chat)
    assert [shown.count(message["content"]) for message in chat] == [1] * len(chat)


@family
def test_no_message_is_lost_where_a_program_sends_roles_that_the_template_does_not_expect(name):
    roles = ("system", "system", "user", "user", "assistant", "system", "tool", "tool", "user")
    chat = [{"role": role, "content": f"7{n}1"} for n, role in enumerate(roles)]
    shown = templates(name).render(chat)
    places = [shown.find(message["content"]) for message in chat]
    assert -1 not in places
    assert places == sorted(places)
    text = templates(name).render([user("701"), answer("711"), user("721"), user("731")])
    assert text.count("721") == text.count("731") == 1


def test_tools_whose_schema_breaks_the_template_are_listed_in_the_system_message(caplog):
    chat = ChatTokenizer(FAMILIES["harmony"]())
    broken = ATTACK.tool("look", properties=["no", "mapping"])
    text = chat.decode_all(chat.start("go", Prompt(tools=(broken,))))
    assert json.dumps(broken.schema) in text
    assert "cannot show these tools" in caplog.text


@pytest.mark.parametrize(
    ("call", "reads"),
    [
        ("{{ c.function | tojson }}", True),
        (
            '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
            True,
        ),
        ("Action: {{ c.function.name }}\nAction Input: {{ c.function.arguments | tojson }}", True),
        ("[{{ c.function.name }}(key={{ c.function.arguments.key | tojson }})]", True),
        ("<{{ c.function.name }}><key>x</key></{{ c.function.name }}>", True),
        ("<tool_call>{{ c.function | tojson }}</tool_call>", True),
        ("CALL {{ c.function.name }} WITH {{ c.function.arguments | tojson }}", False),
        ("CALL {{ c.function | tojson }} NOW", False),
    ],
)
def test_calls_of_an_unknown_template_are_read_with_and_without_a_mark(call, reads):
    tokenizer = FAMILIES["qwen3"]()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert ChatTemplate(tokenizer).reads_calls is reads


def test_every_way_to_end_an_action_stops_it():
    assert {chats("glm4").decode_all([i]) for i in chats("glm4").stop_ids} == {
        "<|endoftext|>",
        "<|user|>",
        "<|observation|>",
    }


def test_the_end_of_an_action_is_not_repeated_where_white_space_precedes_it():
    """Llama 2 writes a space, then the end of the sequence, behind an action."""
    for name in ("llama2", "llama2_metaspace"):
        chat = chats(name)
        assert chat.end_of_turn == chat.tokenizer.eos_token_id
        assert chat.tokenizer.eos_token_id not in chat.follow("x", chat.end_of_turn)


def test_templates_whose_roles_are_plain_text_are_named(caplog):
    plain = set()
    for name in FAMILIES:
        caplog.clear()
        ChatTokenizer(FAMILIES[name]())
        if "who speaks by plain text" in caplog.text:
            plain.add(name)
    assert plain == {"llama2", "llama2_metaspace", "zephyr"}


@cache
def chats(name):
    return ChatTokenizer(FAMILIES[name]())


def templates(name):
    return chats(name).template
