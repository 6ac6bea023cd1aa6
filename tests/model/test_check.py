"""The check at start: a model runs as itself in packed rows and in the engine, or one by one."""

import asyncio
import copy
import logging
from functools import partial

import numpy as np
import pytest
import torch
from support import architectures
from support.logprobs import difference
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_env.batch.sample import Sample
from gspo_env.engines import Sampling, Transformers, TransformersEngine, UnbatchedEngine
from gspo_env.engines.embedded.start import check_engine
from gspo_env.errors import ModelError
from gspo_env.model import check as check_module
from gspo_env.model.adapters import add_adapter
from gspo_env.model.attention import RAGGED
from gspo_env.model.check import BOUND, NOISE, RunMode, check_model
from gspo_env.model.load import load_model
from gspo_env.model.unpacked import run_alone

HYBRIDS = ("Qwen3.5", "Qwen3-Next", "Bamba", "Granite 4 hybrid", "Mamba 2", "LFM2", "Llama 4")
ROPE = ("Phi-3, longrope", "Llama, dynamic RoPE")
NOT_PLAIN = ("Gemma 2", "gpt-oss", "GPT-Neo", "StableLM")
LATENT = ("DeepSeek-V2", "DeepSeek-V3")


@pytest.mark.parametrize("name", [*HYBRIDS, *ROPE, *NOT_PLAIN, *LATENT])
def test_the_learner_gives_the_models_own_log_probabilities_and_gradients(name):
    model = architectures.build(name)
    plain = copy.deepcopy(model)
    learner = architectures.make_learner(model)
    for shared in (0, 40):
        assert (
            architectures.learner_difference(learner, plain, architectures.make_samples(shared))
            < BOUND
        )


@pytest.mark.parametrize("name", [*HYBRIDS, "gpt-oss", "GPT-Neo", "DeepSeek-V3"])
def test_the_engine_reports_the_models_own_log_probabilities(name):
    model = architectures.build(name)
    plain = copy.deepcopy(model)
    assert architectures.engine_difference(model, plain) < BOUND


@pytest.mark.parametrize("name", ["Qwen3.5", "Mamba 2", "LFM2", "Llama 4"])
def test_a_layer_that_mixes_sequences_is_noticed_and_logged(name, caplog):
    check = check_model(architectures.build(name))
    assert check.mode is RunMode.UNPACKED
    assert check.packed.nats > 100 * BOUND
    (line,) = [r.getMessage() for r in caplog.records if r.name == check_module.__name__]
    assert "one sequence a row" in line
    assert f"packed rows {check.packed}" in line


def test_weights_of_a_fresh_model_hide_no_layer_that_mixes_sequences():
    model = architectures.build("Qwen3.5", scale=0.3)
    check = check_model(model)
    assert check.packed.nats < BOUND
    assert check.mode is RunMode.UNPACKED


