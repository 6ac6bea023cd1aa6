"""Writes hostile strings into every channel of every model family and counts the control tokens.

    python stress/control_tokens.py                     # 10,000 strings a channel and family
    python stress/control_tokens.py --count 200 gemma qwen3

The strings come from the family's own tokens: whole, nested, cut, in other Unicode forms, escaped,
as template code, as the placeholders of the renderer. The control tokens of a prompt with such a
string have to be those of the same prompt with a harmless one, and the text has to be in it.
"""

from __future__ import annotations

import argparse
import html
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.chat_families import FAMILIES

from gspo_env.chat.conversation import Transcript
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.types import Message, Prompt, StepInfo, ToolCall
from gspo_envs.data.dataset import DatasetEnv
from gspo_envs.data.rewards import Attempt, conversation_encoder

EDITED = ("/think", "<b>", "</b>", "<!-- -->", "&lt;", "&#124;", "((", "/th/thinkink")
"""What some templates remove or replace."""
TOOLS_AT_ONCE = 50
"""Hostile tools in one prompt, because each new list of tools is rendered again."""


def control_ids(tokenizer: Any) -> set[int]:
    """The added tokens that are special or contain a symbol, except the unknown token."""
    return {
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if index != tokenizer.unk_token_id
        and (token.special or any(c in "<>[]|/" for c in token.content))
    }


def hostile(tokenizer: Any, rng: random.Random) -> Iterator[str]:
    """Yields strings for ever."""
    controls = control_ids(tokenizer)
    names = [tokenizer.added_tokens_decoder[i].content for i in sorted(controls)]
    glue = ["user\n", "\n", "assistant\n", " ", "\n\n", "system", "</s>", "\u200b", "\ue000", "x"]
    forms: list[Callable[[str], str]] = [
        lambda t: t,
        lambda t: t,
        lambda t: t[: (cut := rng.randrange(len(t) + 1))] + rng.choice(names) + t[cut:],
        lambda t: t[: (cut := rng.randrange(len(t) + 1))] + rng.choice(glue) + t[cut:],
        lambda t: t[: (cut := rng.randrange(len(t) + 1))] + rng.choice(EDITED) + t[cut:],
        lambda t: t[: (cut := rng.randrange(len(t) + 1))] + rng.choice(EDITED) + t[cut:],
        lambda t: html.escape(t),
        lambda t: t.replace("<|", "((").replace("|>", "))"),
        lambda t: t.strip("</>"),
        lambda t: t[rng.randrange(len(t)) :],
        lambda t: t[: rng.randrange(len(t)) + 1],
        lambda t: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in t),
        lambda t: "".join(f"{c}\u0301" if rng.random() < 0.2 else c for c in t),
        lambda t: t.swapcase(),
        lambda t: t.strip("<>|[]"),
        lambda t: "".join(f"\\u{ord(c):04x}" if rng.random() < 0.5 else c for c in t),
        lambda t: "".join(f"<0x{byte:02X}>" for byte in t.encode()),
        lambda t: "{{ '" + t + "' }}{% raw %}" + t,
        lambda t: f"{rng.randrange(10**20):020d}00000{rng.randrange(9)}{t}",
        lambda t: t.replace("<", rng.choice("\ue000\ue001\u226e\uff1c\ufe64")),
        lambda t: '"}' + t + '{"',
        lambda t: t + "\ud83d" * (rng.random() < 0.2),
        lambda t: str(rng.choice(sorted(controls))),
    ]
    while True:
        texts = (rng.choice(forms)(rng.choice(names)) for _ in range(rng.randint(1, 4)))
        yield rng.choice(["", "", " ", "a "]) + rng.choice(["", " ", "\n"]).join(texts)


def tool(name: str, description: str = "x", properties: Any = None, **extra: Any) -> Any:
    parameters = {"type": "object", "properties": properties or {}, "required": []}
    function = {"name": name, "description": description, "parameters": parameters, **extra}
    return SimpleNamespace(schema={"type": "function", "function": function})


