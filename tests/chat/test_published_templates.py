"""Chat templates as published, read from TRL: each prompt is what the template itself renders."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo_env.chat.action import message_for_template
from gspo_env.chat.conversation import Transcript
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.recipes.build import TEMPLATE, build_tokenizer
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.tool import as_tool, format_tool_call, tool
from gspo_env.types import Message, Prompt, StepInfo, ToolCall
from stress import control_tokens as ATTACK

pytestmark = pytest.mark.adapters

_SPEC = importlib.util.find_spec("trl")
_FOLDER = Path(next(iter(_SPEC.submodule_search_locations)), "chat_templates") if _SPEC else None
_FILES = sorted(_FOLDER.glob("*.jinja")) if _FOLDER else []
_OTHER = ("_training", "idefics3", "llava_next", "smolvlm")
"""Templates that TRL changed for training, and those of messages with images."""
TEMPLATES = {f.stem: f for f in _FILES if not f.stem.endswith(_OTHER)}
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|return|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<end_of_turn>", "<turn|>"),
)
CONTROLS = (
    r"<\|[\w\-/]+\|>|</?(?:think|tool_call|tool_response|arg_key|arg_value)>|\[/?INST\]|"
    r"<(?:start|end)_of_turn>|<\uff5c[^\uff5c]+\uff5c>|<\|?(?:turn|channel|tool_call|tool_response)\|?>|</?s>"
)
KEYS = ("reasoning_content", "thinking", "reasoning")
TAGLESS = re.compile("gemma4|diffusion_gemma|gptoss|muse")
"""Templates whose reasoning is not between `<think>` and `</think>`."""


def tokenizer_of(name):
    """A byte-level tokenizer with the control tokens that a template names."""
    source = TEMPLATES[name].read_text(encoding="utf-8")
    control_texts = sorted(set(re.findall(CONTROLS, source)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = next((e for e in ENDS if e in control_texts), "<|eos|>")
    names = [*control_texts, end, "<|bos|>"]
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    result = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token="<|bos|>")
    result.chat_template = source
    return result


def with_response_template(tokenizer):
    """Adds the response template that TRL has for the chat template, if it has one."""
    with contextlib.suppress(ValueError):
        importlib.import_module("trl.chat_template_utils").add_response_schema(tokenizer)
    return tokenizer


def as_dict(message):
    """The message as the documentation of `apply_chat_template` has it."""
    result = {"role": message.role, "content": message.content}
    if message.reasoning:
        result |= dict.fromkeys(KEYS, message.reasoning)
    if message.tool_calls:
        calls = [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        result["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if message.name:
        result["name"] = message.name
    return result


def render(tokenizer, conversation, generation=True, tools=None):
    shown = tokenizer.apply_chat_template(
        [as_dict(m) for m in conversation],
        add_generation_prompt=generation,
        tokenize=False,
        tools=[t.schema for t in tools] if tools else None,
    )
    return str(shown)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(params=TEMPLATES or [None])
def chat(request):
    if request.param is None:
        pytest.skip("TRL is not installed")
    return ChatTokenizer(tokenizer_of(request.param))


def test_trl_ships_the_thinking_templates_that_are_meant():
    pytest.importorskip("trl", reason="TRL is not installed")
    assert {"qwen3", "qwen3_5_think", "deepseekv3", "gptoss", "glm4moe"} <= set(TEMPLATES)


def test_each_prompt_of_a_plain_environment_is_what_the_template_renders(chat, request):
    name = request.node.callspec.params["chat"]
    transcript = Transcript(chat, Prompt())
    thinks = chat.parser.splits_reasoning and not TAGLESS.search(name)
    conversation, role = [Message(role="user", content="observation 0")], "user"
    for k in range(4):
        opening = transcript.read(conversation[-1].content, role)
        text = render(chat.tokenizer, conversation)
        assert opening.ids == ids_of(chat.tokenizer, text)
        before = "" if text.rstrip().endswith("<think>") else "<think>\n"
        reasoning = f"because {k}" if thinks else None
        action = f"{before}{reasoning}\n</think>\n\nanswer {k}" if thinks else f"answer {k}"
        end = [chat.stop_ids[0] if chat.end_of_turn is None else chat.end_of_turn]
        transcript.write([*ids_of(chat.tokenizer, action), *end])
        conversation += [
            Message(role="assistant", content=f"answer {k}", reasoning=reasoning),
            Message(role="user", content=f"observation {k + 1}"),
        ]


def test_no_text_becomes_a_control_token(chat, request):
    name = request.node.callspec.params["chat"]
    attack = ATTACK.attack(name, 10, tokenizer=chat.tokenizer)
    assert {channel: texts for channel, _, texts in attack if texts} == {}


CALL = ToolCall(name="look", arguments={"key": "amber", "n": 2})


@tool
def look(key: str, n: int = 1) -> str:
    """Looks a key up.

    Args:
        key: The key.
        n: How often.
    """
    return key * n


LOOK = as_tool(look)


@pytest.mark.parametrize("parsed", [False, True])
@pytest.mark.parametrize("returned", ["with", "without"])
def test_each_prompt_of_a_conversation_with_calls_is_what_the_template_renders(
    chat, request, returned, parsed
):
    """The actions are what the template itself writes for the messages; reasoning may be lost."""
    tokenizer = chat.tokenizer
    if parsed:
        chat = ChatTokenizer(with_response_template(tokenizer))
        if getattr(tokenizer, "response_template", None) is None:
            pytest.skip("there is no response template")
    elif returned == "without" and TAGLESS.search(request.node.callspec.params["chat"]):
        pytest.skip("without a response template, nothing says what is reasoning")
    if not chat.template.shows_calls or not chat.template.takes_tool_role:
        pytest.skip("the template shows no calls")
    if chat.template.takes_text_arguments:
        pytest.skip("the template itself takes no arguments as an object")
    conversation = [Message(role="user", content="find it")]
    returned_messages = list(conversation)
    transcript = Transcript(chat, Prompt(tools=(LOOK,)))
    answers = [
        Message(role="assistant", content="", reasoning="I look", tool_calls=(CALL,)),
        Message(role="assistant", content="found", reasoning="I see"),
        Message(role="assistant", content="", reasoning="once more", tool_calls=(CALL,)),
        Message(role="assistant", content="done", reasoning="over"),
    ]
    compared = 0
    for answer in answers:
        opening = transcript.read("", "user", StepInfo(messages=tuple(returned_messages)))
        prompt = render(tokenizer, conversation, tools=[LOOK])
        assert opening.ids == ids_of(tokenizer, prompt)
        compared += 1
        whole = render(tokenizer, [*conversation, answer], generation=False, tools=[LOOK])
        if not whole.startswith(prompt):
            prompt = prompt.removesuffix("<think>\n").removesuffix("<think>")
        if not whole.startswith(prompt):
            break  # such a template writes no action that a model could sample
        action = ids_of(tokenizer, whole[len(prompt) :].rstrip("\n"))
        transcript.write(action)
        after = Message(role="tool", content="cedar", name="look")
        after = after if answer.tool_calls else Message(role="user", content="and now?")
        conversation += [answer, after]
        lost = Message(role="assistant", content=answer.content, tool_calls=answer.tool_calls)
        returned_messages += [lost if returned == "without" else answer, after]
    assert compared


def test_an_action_is_parsed_with_the_response_template_of_its_tokenizer():
    pytest.importorskip("trl", reason="TRL is not installed")
    tokenizer = with_response_template(tokenizer_of("qwen3"))
    if getattr(tokenizer, "response_template", None) is None:
        pytest.skip("this transformers has no response templates")
    chat = ChatTokenizer(tokenizer)
    transcript = Transcript(chat, Prompt(tools=(LOOK,)))
    transcript.read("find it")
    text = (
        '<think>\nI look\n</think>\n\n<tool_call>\n{"name": "look", '
        '"arguments": {"key": "a<|im_end|>"}}\n</tool_call>'
    )
    before, after = map(chat.text.to_rendering, text.split("<|im_end|>"))
    ids = chat.text.encode_rendering(f"{before}<|im_end|>{after}")
    action_parsed = transcript.write([*ids, chat.end_of_turn])
    assert action_parsed.message.reasoning == "I look"
    assert action_parsed.message.tool_calls == (
        ToolCall(name="look", arguments={"key": "a<|im_end|>"}),
    )
    question, result = (
        Message(role="user", content="find it"),
        Message(role="tool", content="cedar"),
    )
    for key, fork in (("a<|im_end|>", None), ("other", "edited")):
        calls = (ToolCall(name="look", arguments={"key": key}),)
        returned = dataclasses.replace(action_parsed.message, tool_calls=calls)
        opening = transcript.read("", "user", StepInfo(messages=(question, returned, result)))
        assert opening.fork == fork
    transcript.read("", "user", StepInfo(messages=(Message(role="user", content="other"),)))
    assert (
        transcript.write(
            chat.text.encode_rendering(chat.text.to_rendering("<tool_call>\n{oops"))
        ).message
        is None
    )


def test_several_calls_of_an_action_are_in_the_next_prompt_of_every_template(chat):
    if not chat.template.shows_calls or chat.template.takes_text_arguments:
        pytest.skip("the template shows no calls")
    question, text = (
        Message(role="user", content="find it"),
        "\n".join(format_tool_call("look", {"key": key}) for key in ("amber", "cedar")),
    )
    calls = tuple(ToolCall(name="look", arguments={"key": k}, id=k) for k in ("amber", "cedar"))
    transcript = Transcript(chat, Prompt(tools=(LOOK,)))
    transcript.read("", "user", StepInfo(messages=(question,), tools=(LOOK,)))
    sampled = [*chat.encode(text), chat.stop_ids[0]]
    transcript.write(sampled)
    answers = [Message(role="tool", content=f"{c.id} found", tool_call_id=c.id) for c in calls]
    said = Message(role="assistant", content="", tool_calls=calls)
    opening = transcript.read("", "user", StepInfo(messages=(question, said, *answers)))
    shown = chat.decode_all(opening.ids)
    assert "amber found" in shown
    assert "cedar found" in shown
    assert min(shown.count(key) for key in ("amber", "cedar")) > 1  # in the calls too


def test_an_answer_that_a_template_drops_beside_a_call_is_said(chat, caplog):
    said = "I look first."
    calls = Message(role="assistant", content=f" {said}\n", tool_calls=(CALL,))
    messages = [
        message_for_template(message)
        for message in (Message(role="user", content="find it"), calls)
    ]
    text = chat.template.render(messages, [LOOK.schema])
    assert (said in text) != ("drops what an answer says beside its tool calls" in caplog.text)


UNREAD = {
    "functionary": ">>>{{ c.function.name }}\n{{ c.function.arguments | tojson }}",
    "suffix": "<tool_call:a1>{{ c.function.name }}<tool_sep:a1>{{ c.function.arguments }}",
    "plamo": "<|plamo:begin_tool_name|>{{ c.function.name }}{{ c.function.arguments | tojson }}",
}


_DSML = (
    '<NStool_calls>\n<NSinvoke name="{{ c.function.name }}">\n'
    "{% for k, v in c.function.arguments.items() %}"
    """<NSparameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">"""
    "{{ v if v is string else v | tojson }}</NSparameter>\n{% endfor %}</NSinvoke>\n</NStool_calls>"
)
SHAPES = {
    "deepseek 4": _DSML.replace("NS", "\uff5cDSML\uff5c"),
    "deepseek 4.1": re.sub("NS(?=[ip])", "NS ", _DSML).replace("NS", "\uff5cDSML\uff5c"),
    "minimax m3": (
        "{% macro xml(v) %}{% if v is mapping %}{% for k, w in v.items() %}NS<{{ k }}>{{ xml(w) }}"
        "NS</{{ k }}>{% endfor %}{% elif v is iterable and v is not string %}{% for w in v %}"
        "NS<item>{{ xml(w) }}NS</item>{% endfor %}{% else %}"
        "{{ v if v is string else v | tojson }}{% endif %}{% endmacro %}"
        'NS<tool_call>\nNS<invoke name="{{ c.function.name }}">{{ xml(c.function.arguments) }}'
        "NS</invoke>\nNS</tool_call>"
    ).replace("NS", "]<]minimax[>["),
    "kimi k3": (
        '<|open|>tools<|sep|><|open|>call tool="{{ c.function.name }}" index="1"<|sep|>'
        '{% for k, v in c.function.arguments.items() %}<|open|>argument key="{{ k }}" '
        """type="{{ 'string' if v is string else 'boolean' if v is boolean else 'number' if """
        """v is number else 'object' if v is mapping else 'array' }}"<|sep|>"""
        "{{ v if v is string else v | tojson }}<|close|>argument<|sep|>{% endfor %}"
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "command": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}\n]<|END_ACTION|>'
    ),
    "minimax m1": "<tool_calls>\n{{ c.function | tojson }}\n</tool_calls>",
    "nemotron": "<TOOLCALL>[{{ c.function | tojson }}]</TOOLCALL>",
    "internlm": "<|action_start|><|plugin|>\n{{ c.function | tojson }}<|action_end|>",
    "functools": "functools[{{ c.function | tojson }}]",
    "solar": (
        "<|tool_calls|><|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}"
        "<|tool_call:args|>{{ c.function.arguments | tojson }}<|tool_call:end|><|calls|>"
    ),
}
"""The form of a call in templates that no installed package has."""
NASTY = [
    *("", " a ", "\n", "\na\n", "a\r\nb", "\u2028\x85", "\U0001d4b3 \u00e9", "'q' \"r\"", "a\\"),
    *("\\n", "null", "None", "true", "1e400", "[1]", '{"a": 1}', "<b>", "&amp;", "; {"),
    *("<![CDATA[x]]>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "[TOOL_CALLS]"),
    *("{{ x }}", "</function>", '<tool_call>{"name": "look", "arguments": {}}</tool_call>'),
    "[look(key='a')]",
]
OTHERS = [
    *({"n": 0}, {"n": -(10**40)}, {"x": -0.0}, {"x": 1e300}, {"flag": False}, {"list": []}, {}),
    *({"list": ["1", "null", "a, b", "\n"]}, {"object": {"key": "7", "list": ["", "x"]}}),
    *({"a b": "v"}, {"a.b-c": "v"}, {"\u043a": "v"}, {"key": "x", "n": 1, "flag": True}),
]
PARTS = {
    "key": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "string"}},
}
NESTED = {**PARTS, "object": {"type": "object", "properties": PARTS}}


