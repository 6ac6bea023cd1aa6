"""The cache of encoded texts has a limit in bytes, whatever is put into it."""

import tracemalloc

import pytest

from gspo_env.chat.encode import BoundedCache

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
