"""Batches that TRL really makes: a clean one has no finding, and faults in it are found."""

from pathlib import Path

import numpy as np
import pytest

from gspo_env.recipes.build import build_model, build_tokenizer
from gspo_env.recipes.tiny import Tiny
from gspo_env.verify import read_batch, verify
from gspo_env.verify.from_trl import recorded
from gspo_env.verify.from_verl import from_verl

pytestmark = pytest.mark.adapters

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TALKS = [[CALL, "3"], [CALL, CALL, "4"], ["3"], [CALL, "a much longer answer"]]


def add(a: int, b: int) -> int:
    """
    Add.

    Args:
        a: One.
        b: Two.
    """
    return a + b


def length(completions, **columns):
    return [float(len(completion[-1]["content"])) + len(completion) for completion in completions]


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import trl
    from datasets import Dataset

    tokenizer = build_tokenizer(["What is 1 + 2? The answer is 3."])
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    model = build_model(Tiny(hidden_size=16), len(tokenizer), tokenizer.eos_token_id, 0)

    class Scripted(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, fields, num_generations, **more):
            if len(prompt_ids) == 4:
                self.talks = [list(talk) for talk in TALKS]
            going = [talk for talk in self.talks if talk][: len(prompt_ids)]
            texts = [talk.pop(0) for talk in going]
            return [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts], None

    def make(kind=Scripted, **settings):
        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=2000,
            max_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_iterations=2,  # so that log-probabilities of the old policy are kept
            **settings,
        )
        rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 2?"}]} for n in range(4)]
        trainer = recorded(kind, tmp_path / "batches")(
            model=model,
            reward_funcs=length,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            tools=[add],
        )
        trainer.model.train()
        trainer._generate_and_score_completions([rows[0], rows[0], rows[1], rows[1]])
        return trainer, read_batch(tmp_path / "batches" / "0.jsonl")

    make.scripted, make.decode, make.model = Scripted, tokenizer.decode, model
    return make


def judged(make, batch):
    return {f.name for f in verify(batch, make.decode, make.model.eval()) if not f.ok}


def test_a_clean_batch_of_trl_has_no_finding(make_trainer):
    _, batch = make_trainer()
    assert judged(make_trainer, batch) == set()
    assert [len(row.sampled) for row in batch.rows] == [2, 3, 1, 2]
    assert batch.estimator == "grpo"
    assert all(row.logprobs for row in batch.rows)


def test_faults_of_public_reports_are_found_in_trl(make_trainer):
    import torch

    base = make_trainer.scripted

    class Covering(base):
        """Trains on what tools return."""

        def _tool_call_loop(self, *args):
            mask, *rest = super()._tool_call_loop(*args)
            return [[1] * len(row) for row in mask], *rest

    class Padded(base):
        """The mask of completions covers padding."""

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            ones = torch.ones_like(output["completion_mask"])
            return {**output, "completion_mask": ones}

    class Wrong(base):
        """Advantages of another order of the rows."""

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {**output, "advantages": output["advantages"].flip(0) * 2}

    class Shifted(base):
        """Log-probabilities of the next token."""

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            old = output["old_per_token_logps"]
            return {**output, "old_per_token_logps": torch.roll(old, -1, 1)}

    class Lost(base):
        """The last token of each turn, its end, is not trained."""

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            ends = output["completion_ids"] == self._tokenizer.eos_token_id
            return {**output, "tool_mask": output["tool_mask"] * ~ends}

    expected = {
        Covering: "mask_covers_context",
        Padded: "mask_covers_context",
        Wrong: "advantages",
        Shifted: "logprobs_shifted",
        Lost: "mask_misses_sampled",
    }
    for kind, name in expected.items():
        _, batch = make_trainer(kind)
        assert name in judged(make_trainer, batch), kind.__name__


