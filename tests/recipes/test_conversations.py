import json
from functools import partial

import numpy as np
import pytest
from support.chat_families import FAMILIES
from support.talks import TALK, TOOL, write

from gspo_env.chat import ChatTokenizer, tokenize
from gspo_env.chat.action import message_for_template
from gspo_env.errors import ConfigError
from gspo_env.recipes.build import build, build_tokenizer, encode_action, imitation_samples
from gspo_env.recipes.conversations import (
    Conversation,
    read_conversations,
    read_demonstrations,
    to_episode,
)
from gspo_env.recipes.tiny import Tiny
from gspo_env.tools.calls import parse_message

ROW = {"messages": TALK, "tools": [TOOL], "reward": 1.0}


def line_with(place, fields, line=None):
    """A line whose message at `place` has further fields."""
    row = json.loads(line or json.dumps(ROW))
    row["messages"][place] |= fields
    return json.dumps(row)


def test_a_message_with_the_weight_0_is_context_and_not_imitated(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(line_with(2, {"weight": 0}), encoding="utf-8-sig")  # with a byte-order mark
    chat = ChatTokenizer(build_tokenizer(["x"]))
    (conversation,) = read_conversations(str(path))
    assert json.loads(conversation.line())["messages"][2]["weight"] == 0
    (sample,) = imitation_samples([to_episode(conversation, chat, "x", 0)], chat)
    ids, trained = np.asarray(sample.token_ids), np.asarray(sample.turn_ids) >= 0
    assert "lookup" in chat.decode_all(ids[~trained].tolist())
    assert chat.decode(ids[trained].tolist()) == "It is river."


def test_a_line_that_is_read_and_written_is_the_same(tmp_path):
    (found,) = read_conversations(write(tmp_path / "c.jsonl", ROW))
    again = json.loads(found.line())
    assert again["messages"] == ROW["messages"]
    assert again["reward"] == 1.0
    (twice,) = read_conversations(write(tmp_path / "d.jsonl", again))
    assert twice.messages == found.messages


def test_calls_and_results_without_ids_are_imitated(tmp_path):
    plain = json.loads(json.dumps(ROW))
    for message in plain["messages"]:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            del call["id"]
    chat, ids = ChatTokenizer(build_tokenizer(["x"])), []
    for row in (ROW, plain):
        (conversation,) = read_conversations(write(tmp_path / f"{len(ids)}.jsonl", row))
        (sample,) = imitation_samples([to_episode(conversation, chat, "x", 0)], chat)
        ids.append(sample.token_ids)
    np.testing.assert_array_equal(*ids)


def test_the_tiny_model_imitates_conversations_in_its_own_vocabulary(tmp_path):
    path = write(tmp_path / "c.jsonl", ROW)
    model, tokenizer, episodes = build(
        {"gspo/Program-v0": None}, Tiny(conversations=path, hidden_size=32), 0
    )
    assert model.config.vocab_size == len(tokenizer)
    frame = '<tool_call>{"name": "lookup", "arguments": {"key": "'
    assert len(tokenizer(frame)["input_ids"]) == 1
    assert [t.text for t in episodes[0].turns] == [f'{frame}amber"}}}}</tool_call>', "It is river."]
    (sample,) = imitation_samples(episodes, ChatTokenizer(tokenizer))
    text = tokenizer.decode(sample.token_ids)
    rendered = tokenizer.apply_chat_template(
        [{**m, "content": m["content"] or ""} for m in ROW["messages"][:2]]
        + [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "lookup", "arguments": {"key": "amber"}}}],
            },
            *ROW["messages"][3:],
        ],
        tools=[TOOL],
        tokenize=False,
    )
    assert text.strip() == rendered.strip()
    trained = np.asarray(sample.token_ids)[np.asarray(sample.turn_ids) >= 0]
    assert (
        tokenizer.decode(trained)
        == f'{frame}amber"}}}}</tool_call><|im_end|>It is river.<|im_end|>'
    )
    pieces = set(tokenizer.convert_ids_to_tokens(sample.token_ids)) - {"<0x0A>"}
    assert not any(piece.startswith("<0x") for piece in pieces)  # all words are known