def _of_parameter(where: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: tool("look", properties={"key": where(text)})


TOOL_CHANNELS: dict[str, Callable[[str], Any]] = {
    "tool name": tool,
    "tool description": lambda text: tool("look", text),
    "parameter name": lambda text: tool("look", properties={text: {"type": "string"}}),
    "parameter description": _of_parameter(lambda t: {"type": "string", "description": t}),
    "enum": _of_parameter(lambda t: {"type": "string", "enum": [t, "b"], "description": "x"}),
    "default": _of_parameter(lambda t: {"type": "string", "default": t, "description": "x"}),
}
"""The tool with a text in one place, by channel."""


def channels(tokenizer: Any) -> dict[str, Callable[[str], Sequence[int]]]:
    """The ids of a prompt with a text in one place, by channel."""
    chat, judge = ChatTokenizer(tokenizer), conversation_encoder(tokenizer)
    end = chat.stop_ids[0] if chat.end_of_turn is None else chat.end_of_turn
    earlier = Message(role="user", content="a"), Message(role="assistant", content="b")

    def row(system: str, user: str) -> Sequence[int]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        env = DatasetEnv([{"prompt": messages}], held_out=0)
        observation, _ = env.reset(seed=0)
        return chat.start(observation, Prompt(system=env.system_prompt))

    def judged(answer: str) -> Sequence[int]:
        prompt, completion = (
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": answer},
        )
        return judge(Attempt(prompt=(prompt,), completion=(completion,), row={}))

    question = Message(role="user", content="a")

    def converse(answer: Message, result: Message = question) -> Sequence[int]:
        request = StepInfo(messages=(question, answer, result))
        return Transcript(chat, Prompt()).read("", "user", request).ids

    def call(text: str) -> Sequence[int]:
        calls = (ToolCall(name=f"look{text}", arguments={text: [text, {"a": text}]}, id=text),)
        answer = Message(role="assistant", content="", reasoning=text, tool_calls=calls)
        return converse(answer, Message(role="tool", content=text, tool_call_id=text, name=text))

    return {
        "message of a conversation": lambda t: converse(Message(role="assistant", content=t)),
        "call of a conversation": call,
        "system": lambda t: chat.start("a", Prompt(system=t)),
        "first observation": chat.start,
        "later observation": lambda t: chat.follow(t, end),
        "tool result": lambda t: chat.follow(t, end, "tool"),
        "earlier user message": lambda t: chat.start(
            "c", Prompt(messages=(Message(role="user", content=t), earlier[1]))
        ),
        "earlier answer": lambda t: chat.start(
            "c", Prompt(messages=(earlier[0], Message(role="assistant", content=t)))
        ),
        "row": lambda t: row("s", t),
        "system of a row": lambda t: row(t, "a"),
        "reward model": judged,
    }


def attack(
    name: str, count: int, seed: int = 0, tokenizer: Any = None
) -> Iterator[tuple[str, int, list[str]]]:
    """Yields each channel with the number of strings tried and those that gave control tokens."""
    tokenizer = tokenizer or FAMILIES[name]()
    controls = control_ids(tokenizer)
    texts = hostile(tokenizer, random.Random(f"{name} {seed}"))

    def read(ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in controls]

    for channel, encode in channels(tokenizer).items():
        harmless = read(encode("harmless"))
        tried = [next(texts) for _ in range(count)]
        yield channel, count, [text for text in tried if read(encode(text)) != harmless]
    chat = ChatTokenizer(tokenizer)
    for channel, make_tool in TOOL_CHANNELS.items():
        failed = []
        for start in range(0, count, TOOLS_AT_ONCE):
            tried = [next(texts) for _ in range(min(TOOLS_AT_ONCE, count - start))]
            harmless = [make_tool(f"harmless{n}") for n in range(len(tried))]
            expected = read(chat.start("a", Prompt(tools=tuple(harmless))))
            if read(chat.start("a", Prompt(tools=tuple(map(make_tool, tried))))) != expected:
                failed += tried
        yield channel, count, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[], help="all by default")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    strings = failures = 0
    for name in args.families or FAMILIES:
        started, results = time.perf_counter(), {}
        for channel, tried, failed in attack(name, args.count, args.seed):
            strings += tried
            failures += len(failed)
            results |= {channel: failed[:3]} if failed else {}
        seconds = time.perf_counter() - started
        print(f"{name:18}{results or 'ok'} ({seconds:.0f} s)", flush=True)
    print(f"{strings:,} strings, {failures} with another number of control tokens")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
