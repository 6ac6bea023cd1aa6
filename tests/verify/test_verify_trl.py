"""Batches that TRL really makes: a clean one has no finding, and faults in it are found."""

from pathlib import Path

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


def test_traces_of_verifiers_are_read():
    import verifiers.v1 as vf

    from gspo_env.verify.from_verifiers import from_verifiers

    def episode(reward, ok, extra=()):
        asked = vf.UserMessage(content="2 + 2?")
        said = vf.AssistantMessage(content="4")
        nodes = [
            vf.MessageNode(parent=None, message=asked, token_ids=[5, 6], mask=[False, False]),
            vf.MessageNode(
                parent=0,
                message=said,
                sampled=True,
                token_ids=[7, 8, 9],
                mask=[False, True, True],
                logprobs=[-0.5, -0.1, *extra],
                advantages=[reward - 0.5, reward - 0.5],
            ),
        ]
        task = vf.TraceTask(type="T", data=vf.TaskData(prompt="2 + 2?"), key="a", hash="a")
        agent = vf.AgentInfo(config=vf.AgentConfig())
        trace = vf.Trace(task=task, agent=agent, nodes=nodes, ok=ok)
        trace.record_reward("right", reward)
        return vf.Episode(task=task, traces=[trace], ok=ok)

    batch = from_verifiers([episode(1.0, True), episode(0.0, True)], "dr_grpo")
    assert {f.name for f in verify(batch) if not f.ok} == set()
    assert [row.mask for row in batch.rows] == [[0, 0, 0, 1, 1]] * 2
    assert batch.rows[0].logprobs == [None, None, None, -0.5, -0.1]
    lost = from_verifiers([episode(1.0, True), episode(0.0, False)], "dr_grpo")
    assert "failed" in {f.name for f in verify(lost) if not f.ok}


def test_the_form_of_verl_is_read(make_trainer):
    """A `DataProto` has these tensors; verl itself is not installed here."""
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