def test_only_rewarded_conversations_are_imitated_if_asked(tmp_path):
    rows = [{**ROW, "reward": 0.2}, {**ROW, "reward": None}, {**ROW, "reward": 0.9}]
    path = write(tmp_path / "c.jsonl", *rows)
    assert len(read_conversations(path)) == 3
    assert [one.reward for one in read_conversations(path, 0.5)] == [0.9]
    with pytest.raises(ConfigError, match="none with a reward of at least 2"):
        read_conversations(path, 2)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1"),
        ("[]", "expected an object"),
        ('{"messages": "hi"}', "not a list"),
        ('{"conversations": []}', "messages is missing, the keys are conversations"),
        ('{"messages": []}', "no message is the assistant's"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message is the assistant's"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "first message"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "robot"),
        (json.dumps({**ROW, "reward": "good"}), "reward"),
        (json.dumps({**ROW, "tools": [{}]}), "tools"),
        ("", "has 0 conversations"),
        *((line_with(0, {"weight": w}), "weight is .*expected 0$") for w in (1, 0.5)),
        *((line_with(4, {"weight": w}), "weight is .*0 or 1") for w in (2, "0", True)),
        (line_with(2, {"weight": 0}, line_with(4, {"weight": 0})), "all of them have the weight 0"),
        (line_with(1, {"content": [3]}), "has a part 3"),
        (line_with(4, {"content": None}), r"messages\[4\] has neither content nor tool_calls"),
        (json.dumps({**ROW, "functions": [{"name": "f"}]}), "functions is not a key"),
        (json.dumps({**ROW, "reward": 10**400}), "reward is .*; expected a number"),
        *(
            (line_with(2, {"tool_calls": [{"function": {"name": "f", "arguments": text}}]}), "JSON")
            for text in ('{"a": NaN}', '{"a": 1, "a": 2}')
        ),
    ],
)
def test_a_malformed_line_is_one_sentence_with_its_number(tmp_path, line, told):
    path = tmp_path / "c.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=told):
        read_conversations(str(path))


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen2_5", "qwen3_coder", "llama3", "mistral", "deepseek", "harmony", "gemma"],
)
def test_an_imitated_action_comes_back_as_its_message(tmp_path, family):
    chat = ChatTokenizer(FAMILIES[family]())
    (episode,) = read_demonstrations(write(tmp_path / "c.jsonl", ROW), None, chat, "x")
    messages = read_conversations(tmp_path / "c.jsonl")[0].messages
    ids = tokenize(episode, chat, encode=partial(encode_action, chat=chat))
    assert "lookup" in episode.turns[0].text
    if chat.template.shows_calls and chat.template.takes_tool_role:
        spoken = [message_for_template(m) for m in messages]
        rendered = chat.tokenizer.apply_chat_template(spoken, tools=[TOOL], tokenize=False)
        text = chat.tokenizer.decode(ids.sequences[-1].token_ids)
        assert text.strip() == rendered.strip()
    message, malformed = parse_message(episode.turns[0].text)
    if family != "harmony":  # its own response template reads it
        assert (message.tool_calls[0].arguments, malformed) == ({"key": "amber"}, 0)


def test_conversations_of_held_out_tasks_keep_their_key(tmp_path):
    path = write(tmp_path / "c.jsonl", {**ROW, "task_key": "t7"})
    chat = ChatTokenizer(build_tokenizer(["x"]))
    (episode,) = read_demonstrations(path, None, chat, "gspo/Program-v0")
    assert episode.reset.task_key == "t7"
    assert episode.outcome == 1.0
    assert isinstance(read_conversations(path)[0], Conversation)
    assert to_episode(read_conversations(path)[0], chat, "x", 3).task.seed == 3
