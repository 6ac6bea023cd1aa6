"""An imitation can end with the weights of the highest pass@k, which have not the lowest loss."""

import json

import pytest
import torch
from support.cli_errors import refused
from support.half import SMALL, train_half
from support.runs import sign
from support.talks import write

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import from_dict
from gspo_env.errors import OutputError
from gspo_env.recipes.build import Imitation
from gspo_env.runs import Run
from gspo_env.training.start_choice import StartChoice


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A model that says yes half of the time, its environment, and conversations that say no."""
    folder = train_half(tmp_path_factory.mktemp("half"))
    said = {"role": "assistant", "content": "no"}
    asked = [{"role": "user", "content": f"Say yes, {n}."} for n in range(9)]
    write(folder / "no.jsonl", *({"messages": [question, said]} for question in asked))
    return folder


def config(half, output, rank=0, **recipe):
    rate = 1e-3 if rank else 2e-4
    of_imitation = {"imitation_steps": 24, "imitation_learning_rate": rate, "imitation_pass_at": 8}
    said = {"name": "imitate", "conversations": f"{half}/no.jsonl"}
    tree = {**SMALL, "model": f"{half}/model", "env": f"{half}/yes.py:Shown", "output": str(output)}
    tree |= {"recipe": said | of_imitation | recipe}
    return from_dict(tree | {"learner": {"learning_rate": 1e-9, "lora_rank": rank}})


def wins(agent):
    return [e.success for group in agent.evaluate(samples=16) for e in group.episodes]


@pytest.mark.parametrize("rank", [0, 8])
def test_the_weights_with_the_highest_pass_at_k_are_kept_though_later_ones_have_a_lower_loss(
    rank, half, tmp_path, capsys, monkeypatch
):
    losses, tasks, step, look = [], [], Imitation.step, StartChoice.look
    monkeypatch.setattr(Imitation, "step", lambda self: losses.append(step(self)) or losses[-1])
    monkeypatch.setattr(
        StartChoice, "look", lambda self, at: tasks.extend(self.tasks) or look(self, at)
    )
    agent = GSPOAgent(config=config(half, tmp_path / "run", rank))
    agent.train()
    shown = capsys.readouterr().out
    assert [f"imitation {at}  pass@8 " in shown for at in (6, 12, 18, 24)] == [True] * 4
    series = Run.open(tmp_path / "run").series
    kept, best, last = (
        series[f"imitation/{name}"].values[0] for name in ("step", "pass_at_k", "pass_at_k_last")
    )
    assert kept < 24
    assert losses[-1] < losses[int(kept) - 1]
    assert best > last
    sentence = f"Imitation kept the weights after step {kept:.0f}: pass@k {best:.1%} on training"
    assert sentence in shown
    assert sum(wins(agent)) > 0
    held_out = {task.seed % 9 for task in agent.split().tasks}
    assert not held_out & {task.seed % 9 for task in tasks}
    last_ones = GSPOAgent(config=config(half, tmp_path / "last", rank, imitation_pass_at=0))
    last_ones.train()
    assert sum(wins(last_ones)) < sum(wins(agent))
    assert "imitation/step" not in Run.open(tmp_path / "last").series


def test_equal_weights_are_those_that_imitated_longest(half, tmp_path):
    settings = config(half, tmp_path / "run", imitation_learning_rate=1e-12, imitation_pass_at=1)
    agent = GSPOAgent(config=settings)
    agent.train()
    assert Run.open(tmp_path / "run").series["imitation/step"].values.tolist() == [24]


def test_a_forged_choice_in_a_checkpoint_is_refused_in_one_sentence(half, tmp_path, monkeypatch):
    from gspo_env.training import checkpoints

    step = Imitation.step

    def stopped(self):
        if len(self.losses) == 13:
            raise KeyboardInterrupt
        monkeypatch.setattr(checkpoints, "_PAUSE", 1e9 if len(self.losses) < 12 else -1e9)
        monkeypatch.setattr(checkpoints, "_SHARE", 1e9)
        return step(self)

    monkeypatch.setattr(Imitation, "step", stopped)
    with pytest.raises(KeyboardInterrupt):
        GSPOAgent(config=config(half, tmp_path / "run")).train()
    monkeypatch.setattr(Imitation, "step", step)
    file = tmp_path / "run/checkpoints/step-000000/state.json"
    state = json.loads(file.read_text())
    assert [look[0] for look in state["imitation"]["looks"]] == [6, 12]
    settings = config(half, tmp_path / "run")
    for looks in ([], [[3, "x", 0.5]], [[3, 0.5]], 7):
        imitation = state["imitation"] | {"looks": looks}
        file.write_text(json.dumps(state | {"imitation": imitation}))
        sign(file)
        with pytest.raises(OutputError, match="is damaged"):
            GSPOAgent.resume(tmp_path / "run", settings).train()


def test_too_few_steps_to_choose_among_are_refused(capsys):
    flags = ["--recipe", "imitate", "--model", "x", "--imitation-steps", "3"]
    error = refused(capsys, "train", *flags, "--imitation-pass-at", "8")
    assert "imitation_pass_at is 8 and imitation_steps 3; expected at least 4 steps" in error


def test_the_copies_are_of_the_weights_at_the_look_and_the_generators_stay(half):
    agent = GSPOAgent(config=config(half, ""))
    played = {"tasks": agent.training_tasks(2, 0), "samples": 2, "play": agent.evaluate}
    choice = StartChoice(model=agent.model, **played)
    drawn = torch.get_rng_state()
    before = [weight.detach().clone() for weight in agent.model.parameters()]
    choice.look(3)
    assert torch.get_rng_state().equal(drawn)
    with torch.no_grad():
        for weight in agent.model.parameters():
            weight.zero_()
    choice.look(6)
    assert choice.finish()["imitation/step"] == 3
    assert all(map(torch.equal, agent.model.parameters(), before))
