"""A model whose tokenizer has fewer ids, and whose makers list several ends of an action."""

import asyncio
import copy
import json
import logging

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.chat_families import FAMILIES
from support.runs import tiny
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from gspo_agents.frozen import FrozenAgent
from gspo_agents.gspo import GSPOAgent
from gspo_env.batch.sample import Sample
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines import Sampling
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.engines.embedded.unpacked import UnbatchedEngine
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model.export import Exporter, named_weights
from gspo_env.model.head import match_tokenizer, usable_ids
from gspo_env.model.save import save_model
from gspo_env.recipes.build import build_model
from gspo_env.recipes.tiny import Tiny

PADDING = 40


def model_for(tokenizer, padding=PADDING):
    torch.manual_seed(0)
    shape = Tiny(hidden_size=32, initializer_range=0.02)
    return build_model(shape, len(tokenizer) + padding, tokenizer.eos_token_id, 0)


def without_ids(tokenizer, first, count):
    """The same tokenizer with ids from `first` moved up, so that it lacks as many before them."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    state["model"]["vocab"] = {t: i + count * (i >= first) for t, i in vocabulary.items()}
    for token in state["added_tokens"]:
        token["id"] = state["model"]["vocab"][token["content"]]
    result = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), **tokenizer.special_tokens_map
    )
    result.chat_template = tokenizer.chat_template
    return result


@pytest.fixture
def sparse():
    """A tokenizer that lacks 40 ids below those of its control tokens."""
    whole = FAMILIES["qwen3"]()
    sparse = without_ids(whole, len(whole) - 20, PADDING)
    assert (len(sparse), max(sparse.get_vocab().values())) == (len(whole), len(whole) + PADDING - 1)
    return sparse


def scores(model, done, temperature):
    ids = np.array([1, 2, 3, *done.token_ids])
    turns = np.r_[-np.ones(3, dtype=np.int64), np.zeros(len(ids) - 3, dtype=np.int64)]
    sample = Sample(token_ids=ids, turn_ids=turns, advantages=np.zeros(len(ids) - 3))
    learner = Learner(model, GSPO(), LearnerConfig(), total_steps=1, temperature=temperature)
    return learner.logprobs(learner.pack([sample])).detach().numpy()


def test_a_model_whose_tokenizer_lacks_ids_is_trained_saved_and_has_finite_entropies(
    sparse, tmp_path
):
    save_model(model_for(sparse), sparse, tmp_path / "model")
    places = {"model": str(tmp_path / "model"), "output": str(tmp_path / "run")}
    limits = {"max_turn_tokens": 8, "max_context": 1024}
    settings = {"env": "gspo/Lookup-v0", "tasks_per_step": 2, "steps": 1, "rollout": limits}
    agent = GSPOAgent(config=tiny(**places, **settings))
    assert set(sparse.convert_tokens_to_ids(["<|im_end|>"])) <= set(agent.chat.stop_ids)
    entropies = [m["train/entropy"] for _, m in agent.train() if "train/entropy" in m]
    assert entropies
    assert np.isfinite(entropies).all()


def preferring(tokenizer, first):
    """A tiny model that prefers 40 ids that its tokenizer does not have."""
    model = model_for(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight[first : first + PADDING] += 1
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def generate(kind, model, prompt, temperature=1.0):
    engine = kind(model, max_slots=4, max_context=128)
    sampling = Sampling(max_tokens=30, temperature=temperature, seed=5)
    try:
        return asyncio.run(engine.generate(prompt, sampling))
    finally:
        engine.close()


@pytest.mark.parametrize("engine", [TransformersEngine, UnbatchedEngine])
@pytest.mark.parametrize("head", ["linear", "other", "adapter"])
@pytest.mark.parametrize("between", [False, True])
def test_ids_that_the_tokenizer_lacks_have_no_probability_in_engine_and_trainer(
    tokenizer, sparse, caplog, monkeypatch, engine, head, between
):
    tokenizer, prompt = sparse if between else tokenizer, [1, 2, 3]
    first, size = len(tokenizer) - 20 * between, len(tokenizer) + PADDING
    lacking = range(first, first + PADDING)
    model = preferring(tokenizer, first)
    if head == "adapter":
        config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(model, config)
    if head == "other":
        monkeypatch.setattr("gspo_env.model.head.linear_head", lambda *_: None)
    assert {*generate(engine, model, prompt).token_ids} & {*lacking}
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    with caplog.at_level(logging.INFO, "gspo_env"):
        match_tokenizer(model, tokenizer)
    said = f"{size} ids and its tokenizer {len(tokenizer)}: the others are never"
    assert caplog.text.count(said) == 1
    for temperature in (1.0, 0.7):
        model.set_attn_implementation("sdpa")
        done = generate(engine, model, prompt, temperature)
        assert not {*done.token_ids} & {*lacking}
        trained = scores(model, done, temperature)
        np.testing.assert_allclose(trained, done.logprobs, atol=2e-5)
        logits = plain(torch.tensor([[*prompt, *done.token_ids]])).logits[0, 2:-1] / temperature
        logits[:, first : first + PADDING] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(trained, expected.detach().numpy(), atol=2e-5)
    assert Exporter(model, untie=True).is_padded


def test_an_engine_with_a_copy_gets_a_model_without_the_ids_that_the_tokenizer_lacks(tokenizer):
    model = preferring(tokenizer, len(tokenizer))
    match_tokenizer(model, tokenizer)
    exporter = Exporter(model, untie=True)
    weights = dict(exporter.weights(named_weights(model)))
    copy = type(model)(exporter.config)
    copy.load_state_dict(weights, strict=True)
    ids = torch.tensor([[1, 2, 3]])
    assert copy(ids).logits.shape[-1] == len(tokenizer)
    torch.testing.assert_close(copy(ids).logits, model(ids).logits[..., : len(tokenizer)])


def test_a_model_with_the_ids_of_its_tokenizer_is_left_as_it_is(tokenizer, caplog):
    model = model_for(tokenizer, 0)
    with caplog.at_level(logging.INFO, "gspo_env"):
        match_tokenizer(model, tokenizer)
    assert not hasattr(model.config, "usable_vocab_size")
    assert usable_ids(model) == len(tokenizer)
    assert not caplog.text


@pytest.mark.parametrize(
    ("family", "generation", "config"),
    [
        ("llama3", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|end_of_text|>"),
        ("qwen3", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
        ("phi3", ["<|end|>", "<|assistant|>", "</s>"], "</s>"),
        ("gemma", ["</s>", "<end_of_turn>"], "</s>"),
        ("glm4", ["<|endoftext|>", "<|user|>", "<|observation|>"], "<|endoftext|>"),
        ("smollm3", ["<|im_end|>", "a"], "<|end_of_text|>"),
    ],
)
def test_every_end_that_a_model_lists_ends_actions_in_training_and_serving(
    family, generation, config, tmp_path
):
    tokenizer = FAMILIES[family]()
    ends = set(tokenizer.convert_tokens_to_ids(generation))
    model = model_for(tokenizer, 0)
    model.generation_config.eos_token_id = sorted(ends)
    model.config.eos_token_id = tokenizer.convert_tokens_to_ids(config)
    expected = ends | {model.config.eos_token_id}
    save_model(model, tokenizer, tmp_path / "model")
    frozen = FrozenAgent(tmp_path / "model")
    agent = GSPOAgent(str(tmp_path / "model"), "gspo/Lookup-v0")
    try:
        assert expected <= set(agent.chat.stop_ids)
        assert agent.chat.stop_ids == frozen.chat.stop_ids
    finally:
        agent.close()
    for end in expected:
        ids = [*agent.chat.encode("birch"), end]
        assert agent.chat.decode(ids) == agent.chat.decode(ids[:-1])


def test_the_default_end_of_a_class_that_is_an_ordinary_token_ends_nothing(tokenizer):
    model = model_for(tokenizer, 0)
    plain = tokenizer.convert_tokens_to_ids("a")
    model.config.eos_token_id = model.generation_config.eos_token_id = plain
    chat = ChatTokenizer(tokenizer, end_ids=match_tokenizer(model, tokenizer))
    assert plain not in chat.stop_ids