@functools.cache
def with_calls(form):
    """The tokenizer of a template whose calls have a form."""
    place = TEMPLATE[TEMPLATE.index("<tool_call>") : TEMPLATE.index("{% endfor %}{% if m.role")]
    tokenizer = build_tokenizer(["find it"])
    tokenizer.chat_template = TEMPLATE.replace(place, form)
    return ChatTokenizer(tokenizer)


@pytest.mark.parametrize("name", ["look", "get-it", "ns.get_it"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_in_the_form_of_other_templates_is_read_back(shape, name):
    chat = with_calls(SHAPES[shape])
    assert chat.template.reads_calls
    parameters = {"type": "object", "properties": NESTED, "required": []}
    tools = [dataclasses.replace(LOOK, name=name, parameters=parameters)]
    question = {"role": "user", "content": "find it"}
    start = chat.template.render([question], generation=False)
    for arguments in [*({"key": text} for text in NASTY), *OTHERS]:
        call = {"id": "a1", "function": {"name": name, "arguments": arguments}}
        for content in ("", "I look. "):
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            text = chat.template.render([question, answer], generation=False).removeprefix(start)
            calls = parse_tool_calls(chat.text.to_text(text), tools)
            expected = ToolCall(name=name, arguments=arguments)
            assert calls == [dataclasses.replace(expected, id=call.id) for call in calls[:1]], text
            assert calls


def test_calls_have_ids_that_name_the_tool_if_the_template_writes_only_ids():
    form = (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
    )
    chat = with_calls(form)
    transcript = Transcript(chat, Prompt(tools=(LOOK,)))
    question = Message(role="user", content="find it")
    transcript.read("", "user", StepInfo(messages=(question,)))
    said = form.replace("{{ c.id }}", "functions.look:0").replace(
        "{{ c.function.arguments | tojson }}", '{"key": "amber", "n": 2}'
    )
    transcript.write([*chat.encode(said), chat.end_of_turn])
    answer = Message(role="assistant", content="", tool_calls=(CALL,))
    called = dataclasses.replace(answer, tool_calls=(dataclasses.replace(CALL, id="call_1"),))
    result = Message(role="tool", content="cedar", tool_call_id="call_1")
    opening = transcript.read("", "user", StepInfo(messages=(question, called, result)))
    assert (opening.parent, opening.fork) == (0, None)
    shown = chat.template.render(
        [as_dict(m) for m in (question, answer, result, answer, result)], [LOOK.schema]
    )
    assert "functions.look:0" in shown
    assert "functions.look:1" in shown
    assert "<tool_call>" not in shown


MISTRAL = (
    "{% for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have length 9') }}{% endif %}[TOOL_RESULTS]{{ m.content }}"
    "{{ m.tool_call_id }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have length 9') }}{% endif %}{{ (c.function | tojson)[:-1] }}, "
    '"id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]<|im_end|>'
    "{% elif m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


def test_an_action_that_says_nothing_is_no_error_where_the_template_refuses_it():
    tokenizer = build_tokenizer(["find it"])
    tokenizer.chat_template = TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}",
    )
    chat = ChatTokenizer(tokenizer)
    transcript = Transcript(chat, Prompt())
    transcript.read("find it")
    transcript.write([chat.end_of_turn])
    assert "find it again" in chat.decode_all(transcript.read("find it again").ids)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(
    "form",
    [
        "{% if loop.first %}<tool_call>{{ c.function | tojson }}</tool_call>{% endif %}",
        "{% if not m.content %}<tool_call>{{ c.function | tojson }}</tool_call>{% endif %}",
    ],
)
def test_calls_that_a_template_drops_beside_others_or_a_text_are_in_the_text(form, calls):
    template = with_calls(form).template
    said = Message(role="assistant", content="I look.", tool_calls=(CALL,) * calls)
    chat = [as_dict(Message(role="user", content="x")), as_dict(said)]
    text = template.text.to_text(template.render(chat, generation=False))
    assert parse_tool_calls(text.partition("I look.")[2].strip(), [LOOK]) == [CALL] * calls


@pytest.mark.parametrize("ids", [("", ""), ("call_0123456789", "call_9876543210")])
def test_results_of_calls_reach_a_template_that_takes_only_ids_of_nine_letters(ids):
    tokenizer = build_tokenizer(["find it"])
    tokenizer.chat_template = MISTRAL
    template = ChatTokenizer(tokenizer).template
    calls = [dataclasses.replace(CALL, id=i) for i in ids]
    messages = [
        Message(role="user", content="find it"),
        Message(role="assistant", content="", tool_calls=tuple(calls)),
        *(Message(role="tool", content=f"r{n}", tool_call_id=i) for n, i in enumerate(ids)),
    ]
    text = template.text.to_text(template.render([message_for_template(m) for m in messages]))
    assert [c.id for c in parse_tool_calls(text, [LOOK])] == ["call00000", "call00001"]
    assert text.endswith(
        "[TOOL_RESULTS]r0call00000[/TOOL_RESULTS][TOOL_RESULTS]r1call00001[/TOOL_RESULTS]"
    )


@pytest.mark.parametrize("name", UNREAD)
def test_tools_are_listed_with_a_form_that_is_read_if_the_templates_own_is_not(name, caplog):
    chat = with_calls(UNREAD[name])
    messages = [as_dict(m) for m in (Message(role="user", content="find it"),)]
    answer = as_dict(Message(role="assistant", content="So:", tool_calls=(CALL,)))
    text = chat.text.to_text(chat.template.render([*messages, answer], [LOOK.schema]))
    assert "writes calls that are not read; the system message lists" in caplog.text
    assert "To call a tool, write <tool_call>" in text
    assert parse_tool_calls(text.rpartition("So:")[2].partition("<|im_end|>")[0], [LOOK]) == [CALL]


def test_the_calls_of_every_template_that_shows_them_are_read(chat):
    assert chat.template.reads_calls


WORDS = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<>|"), max_size=9
)
SETTINGS = st.fixed_dictionaries(
    {"key": WORDS.map(str.strip)},
    optional={"n": st.integers(-99, 99), "maybe": st.none(), "flag": st.booleans()},
)
PROPERTIES = {
    "key": {"type": "string"},
    "n": {"type": "integer"},
    "maybe": {"type": ["integer", "null"]},
    "flag": {"type": "boolean"},
}
BEFORE = ["", "I look. ", "I write <tool_call>, so: ", "Not [TOOL_CALLS], but: "]
UNESCAPED = ("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl")
"""Templates that put texts into quotes as they are."""
ANY = dataclasses.replace(
    LOOK, parameters={"type": "object", "properties": PROPERTIES, "required": []}
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(arguments=SETTINGS | st.just({}), before=st.sampled_from(BEFORE))
def test_a_call_that_a_template_writes_is_read_back(chat, request, arguments, before):
    if not chat.template.shows_calls:
        return
    if request.node.callspec.params["chat"] in UNESCAPED:
        arguments = {
            k: re.sub(r"['\\\\]", "", v) if k == "key" else v for k, v in arguments.items()
        }
    call = {"name": "look", "arguments": arguments}
    question = {"role": "user", "content": "find it"}
    answer = {
        "role": "assistant",
        "content": before,
        "tool_calls": [{"type": "function", "function": call}],
    }
    chats = [question], [question, answer]
    shown = [chat.template.render(c, [ANY.schema], generation=False) for c in chats]
    text = chat.text.to_text(shown[1].removeprefix(shown[0]))
    for action in (text, text.rstrip()):
        action = action.partition("</think>")[2] or action
        calls = parse_tool_calls(action, [ANY])
        assert calls == [ToolCall(name="look", arguments=arguments)], action
