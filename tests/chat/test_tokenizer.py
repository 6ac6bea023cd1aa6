"""Token-exact transcripts: plain text gives the ids of the template, and no text gives a control
token."""

import copy
import logging
import sys
import tracemalloc
from typing import ClassVar

import pytest
from support.chat_families import FAMILIES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo_env.chat.encode import BoundedCache, TextEncoder
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.errors import ChatTemplateError
from gspo_env.recipes.build import TEMPLATE, build_tokenizer
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.tool import Tool
from gspo_env.types import Prompt, ToolCall

HARMLESS = "Follow 3 links from the stone, then say: birch!"
QWEN_LIKE = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c and not loop.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_LAST = (
    "{% for m in messages %}"
    "{% if m.role == 'user' and loop.last %}{{ messages[0].content }}{% endif %}"
    "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)


def with_template(template):
    tokenizer = build_tokenizer([HARMLESS])
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_first_prompt_and_a_later_turn_equal_the_template(tokenizer, chat, role):
    action = chat.encode("birch")
    ids = [*chat.start(HARMLESS, Prompt(system="Use the tool.")), *action, chat.end_of_turn]
    ids += chat.follow("stone river", chat.end_of_turn, role)
    messages = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": HARMLESS},
        {"role": "assistant", "content": "birch"},
        {"role": role, "content": "stone river"},
    ]
    assert ids == rendered(tokenizer, messages)


def test_an_action_that_ends_otherwise_still_gets_the_template_end_of_turn(chat):
    other = chat.encode("birch")[0]
    assert chat.follow("x", other)[0] == chat.end_of_turn
    assert chat.follow("x", chat.end_of_turn)[0] != chat.end_of_turn


def test_a_template_that_drops_reasoning_is_named_and_can_be_refused(caplog):
    tokenizer = with_template(QWEN_LIKE)
    with caplog.at_level(logging.WARNING):
        ChatTokenizer(tokenizer, history="keep")
    assert "drops the reasoning" in caplog.text
    with pytest.raises(ChatTemplateError, match="drops the reasoning"):
        ChatTokenizer(tokenizer, history="refuse")


def test_a_template_without_a_tool_role_gets_tool_results_as_user_messages():
    refusing = (
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    chat = ChatTokenizer(with_template(refusing + TEMPLATE))
    assert chat.follow("x", chat.end_of_turn, "tool") == chat.follow("x", chat.end_of_turn, "user")


def test_tools_that_a_template_ignores_are_listed_in_the_system_prompt():
    class Named:
        schema: ClassVar = {"type": "function", "function": {"name": "lookup", "parameters": {}}}

    ignoring = TEMPLATE.replace("and tools", "and false")
    chat = ChatTokenizer(with_template(ignoring))
    assert "lookup" in chat.decode_all(chat.start("x", Prompt(system="y", tools=(Named,))))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (SYSTEM_LAST, None),  # moves messages
        (None, "no chat template"),
        (TEMPLATE.replace("add_generation_prompt", "false"), r"no generation prompt.*assistant"),
        (
            TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.index0 != 1 }}"),
            "drops or repeats a message of user, assistant",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, words):
    with pytest.raises(ChatTemplateError, match=words):
        ChatTokenizer(with_template(template))


def test_a_template_that_needs_no_generation_prompt_is_accepted():
    joined = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    chat = ChatTokenizer(with_template(joined))
    assert list(chat.start(HARMLESS)) == rendered(chat.tokenizer, [user(HARMLESS)])


def test_rendering_leaves_the_tracing_of_a_debugger_as_it_was(tokenizer):
    def trace(frame, event, value):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ChatTokenizer(tokenizer).start(HARMLESS)
        kept = sys.gettrace()
    finally:
        sys.settrace(before)
    assert kept is trace


def test_a_template_that_changes_the_inside_of_a_text_is_named(caplog):
    ChatTokenizer(with_template(TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper }}")))
    assert "changes the text of messages" in caplog.text


def test_the_text_of_the_placeholders_is_text(chat):
    template = chat.template
    for place in range(3):
        text = template.marker(place)
        assert text in chat.decode_all(chat.follow(text, chat.end_of_turn))
        assert text in chat.decode_all(chat.start("x", Prompt(system=text)))


