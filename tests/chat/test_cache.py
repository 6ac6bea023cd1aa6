"""The cache of encoded texts has a limit in bytes, whatever is put into it."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_env.chat.cache import BoundedCache

LIMIT = 1 << 20


@pytest.mark.parametrize("letter", ["a", "é", "\U00013000"])
@pytest.mark.parametrize("length", [1, 50, 500])
def test_what_is_kept_is_at_most_the_limit_in_real_memory(letter, length):
    def encode(text):
        return tuple(range(1000, 1000 + 4 * len(text)))  # bytes: four ids a letter

    def fill(cache):
        for n in range(4 * LIMIT // (300 + 200 * length)):
            cache(f"{n}{letter * length}")

    cache = BoundedCache(encode, LIMIT)
    fill(BoundedCache(encode, LIMIT))  # Python keeps the memory of freed tuples for new ones
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fill(cache)
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert cache.bytes <= LIMIT
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


@given(st.lists(st.text(max_size=30)))
def test_the_results_are_those_of_the_function(texts):
    cache = BoundedCache(lambda text: tuple(map(ord, text)), 2_000)
    for text in [*texts, *texts]:
        assert cache(text) == tuple(map(ord, text))
        assert cache.bytes <= 2_000


def test_a_real_tokenizer_keeps_no_more_than_its_limit(chat):
    text = chat.template.text
    for n in range(50):
        text.encode(f"{n}" + "\U00013000" * 20_000)
    assert text._cached.bytes <= text._cached._most
