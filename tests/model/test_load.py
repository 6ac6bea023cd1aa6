"""Adapters: the seed decides their first weights, and no other draw changes."""

from __future__ import annotations

import copy

import torch

from gspo_env.model import add_adapter


def first_weights(model, seed):
    adapted = add_adapter(copy.deepcopy(model), 2, seed)
    return torch.cat([p.flatten() for n, p in adapted.named_parameters() if "lora_A" in n])


def test_the_seed_decides_the_first_weights_of_an_adapter(model):
    torch.manual_seed(1)
    first = first_weights(model, 0)
    torch.manual_seed(2)
    assert torch.equal(first_weights(model, 0), first)
    assert not torch.equal(first_weights(model, 3), first)


def test_an_adapter_changes_no_other_draw(model):
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    first_weights(model, 0)
    assert torch.equal(torch.rand(3), wanted)
