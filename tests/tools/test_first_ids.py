"""The tokens with which a control token or a mark of calls begins, in real vocabularies."""

import copy

import pytest
from support.chat_families import FAMILIES

from gspo_env.tools.marks import first_ids

TEXTS = ("", "a", "a ", "a\n", "x.", "<b", "end>", '"}}')


def misses(tokenizer, mark):
    """The texts behind which the token that begins a mark is none of `first_ids`."""
    ids, missed = first_ids(tokenizer), []
    for text in TEXTS:
        encoding = tokenizer(text + mark, return_offsets_mapping=True, add_special_tokens=False)
        pairs = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        first = next(i for i, (start, end) in pairs if start <= len(text) < end)
        if first not in ids:
            missed.append((text, tokenizer.convert_ids_to_tokens(first)))
    return missed


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3", "mistral", "phi4", "smollm3"])
def test_every_token_that_begins_a_mark_of_calls_is_found_in_families(family):
    tokenizer = FAMILIES[family]()
    named = [mark for mark in ("<tool_call>", "[TOOL_CALLS]") if mark in tokenizer.chat_template]
    for mark in named or ["<tool_call>", "</tool_call>"]:
        assert not misses(tokenizer, mark), mark


def test_control_tokens_are_found_and_other_tokens_are_not(tokenizer):
    ids = set(first_ids(tokenizer))
    assert set(tokenizer.all_special_ids) <= ids
    assert not ids & set(tokenizer("What is 12 + 7?", add_special_tokens=False)["input_ids"])


def test_a_token_that_holds_a_mark_and_what_follows_it_begins_it(tokenizer):
    merged = copy.deepcopy(tokenizer)
    merged.add_tokens(['<tool_call>{"name": "', 'x"}}</tool_call>'])
    new = {len(tokenizer), len(tokenizer) + 1}
    assert set(first_ids(merged)) - set(first_ids(tokenizer)) == new


@pytest.mark.real
def test_smollm2_begins_a_mark_with_a_piece_of_it():
    from gspo_env.model.load import load_model

    tokenizer = load_model("smollm2", "auto")[1]
    pieces = {tokenizer.convert_ids_to_tokens(i) for i in first_ids(tokenizer)}
    assert {"<|im_end|>", "<|im_start|>", "<", "</"} <= pieces
    for mark in ("<tool_call>", "</tool_call>"):
        assert not misses(tokenizer, mark)
