"""Adapters: the seed decides their first weights, and no other draw changes."""

from __future__ import annotations

import copy

import pytest
import torch

from gspo_env.errors import ModelError
from gspo_env.model import add_adapter, save_adapter


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


def layers_with_adapter(model, **settings):
    adapted = add_adapter(copy.deepcopy(model), 2, **settings)
    return {n.split(".")[-4] for n, _ in adapted.named_parameters() if "lora_A" in n}


def test_targets_choose_the_layers_that_get_an_adapter(model):
    assert layers_with_adapter(model, targets="q_proj, v_proj") == {"q_proj", "v_proj"}
    assert layers_with_adapter(model) > {"q_proj", "down_proj"}


@pytest.mark.parametrize("targets", ["q_proj,query", "lm_head"])  # the tiny model's head is tied
def test_a_target_that_can_have_no_adapter_is_named_with_those_that_can(model, targets):
    wrong = targets.rpartition(",")[2]
    with pytest.raises(ModelError, match=f"lora_targets has {wrong}; .*down_proj.*q_proj"):
        layers_with_adapter(model, targets=targets)


def test_alpha_scales_what_the_adapter_adds(model):
    weight = model.model.layers[0].mlp.down_proj.weight.detach()

    def added(alpha):
        adapted = add_adapter(copy.deepcopy(model), 2, alpha=alpha)
        for name, factor in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(factor, 1.0)
        return adapted.merge_and_unload().model.layers[0].mlp.down_proj.weight.detach() - weight

    torch.testing.assert_close(added(6.0), 1.5 * added(0.0), rtol=1e-4, atol=1e-5)


def test_a_saved_adapter_loads_with_peft_alone(model, tmp_path):
    from peft import PeftModel

    adapted = add_adapter(copy.deepcopy(model), 2)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    save_adapter(adapted, tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(again(ids).logits, adapted(ids).logits)
