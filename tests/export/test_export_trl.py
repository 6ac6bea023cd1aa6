"""Exported environments in TRL's own loop: the same texts, rewards and ends as here."""

from pathlib import Path

import pytest
from support.exports import ENVS, load_package, talks

from gspo_env.chat import ChatTokenizer
from gspo_env.chat.conversation import Transcript
from gspo_env.env import make_env
from gspo_env.recipes.build import build_model, build_tokenizer
from gspo_env.recipes.tiny import Tiny
from gspo_env.tools.tool import Tool, format_tool_call
from gspo_env.types import Prompt

pytestmark = pytest.mark.adapters

MARK = "<|im_start|>assistant\n"


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    """Makes a trainer of a package; `script` are the texts that its model answers."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import trl
    from datasets import Dataset

    tokenizer = build_tokenizer(["Follow 3 links, then answer."])
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()

    class Scripted(trl.GRPOTrainer):
        script = None
        seen = ()

        def _generate_single_turn(self, prompt_ids, images, fields, num_generations, **more):
            if self.script is None:
                return super()._generate_single_turn(
                    prompt_ids, images, fields, num_generations, **more
                )
            turns = [tokenizer.decode(ids).count(MARK) - self.before for ids in prompt_ids]
            self.seen = prompt_ids
            texts = [self.script[turn] for turn in turns]
            return [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts], None

        def _calculate_rewards(self, inputs, prompts, completions, ids):
            self.completions = completions
            self.rewards = super()._calculate_rewards(inputs, prompts, completions, ids)
            self.extra = dict(self._pending_extra_logs)
            return self.rewards

    def make(package, kind, seeds, **settings):
        model = build_model(Tiny(hidden_size=16), len(tokenizer), tokenizer.eos_token_id, 0)
        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=2,
            num_generations=2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            **{"max_completion_length": 4000, "max_steps": 1} | settings,
        )
        trainer = Scripted(
            model=model,
            reward_funcs=package.reward,
            args=arguments,
            train_dataset=Dataset.from_list(package.rows(kind, seeds)),
            processing_class=tokenizer,
            environment_factory=kind,
        )
        trainer.tokenizer = tokenizer
        return trainer

    return make


def kind_of(package):
    return getattr(package, package.__all__[0])


@pytest.mark.parametrize("name", ENVS)
def test_texts_rewards_and_ends_are_equal_in_trl(name, make_trainer, tmp_path, monkeypatch):
    package = load_package(name, "trl", tmp_path / "package", monkeypatch)
    kind = kind_of(package)
    played = talks(name)
    trainer = make_trainer(package, kind, [talk.seed for talk in played])
    for talk in played:
        (row,) = package.rows(kind, [talk.seed])
        calls = [act(kind, turn, talk) for turn in range(len(talk.actions))]
        trainer.before = 1 + sum(message["role"] == "assistant" for message in row["prompt"])
        trainer.script = [*calls, "Done."]
        trainer._generate_and_score_completions([row, dict(row)])
        for messages in trainer.completions:
            # the observation after a message without a call is not shown in TRL
            answers = [message["content"] for message in messages if message["role"] == "tool"]
            assert answers == talk.observations[1 : 1 + len(answers)]
            assert len(answers) >= len(talk.actions) - 1
        assert trainer.rewards.flatten().tolist() == pytest.approx([talk.episode.outcome] * 2)
        assert trainer.extra["stop_reason"] == [talk.episode.stop_reason.value] * 2
        assert trainer.extra["turn_rewards"] == [str(talk.episode.rewards.tolist())] * 2


def act(kind, turn, talk):
    """An action as a model of TRL writes it."""
    text = talk.actions[turn]
    is_call = "<tool_call>" in text
    return (
        format_tool_call("act", {"action": text}) if hasattr(kind, "act") and not is_call else text
    )


@pytest.mark.parametrize("name", ["Lookup", "Story"])
def test_prompts_have_the_tokens_of_our_rollout(name, make_trainer, tmp_path, monkeypatch):
    package = load_package(name, "trl", tmp_path / "package", monkeypatch)
    kind = kind_of(package)
    trainer = make_trainer(package, kind, [3])
    talk = talks(name)[0]
    trainer.before, trainer.script = 1, talk.actions
    (row,) = package.rows(kind, [talk.seed])
    trainer._generate_and_score_completions([row, dict(row)])

    def prompt_ids(order):
        spec, kwargs = ENVS[name]
        env = make_env(spec, **kwargs)
        env.reset(seed=talk.seed)
        tools = tuple(order(tool) for tool in env.unwrapped.tools)
        prompt = Prompt(system=env.unwrapped.system_prompt, tools=tools)
        chat = ChatTokenizer(trainer.tokenizer, history="append")
        transcript = Transcript(chat, prompt)
        for turn, action in zip(talk.episode.turns, talk.actions, strict=True):
            ids = transcript.read(turn.observation, "tool" if transcript.ids else "user").ids
            transcript.write([*trainer.tokenizer.encode(action), trainer.tokenizer.eos_token_id])
        return ids

    def as_trl_orders(tool):
        properties = tool.parameters["properties"]
        ordered = {n: {k: p[k] for k in ("type", "description")} for n, p in properties.items()}
        return Tool(**{**fields(tool), "parameters": {**tool.parameters, "properties": ordered}})

    def fields(tool):
        return {name: getattr(tool, name) for name in ("name", "description", "function")}

    assert prompt_ids(as_trl_orders) == list(trainer.seen[0])
    # TRL writes the type of an argument before its description, and nothing else differs
    ours, theirs = (
        trainer.tokenizer.decode(prompt_ids(lambda tool: tool)),
        trainer.tokenizer.decode(list(trainer.seen[0])),
    )
    head = '": {"'
    place = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    assert ours[place - len(head) :].startswith(f"{head}description")
    assert theirs[place - len(head) :].startswith(f"{head}type")


def test_trl_trains_story(make_trainer, tmp_path, monkeypatch):
    package = load_package("Story", "trl", tmp_path / "package", monkeypatch)
    trainer = make_trainer(package, package.Story, range(8), max_steps=2, max_completion_length=40)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.script = None
    outcomes = iter([0.0, 1.0] * 2)  # an untrained model earns nothing, and nothing would move
    monkeypatch.setattr(package.Story, "_finish", scored(package.Story._finish, outcomes))
    result = trainer.train()
    assert result.global_step == 2
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters(), strict=True))


def scored(finish, outcomes):
    def finish_with(self, completion):
        record = finish(self, completion)
        assert record["stop_reason"] in ("max_turns", "terminated")
        return {**record, "outcome": next(outcomes)}

    return finish_with


def test_a_row_without_a_seed_is_refused(tmp_path, monkeypatch):
    package = load_package("Story", "trl", tmp_path / "package", monkeypatch)
    with pytest.raises(ValueError, match="no column `seed`"):
        package.Story().reset(prompt=[])
