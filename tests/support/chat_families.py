"""Small tokenizers with the chat templates, token kinds and pipelines of well-known model families.

The vocabularies are trained on a few sentences; what a family does with control tokens, white
space, unknown characters, system messages and tools is rebuilt.
"""

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "You are a helpful assistant. Use the tool, then answer the question.",
    "user assistant system tool model developer think call result start end of turn message",
    "Follow 3 links from the stone, then say: birch! What is 12 + 30? The answer is 42.",
    '{"name": "lookup", "arguments": {"key": "amber"}} row 1, row 2; [INST] <<SYS>> <|user|>',
]
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
_ALTERNATE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role != 'system' %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('no alternation') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)


def _byte_level(normalizer: Any = None, prefix: bool = False) -> Tokenizer:
    """GPT-2's bytes behind the words of a regular expression, as Qwen, Llama 3 and others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _sentence_piece(kind: str, extra: Sequence[str] = ()) -> Tokenizer:
    """SentencePiece's BPE with bytes for unknown characters, as Llama 2, Gemma and Mistral."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        replace = normalizers.Replace(" ", "\u2581")
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
            if kind == "prepend"
            else replace
        )
    if kind != "replace":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *_BYTES, *extra]
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=special)
    tokenizer.train_from_iterator(TEXTS, trainer)
    # the trainer lists all of these as added tokens; in the families they are only vocabulary
    state = Tokenizer.from_str(_without_added(tokenizer))
    state.add_special_tokens([_special(t) for t in ("<unk>", "<s>", "</s>")])
    return state


def _without_added(tokenizer: Tokenizer) -> str:
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = []
    return json.dumps(state)


def _special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


def _plain(text: str, *, normalized: bool = False) -> AddedToken:
    return AddedToken(text, special=False, normalized=normalized)