def characters(special):
    """A tokenizer of single characters whose control token is one of them."""
    backend = Tokenizer(models.WordLevel({c: n for n, c in enumerate("?abc$\n")}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([AddedToken(special, special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special, unk_token="?")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    return tokenizer


def test_a_character_that_is_only_known_as_a_control_token_is_unknown_and_named(caplog):
    chat = ChatTokenizer(characters("$"))
    unknown = chat.tokenizer.unk_token_id
    a, b = chat.encode("a") + chat.encode("b")
    assert chat.encode("a$b") == (a, unknown, b)
    assert "cannot encode all characters of '$'" in caplog.text


def test_a_tokenizer_that_panics_is_one_error():
    tokenizer = build_tokenizer([HARMLESS])
    endless = Regex("(.*)" * 10 + "[^\\s\\S]")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(endless, "isolated")
    with pytest.raises(ChatTemplateError, match="the tokenizer fails: "):
        ChatTokenizer(tokenizer).encode(HARMLESS)


def test_white_space_around_a_control_token_is_read_once():
    made = FAMILIES["phi3"]().backend_tokenizer.to_str().replace('"lstrip":false', '"lstrip":true')
    text = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(made)))
    end = text.decode_rendering([next(iter(text.controls))])
    short, long = (
        text.encode_rendering(f"{' ' * count}x{end}\t\u3000{end} \x1f{end}")
        for count in (1000, 500_000)
    )
    assert short[-5:] == long[-5:]
    assert text.encode_rendering(f"x \x1f{end}") == [*text.encode("x \x1f"), *long[-1:]]
    assert text.encode_rendering(f"x\t\u3000{end}") == [*text.encode("x"), *long[-1:]]


def test_a_tokenizer_that_drops_what_it_does_not_know_is_named(caplog):
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    assert tokenizer("a字b")["input_ids"] == [0, 1]
    TextEncoder(tokenizer)
    assert "drops characters that its vocabulary does not know" in caplog.text
    caplog.clear()
    for make in FAMILIES.values():
        TextEncoder(make())
    assert not caplog.text


def test_the_words_of_an_added_token_are_text_if_the_vocabulary_can_form_them():
    """A vocabulary may contain a control token as an ordinary piece."""
    pieces = [("<unk>", 0.0), ("<end>", -1.0), *((c, -9.0) for c in "<end> xyz")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    tokenized = ChatTokenizer(tokenizer)
    text = "x <end>" * 5000 + "y"
    ids = tokenized.encode(text)
    assert tokenizer.eos_token_id not in ids
    assert tokenized.decode_all(ids) == text


def user(text):
    return {"role": "user", "content": text}


SMOL = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def smol():
    """The template of SmolLM2: roles are marked by BOS and EOS, and it has no tools."""
    tokenizer = copy.deepcopy(FAMILIES["qwen3"]())
    tokenizer.chat_template, tokenizer.bos_token = SMOL, "<|im_start|>"
    return tokenizer


def test_a_template_without_tools_gets_them_with_the_form_of_a_call_that_is_read(caplog):
    chat = ChatTokenizer(smol())
    look = Tool(
        name="look",
        description="Sieht nach: Größe.",
        parameters={"type": "object", "properties": {}},
        function=print,
        validator=None,
    )
    for system in (None, "Be brief."):
        text = chat.decode_all(chat.start("go", Prompt(system=system, tools=(look,))))
        assert text.count("To call a tool") == 1
        assert "Größe" in text
        example = text.partition("write ")[2].partition(".<|im_end|>")[0]
        assert parse_tool_calls(example) == [ToolCall(name="NAME", arguments={"KEY": "VALUE"})]
    assert caplog.text.count("how to call one") == 1
    assert "by plain text" not in caplog.text  # BOS and EOS mark who speaks


LIMIT = 1 << 20


@pytest.mark.parametrize("letter", ["a", "\U00013000"])
@pytest.mark.parametrize("length", [1, 500])
def test_what_is_kept_is_at_most_the_limit_in_real_memory(letter, length):
    def encode(text):
        return tuple(range(1000, 1000 + 4 * len(text)))  # bytes: four ids a letter

    def fill(cache):
        for n in range(4 * LIMIT // (300 + 200 * length)):
            text = f"{n}{letter * length}"
            assert cache(text) == encode(text)

    cache = BoundedCache(encode, LIMIT)
    fill(BoundedCache(encode, LIMIT))  # Python keeps the memory of freed tuples for new ones
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fill(cache)
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0 < kept < 1.1 * LIMIT


def test_one_huge_text_does_not_push_out_all_others():
    calls = []

    def encode(text):
        calls.append(len(text))
        return (1,)

    cache = BoundedCache(encode, LIMIT)
    for text in ("small", "x" * LIMIT, "small"):
        cache(text)
    assert calls == [5, LIMIT]