def traced(vf, model, seed, reward, ok=True):
    """An episode of verifiers with two turns, whose log-probabilities are the model's."""
    import torch

    ids = [5, 6, *np.random.default_rng(seed).integers(2, 40, 7).tolist()]
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    values = [0.0, *scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]

    def said(parent, start, end):
        return vf.MessageNode(
            parent=parent,
            message=vf.AssistantMessage(content="4"),
            sampled=True,
            token_ids=ids[start:end],
            mask=[False, *[True] * (end - start - 1)],
            logprobs=values[start + 1 : end],
            advantages=[reward - 0.5] * (end - start - 1),
        )

    def asked(parent, start, end):
        message, mask = vf.UserMessage(content="2 + 2?"), [False] * (end - start)
        return vf.MessageNode(parent=parent, message=message, token_ids=ids[start:end], mask=mask)

    nodes = [asked(None, 0, 2), said(0, 2, 5), asked(1, 5, 6), said(2, 6, 9)]
    task = vf.TraceTask(type="T", data=vf.TaskData(prompt="2 + 2?"), key="a", hash="a")
    agent = vf.AgentInfo(config=vf.AgentConfig())
    trace = vf.Trace(task=task, agent=agent, nodes=nodes, ok=ok)
    trace.record_reward("right", reward)
    return vf.Episode(task=task, traces=[trace], ok=ok)


def test_traces_of_verifiers_are_read_and_faults_of_public_reports_are_found_in_them():
    import verifiers.v1 as vf

    from gspo_env.verify.from_verifiers import from_verifiers

    model, other = (build_model(Tiny(hidden_size=16), 64, 1, seed).eval() for seed in (0, 1))

    def names(*episodes):
        batch = from_verifiers(episodes, "dr_grpo")
        return {f.name for f in verify(batch, model=model) if not f.ok}

    def pair(sampler=model):
        return traced(vf, sampler, 1, 1.0), traced(vf, sampler, 2, 0.0)

    assert names(*pair()) == set()
    batch = from_verifiers(pair(), "dr_grpo")
    assert [row.mask for row in batch.rows] == [[0, 0, 0, 1, 1, 0, 0, 1, 1]] * 2
    assert batch.rows[0].logprobs[:3] == [None] * 3
    assert "failed" in names(pair()[0], traced(vf, model, 2, 0.0, ok=False))
    assert "logprobs_other_weights" in names(*pair(other))
    one, two = pair()
    assert "duplicates" in names(one, two, one)
    for node in (n for e in (one, two) for n in e.traces[0].nodes if n.sampled):
        node.logprobs = [*node.logprobs[1:], -1.0]
    assert names(one, two) & {"logprobs_shifted", "logprobs_other_weights"}
    one, two = pair()
    for node in (n for n in one.traces[0].nodes if n.sampled):
        node.advantages = [-0.5, -0.5]
    assert "advantages" in names(one, two)


def test_the_form_of_verl_is_read(make_trainer):
    """A `DataProto` has these tensors; test_verify_verl.py has those of verl itself."""
    from types import SimpleNamespace

    import torch

    tensors = {
        "input_ids": torch.tensor([[0, 5, 6, 7, 8, 0], [4, 5, 9, 7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1] * 6]),
        "responses": torch.tensor([[7, 8, 0], [7, 8, 9]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "old_log_probs": torch.full((2, 3), -1.0),
        "advantages": torch.tensor([[0.5**0.5] * 3, [-(0.5**0.5)] * 3]),
        "token_level_rewards": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    }
    batch = from_verl(SimpleNamespace(batch=tensors, non_tensor_batch={"uid": ["a", "a"]}), "grpo")
    assert {f.name for f in verify(batch) if not f.ok} == set()
    assert batch.rows[0].mask == [0, 0, 0, 1, 1, 0]
    tensors["response_mask"][0, 2] = 1
    batch = from_verl(SimpleNamespace(batch=tensors, non_tensor_batch={"uid": ["a", "a"]}), "grpo")
    assert "padding" in {f.name for f in verify(batch) if not f.ok}