def _build(
    backend: Tokenizer, template: str, added: Sequence[AddedToken], **roles: str
) -> PreTrainedTokenizerFast:
    backend.add_tokens([t for t in added if not t.special])
    backend.add_special_tokens([t for t in added if t.special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    tokenizer.chat_template = template
    return tokenizer


_HERMES_TOOLS = (
    "\n\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
    'Answer with <tool_call>\n{"name": NAME}\n</tool_call>'
)


def _qwen(default: str = "", tools: str = _HERMES_TOOLS) -> PreTrainedTokenizerFast:
    template = (
        "{% set first = messages[0] %}"
        "{% if first.role == 'system' or tools or DEFAULT %}<|im_start|>system\n"
        "{% if first.role == 'system' %}{{ first.content }}{% else %}{{ DEFAULT }}{% endif %}"
        "{% if tools %}" + tools + "{% endif %}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% set c = m.content %}"
        "{% if m.role == 'user' %}<|im_start|>user\n{{ c }}<|im_end|>\n"
        "{% elif m.role == 'assistant' %}"
        "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im_start|>assistant\n{{ c }}<|im_end|>\n"
        "{% elif m.role == 'tool' %}"
        "<|im_start|>user\n<tool_response>\n{{ c }}\n</tool_response><|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("DEFAULT", repr(default))
    added = [_special(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    words = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <|fim_pad|>"
    added += [_plain(t) for t in words.split()]
    return _build(
        _byte_level(normalizers.NFC()),
        template,
        added,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


def qwen3() -> PreTrainedTokenizerFast:
    return _qwen()


def qwen2_5() -> PreTrainedTokenizerFast:
    return _qwen("You are a helpful assistant.")


def qwen3_coder() -> PreTrainedTokenizerFast:
    """Writes names of tools and keys of schemas as tags."""
    return _qwen(
        tools="{% for t in tools %}\n<function>\n<name>{{ t.function.name }}</name>"
        "{% for k, v in t.function.parameters.properties.items() %}\n<{{ k }}>{{ v | tojson }}"
        "</{{ k }}>{% endfor %}\n{{ t.function.description | trim }}</function>{% endfor %}"
    )


_LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set talk = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set talk = messages %}{% set system = '' %}{% endif %}"
    "{% for m in talk %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no alternation') }}{% endif %}"
    "{% set c = system + m.content if loop.first else m.content %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + c.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + c.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_SENTENCE: dict[str, str] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama2() -> PreTrainedTokenizerFast:
    return _build(_sentence_piece("prepend"), _LLAMA2, [], **_SENTENCE)


def llama2_metaspace() -> PreTrainedTokenizerFast:
    return _build(_sentence_piece("metaspace"), _LLAMA2, [], **_SENTENCE)


def zephyr() -> PreTrainedTokenizerFast:
    """Roles are plain text, and the conversation does not begin with a control token."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    return _build(_sentence_piece("metaspace"), template, [], **_SENTENCE)


def mistral() -> PreTrainedTokenizerFast:
    names = "[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]"
    template = (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set talk = messages[1:] %}{% else %}{% set talk = messages %}{% endif %}"
        + _ALTERNATE
        + "{{ bos_token }}{% for m in talk %}{% if m.role == 'user' %}"
        "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
        "{% endif %}{% if loop.first and system is defined %}"
        "{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}"
        "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}"
        "{% else %}{{ ' ' + m.content.strip() + eos_token }}{% endif %}{% endfor %}"
    )
    backend = _sentence_piece("metaspace", names.split())
    return _build(backend, template, [_special(n) for n in names.split()], **_SENTENCE)


def gemma() -> PreTrainedTokenizerFast:
    """Line breaks, runs of spaces and some tags are added tokens that are not special."""
    plain = ["\n", "\n\n", "\n\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<table>", "<td>"]
    names = ["<start_of_turn>", "<end_of_turn>", "<unused0>"]
    template = (
        "{{ bos_token }}" + _NO_SYSTEM + _ALTERNATE + "{% for m in messages %}"
        "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    backend = _sentence_piece("replace", [*plain, *names])
    added = [_plain(t) for t in plain] + [_special(n) for n in names]
    return _build(backend, template, added, **_SENTENCE)


def llama3() -> PreTrainedTokenizerFast:
    names = "begin_of_text end_of_text start_header_id end_header_id eot_id eom_id python_tag"
    template = (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{{ m.content | trim }}{% endif %}"
        "{% if m.role == 'user' and loop.index0 < 2 and tools %}"
        "{% for t in tools %}\n\n{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
        "<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    return _build(
        _byte_level(),
        template,
        [_special(f"<|{name}|>") for name in names.split()],
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
    )


def phi3() -> PreTrainedTokenizerFast:
    """Its control tokens take the white space behind them."""
    names = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|tool|>")
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    added = [_special(n, rstrip=True) for n in names]
    return _build(_sentence_piece("prepend"), template, added, **_SENTENCE)


def phi4() -> PreTrainedTokenizerFast:
    """Runs of spaces and tabs are added tokens that are not special."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' }}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
    )
    added = [_plain(" " * n, normalized=True) for n in range(2, 9)]
    added += [_plain("\t" * n, normalized=True) for n in range(2, 5)]
    added += [_special(t) for t in ("<|im_start|>", "<|im_sep|>", "<|im_end|>")]
    return _build(_byte_level(), template, added, eos_token="<|im_end|>")


def deepseek() -> PreTrainedTokenizerFast:
    """Its role tokens are not special, and an action begins inside its reasoning."""
    bar = "\uff5c"
    ends = [f"<{bar}begin\u2581of\u2581sentence{bar}>", f"<{bar}end\u2581of\u2581sentence{bar}>"]
    template = (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ bos_token + ns.system }}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<BUserB>' + m.content }}"
        "{% elif m.role == 'assistant' %}"
        "{{ '<BAssistantB>' + m.content.split('</think>')[-1] + eos_token }}"
        "{% elif m.role == 'tool' %}{{ '<BtoolB>' + m.content + '</BtoolB>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<BAssistantB><think>\n{% endif %}"
    ).replace("B", bar)
    names = f"<{bar}User{bar}> <{bar}Assistant{bar}> <{bar}tool{bar}> </{bar}tool{bar}>"
    added = [_special(t) for t in ends]
    added += [_plain(t) for t in [*names.split(), "<think>", "</think>"]]
    return _build(_byte_level(), template, added, bos_token=ends[0], eos_token=ends[1])


def glm4() -> PreTrainedTokenizerFast:
    """The next role's token ends a turn."""
    template = (
        "[gMASK]<sop>{% if tools %}<|system|>\n# Tools{% for t in tools %}\n{{ t | tojson }}"
        "{% endfor %}{% endif %}{% for m in messages %}"
        "{% set role = 'observation' if m.role == 'tool' else m.role %}"
        "{{ '<|' + role + '|>\n' }}"
        "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% elif m.role == 'assistant' %}{{ m.content.strip() }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    names = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
    words = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
    added = [_special(t) for t in names.split()] + [_plain(t) for t in words.split()]
    return _build(_byte_level(), template, added, eos_token="<|endoftext|>")


def harmony() -> PreTrainedTokenizerFast:
    names = "startoftext endoftext return constrain channel start end message call"
    template = (
        "<|start|>system<|message|>You are a model.\n# Valid channels: analysis, final<|end|>"
        "{% if messages[0].role == 'system' or tools %}<|start|>developer<|message|>"
        "{% if messages[0].role == 'system' %}# Instructions\n\n{{ messages[0].content }}\n\n"
        "{% endif %}{% if tools %}# Tools\n\nnamespace functions {{ '{' }}\n{% for t in tools %}"
        "// {{ t.function.description }}\ntype {{ t.function.name }} = (_: {{ '{' }}\n"
        "{% for k, v in t.function.parameters.properties.items() %}"
        "// {{ v.description }}\n{{ k }}: "
        "{% if v.enum %}\"{{ v.enum | join('\" | \"') }}\"{% elif v.type == 'integer' %}number"
        "{% else %}{{ v.type }}{% endif %},\n{% endfor %}{{ '}' }}) => any;\n{% endfor %}"
        "{{ '}' }}{% endif %}<|end|>{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
        "{% elif m.role == 'assistant' %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
        "{% elif m.role == 'tool' %}<|start|>functions.x to=assistant<|channel|>commentary"
        "<|message|>{{ m.content | tojson }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    added = [_special(f"<|{name}|>") for name in names.split()]
    return _build(_byte_level(), template, added, eos_token="<|return|>")


def granite() -> PreTrainedTokenizerFast:
    template = (
        "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n"
        "{% endif %}{% for m in messages %}"
        "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "<|start_of_role|>assistant<|end_of_role|>{% endif %}"
    )
    names = "end_of_text fim_prefix start_of_role end_of_role tool_call"
    added = [_special(f"<|{name}|>") for name in names.split()]
    added += [_plain(t) for t in ("  ", "    ")]
    return _build(_byte_level(), template, added, eos_token="<|end_of_text|>")


def unigram() -> PreTrainedTokenizerFast:
    """NFKC first, control tokens that are matched after it, and a vocabulary that contains them."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("`", "'")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    names = ["<unk>", "<|user|>", "<|bot|>", "<|end|>", "<tool>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, special_tokens=names, unk_token="<unk>"
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend = Tokenizer.from_str(_without_added(backend))
    template = (
        _NO_SYSTEM + "{% for m in messages %}"
        "{% set who = 'bot' if m.role == 'assistant' else m.role %}"
        "<|{{ who }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}"
    ).replace("{{ who }}", "{{ 'user' if who == 'tool' else who }}")
    added = [_special(names[0])]
    added += [AddedToken(name, special=True, normalized=True) for name in names[1:]]
    return _build(backend, template, added, eos_token="<|end|>", unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    """Lower case, no accents, unknown words: what BERT's tokenizer does with chats."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    names = ["[UNK]", "[CLS]", "[SEP]", "[USER]", "[BOT]", "[TOOL]", "[SYSTEM]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=names)
    backend.train_from_iterator(TEXTS, trainer)
    template = (
        "[CLS]{% for m in messages %}{% set who = 'bot' if m.role == 'assistant' else m.role %}"
        "{{ '[' + who | upper + ']' + m.content + '[SEP]' }}{% endfor %}"
        "{% if add_generation_prompt %}[BOT]{% endif %}"
    )
    return _build(backend, template, [], cls_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]")


def smollm3() -> PreTrainedTokenizerFast:
    """Removes `/think` from the system message, and writes tools as Python does."""
    template = (
        "{% set ns = namespace(mode='/think', system='') %}"
        "{% if messages[0].role == 'system' %}{% set text = messages[0].content %}"
        "{% if '/no_think' in text %}{% set ns.mode = '/no_think' %}{% endif %}"
        "{% set ns.system = text.replace('/no_think', '').replace('/think', '').rstrip() %}"
        "{% endif %}<|im_start|>system\nReasoning Mode: {{ ns.mode }}\n\n{{ ns.system }}"
        "{% if tools %}\n<tools>{% for t in tools %}\n{{ (t | string).replace('/think', '') }}"
        "{% endfor %}\n</tools>{% endif %}<|im_end|>\n"
        "{% for m in messages %}{% if m.role in ['user', 'tool'] %}"
        "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
        "{{ '<|im_start|>assistant\n' + m.content.lstrip('\n') + '<|im_end|>\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if ns.mode == '/no_think' %}<think>\n\n</think>\n{% endif %}{% endif %}"
    )
    added = [_special(t) for t in ("<|im_start|>", "<|im_end|>", "<|end_of_text|>")]
    added += [_plain(t) for t in ("<think>", "</think>")]
    return _build(_byte_level(), template, added, eos_token="<|im_end|>")


def _editing(edit: str, tools: str = "tools | tojson") -> PreTrainedTokenizerFast:
    """A template that edits its messages with an expression of `c`."""
    template = (
        "{% if tools %}<|im_start|>system\n{{ TOOLS }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% set c = m.content %}"
        "{{ '<|im_start|>' + m.role + '\n' + EDIT + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    added = [_special(t) for t in ("<|im_start|>", "<|im_end|>", "<|END|>", "<s>")]
    template = template.replace("EDIT", edit).replace("TOOLS", tools)
    return _build(_byte_level(), template, added, eos_token="<|im_end|>")


def edits_tags() -> PreTrainedTokenizerFast:
    return _editing("(c | striptags)", "(tools | tojson) | striptags")


def edits_pieces() -> PreTrainedTokenizerFast:
    return _editing("(c.split('/think') | join)", "(tools | tojson).split('/think') | join")


def edits_symbols() -> PreTrainedTokenizerFast:
    return _editing("c.replace('((', '<|').replace('))', '|>')")


def edits_case() -> PreTrainedTokenizerFast:
    return _editing("(c | lower)", "tools | tojson | upper")


def edits_length() -> PreTrainedTokenizerFast:
    return _editing("c[:120]", "(tools | tojson) | truncate(200, True, '')")


def edits_order() -> PreTrainedTokenizerFast:
    return _editing("(c | reverse | reverse)", "tools | tojson(sort_keys=True)")


def composes() -> PreTrainedTokenizerFast:
    """Puts control tokens together, and writes keys of schemas as tags."""
    template = (
        "{% for t in tools or [] %}{{ '<|' + 'system' + '|>' }}"
        "{% for k, v in t.function.parameters.properties.items() %}"
        "<{{ k }}>{{ v | tojson }}</{{ k }}>{% endfor %}{{ t.function.name }}"
        "<{{ t.function.description }}>{{ '<|{}|>'.format('end') }}{% endfor %}"
        "{% for m in messages %}{% set c = m.content.replace('/think', '') %}"
        "{{ '<|' + m.role + '|>' + c + '<|' ~ 'end' ~ '|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|%s|>' % 'assistant' }}{% endif %}"
    )
    names = "<|user|> <|assistant|> <|system|> <|tool|> <|end|> <s> </s> <note>"
    added = [_special(name) for name in names.split()]
    return _build(_byte_level(), template, added, eos_token="<|end|>")


def _copy(maker: Callable[[], PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return copy.deepcopy(maker())  # a test may change its template


FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    maker.__name__: partial(_copy, cache(maker))
    for maker in (
        qwen3, qwen2_5, qwen3_coder, llama2, llama2_metaspace, llama3, gemma, mistral, zephyr, phi3,
        phi4, deepseek, glm4, harmony, granite, unigram, wordpiece,
        smollm3, edits_tags, edits_pieces, edits_symbols, edits_case, edits_length, edits_order,
        composes,
    )
}  # fmt: skip
"""A function that makes the tokenizer of each family, by name."""
