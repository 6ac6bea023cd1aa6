"""The update of a batch that a run has kept can be taken again, and is the same or another one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import sign, talks, timeless

from gspo_agents.gspo import GSPOAgent
from gspo_agents.replay import Replay
from gspo_env.cli.main import main
from gspo_env.config import override
from gspo_env.errors import ConfigError, OutputError
from gspo_env.rollout import pool
from gspo_env.runs import Run

MASKED = """
from talk import Talk


class Masked(Talk):
    \"\"\"Masks tokens, gives advantages of its own, and names its states.\"\"\"

    def step(self, action):
        text, reward, done, cut, info = super().step(action)
        size = len(getattr(action, "token_ids", ()))
        if size and self.turn == 1:
            info["token_mask"] = [n != 0 for n in range(size)]
        if size and self.turn == 2 and self.seed % 2:
            info["token_advantages"] = [0.5] * size
        return text, reward, done, cut, info | {"state_key": str(self.turn), "note": self.turn}
"""
RUNS = {
    "full, two minibatches": {"learner": {"minibatches": 2}},
    "LoRA, a KL reference, two environments": {
        "env": ("a=talk.py:Talk:0.7", "b=masked.py:Masked:0.3"),
        "learner": {"lora_rank": 2},
        "loss": {"kl_coef": 0.05},
        "advantage": "gigpo",
    },
    "compacted, ahead, cut episodes left out": {
        "compaction": {"name": "summary", "instruction": "more", "summary_tokens": 8},
        "rollout": {"max_context": 48, "max_turn_tokens": 4},
        "supply": {"max_staleness": 1},
        "credit": {"train_on_truncated": False, "rms": 1.0},
    },
}


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """The folder of a run of four steps that has kept all batches."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copy(Path(__file__).parents[1] / "support/talk.py", folder)
    (folder / "masked.py").write_text(MASKED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        GSPOAgent(config=talks(episodes={"keep_batches": "all"}, **RUNS[request.param])).train()
        yield folder / "run"


def recorded(run, step):
    """The metrics of a training step that a run has written, without times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    (row,) = [r for r in lines if r["step"] == step and "train/grad_norm" in r["metrics"]]
    return timeless([(step, row["metrics"])])[0][1]


def test_an_update_that_is_taken_again_has_the_bits_of_the_run(run, monkeypatch):
    monkeypatch.setattr(pool, "make_env", None)  # neither environment nor engine is needed
    torch.manual_seed(5)
    for step in (1, 3, 4):
        replay = Replay(run, step)
        update = replay.update()
        assert replay.difference(update) == 0.0
        metrics = timeless([(step, update.metrics)])[0][1]
        assert len(metrics) > 20
        assert {name: recorded(run, step)[name] for name in metrics} == metrics


def test_a_replayed_run_resumes_and_ends_as_the_run_did(run, tmp_path):
    replay = Replay(run, 2)
    folder = replay.save(replay.update(override(replay.own, {"output": str(tmp_path / "again")})))
    GSPOAgent.resume(folder).train()
    if replay.own.supply.max_staleness:  # which weights sample a token depends on the time
        return
    name = "checkpoints/step-000004/state-00001.safetensors"
    ours, others = load_file(folder / name), load_file(run / name)
    assert ours.keys() == others.keys()
    assert all(ours[n].equal(others[n]) for n in ours)
    assert recorded(folder, 2) == {
        n: v for n, v in recorded(run, 2).items() if n in recorded(folder, 2)
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a run of three steps that has kept two batches."""
    folder = tmp_path_factory.mktemp("plain")
    shutil.copy(Path(__file__).parents[1] / "support/talk.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        GSPOAgent(config=talks(steps=3, episodes={"keep_batches": 2})).train()
        yield folder / "run"


def test_a_teacher_that_reads_the_tools_reads_those_of_the_kept_batch(in_folder):
    hint = {"name": "distillation", "hint": "solution"}
    lookup = {"env": "gspo/Lookup-v0", "advantage": hint, "rollout": {"group_size": 2}}
    GSPOAgent(config=talks(steps=1, episodes={"keep_batches": "all"}, **lookup)).train()
    replay = Replay("run", 1)
    assert replay.batch.groups[0].episodes[0].prompt.tools[0].schema["type"] == "function"
    assert replay.difference(replay.update()) == 0.0


NEGATED = """
from dataclasses import dataclass
from gspo_env.credit import ReturnsToGo

@dataclass(frozen=True, kw_only=True)
class Negated(ReturnsToGo):
    def compare(self, episodes, score):
        return [-row for row in super().compare(episodes, score)]
"""


def test_effects_of_other_settings_are_those_of_their_gradients_and_updates(plain, monkeypatch):
    monkeypatch.chdir(plain.parent)
    (plain.parent / "negated.py").write_text(NEGATED)
    batch = Replay(plain)
    slow = {"learning_rate": 0.05 * batch.own.learner.learning_rate}  # the effects are linear
    own = override(batch.own, {"advantage": {"name": "returns_to_go"}, "learner": slow})
    arms = {
        "own": own,
        "faster": override(own, {"learner": {"learning_rate": 2 * own.learner.learning_rate}}),
        "negated": override(own, {"advantage": {"name": "negated.py:Negated"}}),
    }
    batch.own = own  # so that the others are measured against it
    effects = batch.effects(arms)
    one, faster, negated = effects.values()
    assert (one.cosine, one.turned_tokens, one.turned_turns) == (pytest.approx(1), 0, 0)
    assert (negated.cosine, negated.turned_tokens) == (pytest.approx(-1, abs=1e-5), 1)
    assert negated.norm == pytest.approx(one.norm, rel=1e-4)
    # the optimiser's moments go on as they were, so that the update does not turn as a whole
    assert negated.best - negated.worst < one.best - one.worst
    assert faster.norm == pytest.approx(one.norm)
    assert faster.best == pytest.approx(2 * one.best, rel=0.2)
    assert faster.worst == pytest.approx(2 * one.worst, rel=0.2)


def test_the_gradient_of_the_runs_own_settings_is_that_of_its_update(plain, monkeypatch, capsys):
    monkeypatch.chdir(plain.parent)
    batch = Replay(plain)
    (effect,) = batch.effects({"own": batch.own}).values()
    whole = batch.update(override(batch.own, {"learner": {"minibatches": 1}}))
    assert effect.norm == pytest.approx(whole.metrics["train/grad_norm"], rel=1e-5)
    main(["whatif", "--arm", "loss=grpo,cispo", str(plain), "--json", "numbers.json"])
    assert "| loss=cispo |" in capsys.readouterr().out
    numbers = json.loads(Path("numbers.json").read_text())
    assert list(numbers) == ["the run's own", "loss=grpo", "loss=cispo"]
    assert numbers["the run's own"]["norm"] == effect.norm
    main(["whatif", str(plain), "--step", "2", "--arm", "minibatches=2"])
    recorded = Run.open(plain).effects()
    assert {step: list(arms) for step, arms in recorded.items()} == {
        2: ["the run's own", "minibatches=2"],
        3: list(numbers),
    }
    assert recorded[3]["the run's own"] == effect
    assert Replay(plain).difference(Replay(plain).update()) == 0.0  # it is still a whole batch


def test_other_settings_give_another_update_that_resumes_with_them(plain, tmp_path, capsys):
    assert [f.name for f in sorted((plain / "batches").iterdir())] == ["step-000002", "step-000003"]
    flags = ["--loss", "cispo", "--learning-rate", "0.01", "--advantage", "outcome"]
    main(["replay", str(plain), "--step", "2", *flags, "--output", str(tmp_path / "other")])
    shown = capsys.readouterr().out
    assert "changed  loss from 'gspo' to 'cispo'" in shown
    assert "differ from the run's" in shown
    agent = GSPOAgent.resume(tmp_path / "other")
    agent.train()
    rates = [recorded(r, 3)["train/learning_rate"] for r in (plain, tmp_path / "other")]
    own = Replay(plain).own.learner.learning_rate
    assert rates[1] == pytest.approx(rates[0] * 0.01 / own)
    assert type(agent.config.loss).__name__ == "CISPO"
    main(["replay", str(plain)])
    assert "batch    step 3" in (shown := capsys.readouterr().out)
    assert "equal those of the run to the last digit" in shown


REFUSED = {
    "--rollout.group-size=8": "rollout.group_size is 8, and 4 in the run; a replay has its",
    "--steps=9": "steps is 9, and 3 in the run",
    "--lora-rank=2": "learner.lora_rank is 2, and 0 in the run",
    "--optimizer=adamw_8bit": "learner.optimizer is 'adamw_8bit'",
    "--step=1": "has not kept the batch of step 1; expected one of 2, 3",
    "--seed=5": "seed is 5, and 0 in the run",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_a_replay_cannot_change_is_refused_in_one_sentence(flag, plain, capsys):
    with pytest.raises(SystemExit):
        main(["replay", str(plain), flag])
    assert REFUSED[flag] in capsys.readouterr().err


def test_a_resumed_run_has_neither_later_batches_nor_parts_of_a_killed_process(plain, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(plain, cut, symlinks=True)
    shutil.rmtree(cut / "model")
    shutil.rmtree(cut / "checkpoints/step-000003")
    part = cut / "batches/.step-000003.999999.part"
    part.mkdir()
    (part / "state.json").write_text("{")
    resumed = GSPOAgent.resume(cut, override(GSPOAgent.replay(plain).own, {"output": "run"}))
    assert not part.exists()
    resumed.train()
    for step in (2, 3):
        for file in ("state-00001.safetensors", "episodes.parquet"):
            name = f"batches/step-{step:06d}/{file}"
            if file.endswith("safetensors"):
                assert all(map(torch.equal, *(load_file(r / name).values() for r in (cut, plain))))
    assert Replay(cut, 3).difference(Replay(plain, 3).update()) == 0.0


FORGED = {
    "no batch": ({"batch": None}, "is damaged"),
    "metrics that are texts": ({"batch": {"metrics": {"a": "x"}}}, "is damaged"),
    "an episode less": ({"batch": {"episodes": []}}, "has 12 episodes, and state.json 0"),
    "a learner without its parts": ({"learner": {}}, "is damaged"),
    "other advantages": ({"batch": {"digest": "0"}}, "are not those of the run"),
    "a mask that does not fit": (
        {"batch": {"episodes": [{"reset": {}, "turns": [{"token_mask": [1] * 99}] * 3}] * 12}},
        "is damaged: token_mask has 99 values",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_batch_is_refused_in_one_sentence(case, plain, tmp_path):
    values, sentence = FORGED[case]
    run = tmp_path / "run"
    shutil.copytree(plain, run, symlinks=True)
    file = run / "batches/step-000003/state.json"
    numbers = json.loads(file.read_text())
    if values.get("batch"):
        values = {"batch": numbers["batch"] | values["batch"]}
    file.write_text(json.dumps(numbers | values))
    sign(file)
    with pytest.raises((OutputError, ConfigError), match=sentence):
        Replay(run, 3, GSPOAgent.replay(plain).own).update()


def test_a_batch_with_a_secret_is_not_kept_and_a_full_disk_costs_only_the_batch(
    tmp_path, in_folder, caplog, monkeypatch
):
    shutil.copy(Path(__file__).parents[1] / "support/talk.py", tmp_path)
    (tmp_path / "leaky.py").write_text(
        "from talk import Talk\nclass Leaky(Talk):\n    def step(self, action):\n"
        "        result = super().step(action)\n"
        "        return ('api_key=sk-proj-abcdefghijklmnopqrstuvwx1234', *result[1:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"steps": 1, "episodes": {"keep_batches": "last"}, "checkpoints": {"keep": 0}}
    GSPOAgent(config=talks(env="leaky.py:Leaky", **settings)).train()
    assert "the batch of step 1 is not kept: a text looks like a secret" in caplog.text
    assert not Path("run/batches").exists()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    GSPOAgent(config=talks(**settings, output="full")).train()
    assert "cannot write the batch step-000001: [Errno 28] No space left" in caplog.text
    assert recorded(Path("full"), 1)["train/grad_norm"] > 0
    assert [*Path("full/batches").iterdir()] == []
