"""Real, tiny parts that the tests share."""

from __future__ import annotations

import pytest

from gspo_env.chat import ChatTokenizer
from gspo_env.embedded import EmbeddedConfig, build_model, build_tokenizer

WORDS = [
    'Follow 3 links from "amber".',
    "You are a helpful assistant. Use the tool, then answer.",
    "<answer>cedar</answer> birch stone river",
]


@pytest.fixture(scope="session")
def tokenizer():
    """A word tokenizer with a ChatML template."""
    return build_tokenizer(
        WORDS, ['<tool_call>{"name": "lookup", "arguments": {"key": "', '"}}</tool_call>']
    )


@pytest.fixture(scope="session")
def chat(tokenizer):
    """The transcript maker of the tiny tokenizer."""
    return ChatTokenizer(tokenizer)


@pytest.fixture
def model(tokenizer):
    """A tiny Qwen3 with random weights, large enough to prefer some ids."""
    tiny = build_model(EmbeddedConfig(hidden_size=32), len(tokenizer), tokenizer.eos_token_id, 0)
    for parameter in tiny.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return tiny
