"""The key-value cache of the embedded engine."""

from __future__ import annotations

import torch

from gspo_env.engines.embedded.kv_cache import KVCache
from gspo_env.model.attention import use_ragged_attention


def test_slots_of_all_lengths_are_copied_at_once_although_some_are_overwritten(model):
    use_ragged_attention(model)
    cache = KVCache(model, 8, 300)
    feeds = [[1 + (n * slot) % 200 for n in range(40 * slot)] for slot in (1, 2, 3, 4, 5)]
    cache.forward(model, [0, 1, 2, 3, 4], [0] * 5, feeds)
    before = [[held.clone() for held in layer] for layer in cache._layers.values()]
    # slot 1 goes to 5 and is overwritten by 3, which is overwritten by 0
    copies = {5: (1, 80), 1: (3, 160), 3: (0, 5), 6: (4, 190), 7: (2, 1)}
    sources, lengths = zip(*copies.values(), strict=True)
    cache.copy(list(sources), list(copies), list(lengths))
    for layer, old in zip(cache._layers.values(), before, strict=True):
        for held, was in zip(layer, old, strict=True):
            for target, (source, length) in copies.items():
                assert torch.equal(held[target, :, :length], was[source, :, :length])
            for slot in (0, 2, 4):
                assert torch.equal(held[slot], was[slot])


def test_a_long_copy_does_not_make_short_ones_long(model):
    use_ragged_attention(model)
    cache = KVCache(model, 20, 300)
    cache.forward(model, [0, 1], [0, 0], [[5] * 250, [6] * 10])
    cache.copy([0, *[1] * 10], list(range(2, 13)), [250, *[10] * 10])
    for keys, _ in cache._layers.values():
        assert keys[2, :, 249].abs().sum() > 0
        assert keys[3:13, :, :10].abs().sum() > 0
        assert keys[3:13, :, 20:].abs().sum() == 0