@pytest.mark.parametrize("name", ["Qwen3", "Mixtral", "Gemma 3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_healthy_model_of_any_precision_is_packed_with_shared_prefixes(name, dtype):
    check = check_model(architectures.build(name).to(dtype))
    assert check.mode is RunMode.SHARED
    assert not check.reason


def with_larger_logits(model, scale):
    """Trained models have logits with standard deviations of several nats, fresh ones of one."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * scale)
    return model


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 500)]
)
def test_rounding_of_large_logits_is_no_reason_for_a_slower_way(dtype, scale):
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 256**-0.5}
    for seed in range(2):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=4000, **shape, **heads))
        check = check_model(with_larger_logits(model, scale).to(dtype))
        assert check.mode is RunMode.SHARED
        assert check.shared.nats > (
            BOUND if dtype is torch.float32 else NOISE * torch.finfo(dtype).eps / 2
        )


@pytest.mark.parametrize("scale", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_hides_no_layer_that_mixes_sequences(dtype, scale):
    check = check_model(with_larger_logits(architectures.build("Qwen3.5"), scale).to(dtype))
    assert check.mode is RunMode.UNPACKED
    assert check.packed.nats > 5 * check.bound


@pytest.mark.parametrize("name", [*ROPE, "Llama 4"])
def test_a_model_that_changes_with_length_is_packed_only_below_that_length(name):
    assert check_model(architectures.build(name)).mode is RunMode.UNPACKED
    assert check_model(architectures.build(name), max_context=49).mode is RunMode.UNPACKED
    if name in ROPE:
        assert check_model(architectures.build(name), max_context=48).mode is RunMode.SHARED


def test_a_model_that_was_prepared_for_short_sequences_is_refused_for_longer_ones():
    model = architectures.build("Llama, dynamic RoPE")
    first = check_model(model, max_context=40)
    assert check_model(model) is check_model(model, max_context=48) is first
    with pytest.raises(ModelError, match="at most 48 tokens a sequence, and max_context is 49"):
        check_model(model, max_context=49)


@pytest.mark.parametrize("name", ROPE)
def test_the_engine_refuses_a_context_in_which_cached_positions_become_wrong(name):
    with pytest.raises(ModelError, match="max_context is 64, expected at most 48"):
        check_engine(architectures.build(name), 64)
    model = architectures.build(name)
    plain = copy.deepcopy(model)
    engine = Transformers().start(model, max_slots=2, max_context=48)
    ids = list(range(3, 33))
    done = asyncio.run(engine.generate(ids, Sampling(max_tokens=16), "a"))
    assert difference(plain, ids, done) < BOUND


def test_chunks_longer_than_any_sequence_are_still_noticed(monkeypatch):
    settings = architectures.ARCHITECTURES["Llama 4"][1] | {
        "attention_chunk_size": 200,
        "attn_temperature_tuning": False,
    }
    monkeypatch.setitem(architectures.ARCHITECTURES, "chunks", ("llama4_text", settings))
    assert check_model(architectures.build("chunks"), max_context=200).mode is RunMode.SHARED
    check = check_model(architectures.build("chunks"), max_context=201)
    assert check.mode is RunMode.UNPACKED
    assert "beyond 200 tokens" in check.reason


def test_a_model_without_a_cache_is_refused_by_the_engine_but_trains():
    model = architectures.build("RecurrentGemma")
    assert check_model(model).mode is RunMode.UNPACKED
    with pytest.raises(ModelError, match=r"RecurrentGemma.*no cache"):
        Transformers().start(model, max_slots=2, max_context=64)


def test_a_wrong_cache_is_refused(monkeypatch):
    model = architectures.build("Qwen3.5")
    layer = model.model.layers[2].linear_attn
    forward = type(layer).forward

    def forgetful(self, hidden_states, cache_params=None, **rest):
        return forward(self, hidden_states, cache_params=None, **rest)

    monkeypatch.setattr(layer, "forward", forgetful.__get__(layer))
    with pytest.raises(ModelError, match=r"Qwen3_5ForCausalLM.*turns with its own cache change"):
        check_engine(model, 64)


def test_a_model_that_differs_from_itself_is_refused():
    model = architectures.build("Qwen3.5")
    calls = iter(range(1000))

    def restless(module, args, output):
        return output + 0.01 * next(calls)

    model.model.layers[1].mlp.register_forward_hook(restless)
    with pytest.raises(ModelError, match="Qwen3_5ForCausalLM cannot be trained"):
        check_model(model)


def test_a_cache_that_takes_one_token_at_a_time_gets_one():
    model = architectures.build("Jamba")
    assert not check_engine(model, 64).whole_turns
    assert check_engine(architectures.build("Qwen3.5"), 64).whole_turns


def test_the_check_leaves_weights_mode_and_random_numbers_as_they_were():
    model = architectures.build("Qwen3.5").train()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    state = np.random.get_state()[1].copy()
    check_model(model)
    assert torch.equal(torch.rand(3), expected)
    assert (np.random.get_state()[1] == state).all()
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules() if isinstance(m, nn.Module))


@pytest.mark.parametrize(("name", "attention"), [("Qwen3", RAGGED), ("Qwen3.5", "sdpa")])
def test_the_decision_is_made_once_and_restores_the_attention(name, attention, caplog):
    model = architectures.build(name)
    first = check_model(model)
    model.set_attn_implementation("eager" if attention == RAGGED else RAGGED)
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert check_model(model) is first
    assert check_model(copy.deepcopy(model)) == first
    assert model.config._attn_implementation == attention
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "kind"), [("Qwen3", TransformersEngine), ("Qwen3.5", UnbatchedEngine)]
)
def test_learner_and_engine_take_the_same_way_in_any_order(name, kind):
    for engine_first in (True, False):
        model = architectures.build(name)
        steps = [lambda m=model: Transformers().start(m, max_slots=2, max_context=64)]
        steps.insert(engine_first, lambda m=model: architectures.make_learner(m))
        made = [step() for step in steps]
        assert isinstance(made[not engine_first], kind)
        learner = made[engine_first]
        assert bool(learner.pack(architectures.make_samples(40)).runs) == (name == "Qwen3")


def test_a_model_that_cannot_run_on_the_sequences_is_refused_with_its_error(monkeypatch):
    settings = {"n_embd": 64, "n_layer": 1, "n_head": 4, "max_position_embeddings": 16}
    monkeypatch.setitem(architectures.ARCHITECTURES, "short", ("gpt2", settings))
    with pytest.raises(ModelError, match="GPT2LMHeadModel cannot score 32 random tokens: Index"):
        check_model(architectures.build("short"))


def cut(sample, length):
    turns = sample.turn_ids[:length]
    tokens, count = np.roll(sample.token_ids, length)[:length], int((turns >= 0).sum())
    return Sample(token_ids=tokens, turn_ids=turns, advantages=np.ones(count))


def test_sequences_of_similar_length_run_as_one_padded_batch_with_the_same_numbers():
    model = architectures.build("Qwen3.5-MoE")
    assert check_model(model).padded
    batched, single = (architectures.make_learner(copy.deepcopy(model)) for _ in range(2))
    single.scorer._run = partial(run_alone, single.scorer.states)
    samples = [cut(architectures.make_samples(0)[0], 60 + 4 * n) for n in range(4)]
    rows = [learner.scorer(learner.pack(samples), routers=True) for learner in (batched, single)]
    (ours, our_balance), (theirs, their_balance) = rows
    torch.testing.assert_close(ours.logprobs_N, theirs.logprobs_N, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_balance.loss, their_balance.loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_balance.load, their_balance.load, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ROPE)
def test_a_batch_is_not_padded_if_its_longest_sequence_changes_the_others(name):
    assert not check_model(architectures.build(name)).padded


@pytest.mark.real
def test_products_of_another_library_stay_far_below_the_bound_with_adapters_of_a_real_model():
    base, _ = load_model("smollm2")
    for seed in (1, 3):
        model = add_adapter(copy.deepcopy(base), 16, seed)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.02, generator=generator)
        check = check_model(model)
        assert check.mode is RunMode.SHARED
        assert max(check.packed.nats, check.shared.nats) <= check.bound / 4
