"""The direct forward pass: the model's own numbers, or not used."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from gspo_env.engines.embedded import direct as module
from gspo_env.engines.embedded.direct import Direct, fast_forward, rounded
from gspo_env.engines.embedded.kv_cache import KVCache
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.load import add_adapter

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    return LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=rope)
    )


def qwen2():
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **window, tie_word_embeddings=True))


def loud(made):
    """Weights that are large enough to make every part count."""
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    use_ragged_attention(made)
    return made.eval()


def steps(model, pass_):
    """Log-probabilities of some ragged steps with prompts, single tokens and gaps."""
    cache, found, held = KVCache(model, 5, 200), [], [0] * 5
    generator = torch.Generator().manual_seed(1)
    for sizes in ({0: 40, 3: 7}, {0: 1, 3: 1}, {0: 3, 1: 150, 3: 1, 4: 1}, {0: 1, 1: 1, 4: 1}):
        feeds = [torch.randint(0, 90, (n,), generator=generator).tolist() for n in sizes.values()]
        starts = [held[slot] for slot in sizes]
        logits = cache.forward(model, list(sizes), starts, feeds, pass_)
        found.append(logits.log_softmax(-1))
        for slot, size in sizes.items():
            held[slot] += size
    return torch.cat(found)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_ragged_steps_have_the_log_probabilities_of_the_models_modules(make, fused):
    model = loud(make())
    assert fast_forward(model) is not None
    direct = Direct(model, fused=fused)
    torch.testing.assert_close(steps(model, direct), steps(model, None), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("fused", "rows"), [(True, rounded(2)), (False, 2)])
def test_in_the_last_layer_only_tokens_that_predict_have_queries(model, monkeypatch, fused, rows):
    use_ragged_attention(model)
    direct, sizes = Direct(model, fused=fused), []
    plus = direct._products.plus

    def counted(linear, x, other):
        if linear is model.model.layers[-1].mlp.down_proj:
            sizes.append(len(x))
        return plus(linear, x, other)

    monkeypatch.setattr(direct._products, "plus", counted)
    cache = KVCache(model, 2, 200)
    cache.forward(model, [0, 1], [0, 0], [[5] * 100, [6] * 90], direct)
    cache.forward(model, [0, 1], [100, 90], [[7], [8]], direct)
    assert sizes == [rows, rows]


@pytest.mark.parametrize(("processor", "fused"), [("AVX2", False), ("AVX512", True)])
def test_products_are_fused_where_vectors_are_wide(model, monkeypatch, processor, fused):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    assert isinstance(Direct(model)._products, module._Fused) is fused


def test_the_default_model_runs_directly_and_new_weights_count_at_once(model):
    use_ragged_attention(model)
    direct = fast_forward(model)
    before = steps(model, direct)
    torch.testing.assert_close(before, steps(model, None), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        model.model.layers[1].self_attn.k_norm.weight.mul_(0.5)
    after = steps(model, direct)
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, steps(model, None), rtol=1e-5, atol=1e-5)


def test_a_model_with_more_than_plain_layers_is_not_run_directly(model):
    assert Direct.fits(model)
    assert not Direct.fits(add_adapter(copy.deepcopy(model), 2))
    assert not Direct.fits(copy.deepcopy(model).double())
    assert not Direct.fits(copy.deepcopy(model).bfloat16())
    replaced = copy.deepcopy(model)
    replaced.model.layers[0].mlp.forward = lambda x: x
    assert not Direct.fits(replaced)
    gelu = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu"))
    assert not Direct.fits(gelu)


def test_a_hook_is_called_because_the_pass_of_the_modules_is_used_while_it_is_there(model):
    use_ragged_attention(model)
    direct = fast_forward(model)
    assert direct.usable
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not direct.usable
    hook.remove()
    assert direct.usable


def test_a_pass_with_other_numbers_is_refused_and_said(model, monkeypatch, caplog):
    use_ragged_attention(model)
    monkeypatch.setattr(module.Direct, "_angles_of", lambda self, p: torch.ones(len(p), 2, 8))
    with caplog.at_level(logging.WARNING):
        assert fast_forward(model) is None
    assert "changes log-probabilities by" in caplog.text


def test_numbers_of_rows_are_rounded_to_few():
    assert [rounded(n) for n in (1, 16, 17, 128, 129, 200, 257, 513)] == [
        *(16, 16, 32, 128, 144, 208, 288, 576)
    ]
    values = {rounded(n) for n in range(1, 8193)}
    assert len(values) < 60
    assert all(n <= rounded(n) <= max(1.126 * n, n + 15) for n in range(1, 8193))
