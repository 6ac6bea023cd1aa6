"""The last MLP runs for the tokens that are predicted from, and changes nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from learners import learner_of

from gspo_env.batch.packing import pack
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.last_mlp import last_mlp, only


@pytest.mark.parametrize("share", [True, False])
def test_logprobs_and_gradients_are_those_of_a_whole_pass(model, samples, gradients, share):
    # the same prompt with other continuations: one token predicts several others
    several = [*samples, *samples]
    ours, plain = (learner_of(model, dtype=torch.float64) for _ in range(2))
    assert ours.scorer._last_mlp is not None
    plain.scorer._last_mlp = None
    row = pack(several, share=share)
    torch.testing.assert_close(ours.logprobs(row), plain.logprobs(row), rtol=1e-12, atol=1e-12)
    found, expected = (gradients(learner, several)[0] for learner in (ours, plain))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_it_sees_only_the_tokens_that_are_predicted_from(model, samples):
    learner, rows = learner_of(model), []
    layer = learner.policy.model.layers[-1].mlp
    layer.down_proj.register_forward_hook(lambda _, given, out: rows.append(given[0].shape[1]))
    row = pack(samples)
    learner.logprobs(row)
    assert rows == [len(row.source_N.unique())]
    assert rows[0] < len(row.input_ids_T)
    assert "forward" not in vars(layer)


class Mixes(torch.nn.Module):
    """An MLP whose tokens see each other."""

    def __init__(self, mlp):
        super().__init__()
        self.inner = mlp

    def forward(self, x):
        return self.inner(x + x.mean(1, keepdim=True))


def test_an_mlp_that_mixes_tokens_is_not_taken(model):
    use_ragged_attention(model)
    assert last_mlp(model) is model.model.layers[-1].mlp
    other = copy.deepcopy(model)
    other.model.layers[-1].mlp = Mixes(other.model.layers[-1].mlp)
    assert last_mlp(other) is None


def test_an_mlp_behind_which_tokens_see_each_other_is_not_taken(model, monkeypatch):
    use_ragged_attention(model)
    last = model.model.layers[-1]
    # the last layer has its MLP under another name, so the one found is that of the layer before
    last._modules["feed_forward"] = last._modules.pop("mlp")
    monkeypatch.setattr(type(last), "mlp", property(lambda self: self.feed_forward), raising=False)
    assert last_mlp(model) is None


def test_a_checkpointed_model_is_run_whole(model):
    use_ragged_attention(model)
    model.gradient_checkpointing_enable()
    assert last_mlp(model) is None


def test_an_error_leaves_the_module_as_it_was(model):
    mlp = model.model.layers[-1].mlp
    with pytest.raises(ZeroDivisionError), only(mlp, torch.tensor([0])):
        raise ZeroDivisionError
    assert "forward" not in vars(mlp)
