"""A run that is resumed from a checkpoint is the same run, bit for bit."""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import sign, talks, timeless
from support.talks import write as write_talks

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.config import CheckpointConfig, load_toml, override, to_toml
from gspo_env.credit.estimate import CreditConfig
from gspo_env.errors import ConfigError, ModelError, OutputError
from gspo_env.files import check_output
from gspo_env.model.weights import find_weights
from gspo_env.recipes.build import Imitation
from gspo_env.runs import Run
from gspo_env.seeding import seed_generators
from gspo_env.training import checkpoints
from gspo_env.training.checkpoints import Checkpoints
from gspo_env.training.resume import changed_config, newest_checkpoint
from gspo_env.trust import record

LEAD = {"env_kwargs": {"lead": "say more, " * 8}}
"""Tokens with which all prompts begin, whose keys and values an engine keeps."""
WAYS = {
    "full": LEAD,
    "LoRA": {"learner": {"lora_rank": 2}},
    "LoRA, own weights": {"learner": {"lora_rank": 2}, "engine": {"own_weights": True}, **LEAD},
    "bfloat16, a KL reference": {"model_dtype": "bfloat16", "loss": {"kl_coef": 0.05}},
    "float16, LoRA": {"model_dtype": "float16", "learner": {"lora_rank": 2}},
    "a KL reference, LoRA, a curriculum": {
        "loss": {"kl_coef": 0.05},
        "learner": {"lora_rank": 2},
        "curriculum": {"name": "ladder", "option": "size", "values": [1, 2, 3], "success": 0.0},
    },
    "imitation of the expert, LoRA": {
        "learner": {"lora_rank": 2, "imitation": "expert", "imitation_episodes": 2},
    },
    "imitation of its own successes": {"learner": {"imitation": "kept", "imitation_episodes": 2}},
    "one minibatch, constant, outcomes that use the global generators": {
        "learner": {"minibatches": 1, "schedule": "constant"},
        "env_kwargs": {"noise": 1.0},
    },
    "compacted episodes": {
        "compaction": {"name": "summary", "instruction": "more", "summary_tokens": 8},
        "rollout": {"max_context": 48},
    },
}

TALK = Path(__file__).parents[1] / "support" / "talk.py"


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    shutil.copy(TALK, tmp_path)


def state(folder):
    """The tensors and the numbers of a checkpoint, without what differs from run to run."""
    numbers = json.loads((folder / "state.json").read_text())
    numbers["history"] = timeless(numbers["history"])
    del numbers["config"], numbers["recorded"]  # it names the folder, and times have other digits
    return load_file(folder / "state-00001.safetensors"), numbers


def same(first, second):
    """Whether two checkpoints are equal to the last bit."""
    (tensors, numbers), (others, other_numbers) = state(first), state(second)
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    assert numbers == other_numbers


def cut(run, step, to):
    """Copies a run as it was after a step."""
    shutil.copytree(run, to, symlinks=True)
    shutil.rmtree(to / "model")
    for folder in (to / "checkpoints").glob("step-*"):
        if int(folder.name[-6:]) > step:
            shutil.rmtree(folder)
    record(to, load_toml(to / "config.toml"))  # as if it had been trained there


@pytest.mark.parametrize(
    "way",
    [
        w if w in ("full", "LoRA, own weights") else pytest.param(w, marks=pytest.mark.slow)
        for w in WAYS
    ],
)
def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(way, tmp_path, capsys):
    whole = GSPOAgent(config=talks(**WAYS[way]))
    history = whole.train()
    best = max(m["eval/success"] for _, m in history if "eval/success" in m)
    assert any(m.get("train/grad_norm", 0) > 0 for _, m in history)
    if "imitation" in way:
        assert sum(m.get("train/imitation_loss", 0) > 0 for _, m in history) >= 3
    if "compaction" in WAYS[way]:
        assert all(m.get("rollout/forks/compacted", 1) > 0 for _, m in history)
    for step in (0, 3) if way == "full" else (2,):
        part = tmp_path / f"part{step}"
        cut(tmp_path / "run", step, part)
        torch.rand(3)  # a process that resumes has drawn other numbers before
        again = GSPOAgent.resume(part)
        capsys.readouterr()
        assert timeless(again.train()) == timeless(history)
        shown = capsys.readouterr()
        (line,) = [r for r in (shown.out + shown.err).splitlines() if r.startswith("train 4/4")]
        assert f"best {best:.1%}" in line
        for done in range(step + 1, 5):
            name = f"checkpoints/step-{done:06d}"
            same(tmp_path / "run" / name, part / name)
        assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))


BEFORE = {
    "the tiny model, whose schedule begins again": (
        {"imitation_learning_rate": 1e-9, "imitation_steps": 20},
        *(0, (7, 23)),
    ),
    "a model": ({"name": "imitate", "demonstrations": 20, "imitation_steps": 9}, 0, (3, 7)),
    "a model that is chosen by pass@k": (
        {"name": "imitate", "demonstrations": 20, "imitation_steps": 9, "imitation_pass_at": 2},
        *(0, (4, 7)),
    ),
    "an adapter": ({"name": "imitate", "demonstrations": 20, "imitation_steps": 9}, 2, (1, 8)),
}


@pytest.fixture
def kills(monkeypatch):
    """An imitation is saved after these steps, and its run copied as a kill leaves it."""
    places, step, write = [], Imitation.step, Checkpoints.write

    def timed(self):
        loss = step(self)
        monkeypatch.setattr(checkpoints, "_PAUSE", 0 if len(self.losses) in places else 1e9)
        return loss

    def copying(self, name, fill):
        write(self, name, fill)
        if checkpoints._PAUSE == 0:
            to = Path(f"killed{places.pop(0)}")
            shutil.copytree(self.run, to, symlinks=True)
            record(to, load_toml(to / "config.toml"), "base" if Path("base").exists() else "")

    monkeypatch.setattr(Imitation, "step", timed)
    monkeypatch.setattr(Checkpoints, "write", copying)
    monkeypatch.setattr(checkpoints, "_PAUSE", 1e9)
    return places


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.slow] * (w == "an adapter")) for w in BEFORE]
)
def test_an_imitation_that_is_killed_twice_ends_with_the_bits_of_the_whole_one(way, kills, done):
    recipe, rank, places = BEFORE[way]
    settings = talks(steps=1, eval_every=0, recipe=recipe, learner={"lora_rank": rank})
    if "name" in recipe:
        shutil.copytree(done / "model", "base")
        settings = dataclasses.replace(settings, model="base")
    kills[:] = places[:1]
    whole = GSPOAgent(config=settings)
    whole.train()
    first, last = (Path(f"killed{steps}") for steps in places)
    kills[:] = places[1:]
    GSPOAgent.resume(first).train()
    same(Path("run/checkpoints/step-000001"), first / "checkpoints/step-000001")
    torch.rand(3)
    again = GSPOAgent.resume(last)
    assert not again.finished
    again.train()
    assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))
    for step in (0, 1):
        name = f"checkpoints/step-{step:06d}"
        same(Path("run") / name, last / name)
    shipped = [Run.open(run).series.get("eval/success_as_shipped") for run in ("run", last)]
    assert [each is not None for each in shipped] == ["name" in recipe] * 2
    names = {path.name for path in Path("run/checkpoints").iterdir()}
    assert names == {path.name for path in (last / "checkpoints").iterdir()}
    assert "imitation" not in json.loads((last / "checkpoints/step-000000/state.json").read_text())
    texts = [(run / "metrics.jsonl").read_text() for run in (Path("run"), last)]
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())


def truncated(file):
    file.write_bytes(file.read_bytes()[:-100])


def flipped(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "truncated": (truncated, "state-00001.safetensors", r"state-00001.safetensors has \d+ bytes"),
    "flipped": (flipped, "state-00001.safetensors", "state-00001.safetensors has other contents"),
    "missing": (Path.unlink, "state.json", "state.json is missing"),
    "no manifest": (Path.unlink, "manifest.json", "manifest.json is missing"),
    "half a manifest": (truncated, "manifest.json", "manifest.json is not a manifest"),
    "flipped numbers": (flipped, "state.json", "state.json has other contents"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("done")
    shutil.copy(TALK, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        GSPOAgent(config=talks(steps=3)).train()
    return folder / "run"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that SIGTERM stopped while it imitated."""
    folder, step = tmp_path_factory.mktemp("stopped"), Imitation.step

    def stopping(self):
        loss = step(self)
        if self.steps == 5:
            signal.raise_signal(signal.SIGTERM)
        return loss

    shutil.copy(TALK, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(Imitation, "step", stopping)
        with pytest.raises(KeyboardInterrupt):
            GSPOAgent(config=talks(steps=1)).train()
    return folder / "run"


def test_a_signal_in_the_imitation_saves_it_and_no_command_takes_it_for_a_trained_run(stopped):
    shutil.copytree(stopped, "run")
    record(Path("run"), load_toml("run/config.toml"))
    state = json.loads(Path("run/checkpoints/step-000000/state.json").read_text())
    assert len(state["imitation"]["losses"]) == 5
    with pytest.raises(ModelError, match="yet; resume with: gspo-env train --resume run"):
        find_weights("run")
    with pytest.raises(OutputError, match="not empty"):
        check_output("run")
    with pytest.raises(ConfigError, match="seed is 1, and 0 in the run that is resumed"):
        GSPOAgent.resume("run", override(load_toml("run/config.toml"), {"seed": 1}))
    changed = override(load_toml("run/config.toml"), {"steps": 2})
    assert [step for step, _ in GSPOAgent.resume("run", changed).train()] == [0, 1, 2, 2]
    assert find_weights("run").step == 2


def test_a_damaged_checkpoint_of_an_imitation_is_named_with_the_command_that_begins_again(stopped):
    shutil.copytree(stopped, "run")
    flipped(Path("run/checkpoints/step-000000/state-00001.safetensors"))
    again = "begin again with: gspo-env train --config run/config.toml --output run-again"
    with pytest.raises(OutputError, match=rf"state-00001.safetensors has other.*{again}"):
        GSPOAgent.resume("run")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"losses": "x"}, "state.losses is 'x'"),
        ({"losses": ["x"]}, "could not convert"),
        ({"losses": [1.0] * 41}, "imitation.began is 0"),
        ({"began": 6}, "imitation.began is 6"),
        ({"began": []}, r"state.began is \[\]"),
    ],
)
def test_a_forged_checkpoint_of_an_imitation_is_refused_in_one_sentence(stopped, change, sentence):
    shutil.copytree(stopped, "run")
    record(Path("run"), load_toml("run/config.toml"))
    file = Path("run/checkpoints/step-000000/state.json")
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"imitation": state["imitation"] | change}))
    sign(file)
    with pytest.raises(OutputError, match=f"is damaged: .*{sentence}"):
        GSPOAgent.resume("run").train()


def test_an_imitation_of_other_demonstrations_is_resumed_with_a_warning(kills, done, caplog):
    shutil.copytree(done / "model", "base")
    ask = {"role": "user", "content": "say"}
    lines = [{"messages": [ask, {"role": "assistant", "content": text}]} for text in "abc"]
    write_talks(Path("talks.jsonl"), *lines)
    recipe = {"name": "imitate", "conversations": "talks.jsonl", "imitation_steps": 4}
    kills[:] = [2]
    settings = dataclasses.replace(talks(steps=1, eval_every=0, recipe=recipe), model="base")
    GSPOAgent(config=settings).train()
    shutil.copytree("killed2", "same")
    record(Path("same"), load_toml("run/config.toml"), "base")
    GSPOAgent.resume("same").train()
    warning = "the demonstrations are not those that the run has imitated so far"
    assert warning not in caplog.text
    write_talks(Path("talks.jsonl"), *lines[::-1])
    with pytest.raises(ConfigError, match=r"talks.jsonl.* changed since you trained there"):
        GSPOAgent.resume("killed2")
    changed = load_toml("killed2/config.toml")
    assert [step for step, _ in GSPOAgent.resume("killed2", changed).train()] == [0, 1, 1]
    assert warning in caplog.text


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(how, done, caplog):
    harm, file, said = DAMAGE[how]
    cut(done, 3, Path("run"))
    harm(Path("run/checkpoints/step-000003", file))
    again = GSPOAgent.resume("run")
    assert re.search(
        f"is now run/checkpoints/damaged-step-000003: step-000003: {said}", caplog.text
    )
    again.train()
    assert Path("run/checkpoints/damaged-step-000003").is_dir()
    same(done / "checkpoints/step-000003", Path("run/checkpoints/step-000003"))


@pytest.mark.parametrize("step", [0, 1])
def test_the_metrics_of_a_resumed_run_are_those_of_its_weights(done, step):
    cut(done, step, Path("run"))
    path = Path("run/metrics.jsonl")
    texts = path.read_text().splitlines(keepends=True)
    recorded = list(map(json.loads, texts))
    for n, line in enumerate(recorded):
        if line["step"] > step:  # played otherwise before the run was killed
            line["metrics"] = dict.fromkeys(line["metrics"], 12345.0) | {"old": 0.0}
            texts[n] = f"{json.dumps(line)}\n"
    path.write_text("".join(texts))
    history = GSPOAgent.resume("run").train()
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in again] == [line["step"] for line in recorded]
    for line, (at, metrics) in zip(again, history, strict=True):
        assert line["step"] == at
        both = line["metrics"].keys() & metrics.keys()
        assert {n: line["metrics"][n] for n in both} == {n: metrics[n] for n in both}
        assert len(both) > 5
        assert "old" not in line["metrics"]


def test_without_an_undamaged_checkpoint_each_damage_is_named(done):
    cut(done, 1, Path("run"))
    for folder in Path("run/checkpoints").glob("step-*"):
        (folder / "state.json").unlink()
    with pytest.raises(OutputError, match=r"step-000001: state.json is missing; step-000000: "):
        GSPOAgent.resume("run")


FORGED = {
    "a list": ("state.json", b"[]", "state.json has no step"),
    "no JSON": ("state.json", b"{", "state.json has no step"),
    "lists without end": ("state.json", b"[" * 10**6, "state.json has no step"),
    "a step that is a list": ("state.json", {"step": []}, "state.json has no step"),
    "a curriculum that is text": ("state.json", {"curriculum": "x"}, "state.curriculum is 'x'"),
    "a history that is a number": ("state.json", {"history": 5}, "is damaged: state.history is 5"),
    "a negative step": ("state.json", {"step": -1}, "is damaged: step is -1"),
    "a best step that is text": (
        *("state.json", {"best": {"step": "x"}}, "is damaged: state.step is 'x'"),
    ),
    "a score that is text": ("state.json", {"score": {"_turns": "x"}}, "_turns is 'x'"),
    "a huge count": ("state.json", {"buffer": {"next": 10**30}}, "buffer.next is 1000"),
    "more groups than were admitted": (
        "state.json",
        {"buffer": {"next": 10**9, "open": []}},
        "buffer.next is",
    ),
    "sizes that are texts": ("state.json", {"recorded": {"calls": "x"}}, "recorded.calls is 'x'"),
    "no score": ("state.json", {"score": None}, "state.score is None"),
    "a learner of texts": ("state.json", {"learner": {"loss_scale": "x"}}, "loss_scale is 'x'"),
    "a learner without its parts": ("state.json", {"learner": {}}, "is damaged: "),
    "tensors that are text": ("state-00001.safetensors", b"x" * 99, "is damaged: Safetensor"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_checkpoint_with_the_right_digests_is_refused_in_one_sentence(case, done):
    name, content, sentence = FORGED[case]
    cut(done, 0, Path("run"))
    folder = Path("run/checkpoints/step-000000")
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / name).read_text()) | content).encode()
    (folder / name).write_bytes(content)
    sign(folder / name)
    with pytest.raises(OutputError, match=sentence):
        GSPOAgent.resume("run").train()


@pytest.mark.parametrize("name", ["weights.model.norm.weight", "optimizer.0.exp_avg"])
def test_a_checkpoint_that_is_not_finite_is_refused_with_the_name_of_the_tensor(name, done):
    cut(done, 1, Path("run"))
    file = Path("run/checkpoints/step-000001/state-00001.safetensors")
    tensors = load_file(file)
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file)
    sign(file)
    with pytest.raises(OutputError, match=f"is damaged: {name} is not finite"):
        GSPOAgent.resume("run").train()


def test_a_checkpoint_of_another_version_is_refused_in_one_sentence(done):
    cut(done, 3, Path("run"))
    for path in Path("run/checkpoints").glob("step-*/manifest.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(OutputError, match=r"step-000003: another version of gspo-env wrote it"):
        GSPOAgent.resume("run")


def test_a_run_whose_environment_decided_the_score_resumes_with_the_settings_it_began_with(done):
    """Ranks that start again have the command line of the start, in which the score is `auto`."""
    cut(done, 3, Path("run"))
    saved = newest_checkpoint(Checkpoints(Path("run"), CheckpointConfig()))
    began = dataclasses.replace(load_toml("run/config.toml"), credit=CreditConfig(score="auto"))
    decided = dataclasses.replace(began, credit=CreditConfig(score="turns"))
    numbers = {**saved.numbers, "config": to_toml(decided)}
    saved = dataclasses.replace(saved, numbers=numbers)
    assert changed_config(Path("run"), saved, began).credit.score == "turns"
    other = dataclasses.replace(began, credit=CreditConfig(score="outcome"))
    with pytest.raises(ConfigError, match=r"credit\.score is 'outcome', and 'turns' in the run"):
        changed_config(Path("run"), saved, other)


def test_another_model_than_the_first_is_refused(done):
    cut(done, 2, Path("run"))
    flipped(Path("run/checkpoints/start/model.safetensors"))
    with pytest.raises(OutputError, match=r"model.safetensors has other contents"):
        GSPOAgent.resume("run")
    base = done.parent / "base"
    if not base.exists():
        shutil.copytree(done / "model", base)
    GSPOAgent(config=talks(steps=1, model=str(base), output="named")).train()
    assert not Path("named/checkpoints/start").exists()
    shutil.copy(done / "checkpoints/start/model.safetensors", base)
    with pytest.raises(ModelError, match=r"has other weights than when the run 'named' began"):
        GSPOAgent.resume("named")


def test_the_newest_and_the_best_are_kept_and_the_best_can_be_played(done, monkeypatch):
    store = Checkpoints(Path(), CheckpointConfig(save_every=1, keep=2))
    best = {3: 0.1, 6: 0.9, 9: 0.5}
    marked = {}
    for step in range(12):
        if best.get(step, 0) > marked.get("success", 0):
            marked = {"step": step, "success": best[step]}
        assert store.save({"step": step, "best": marked}, [("a", torch.ones(2))])
    names = sorted(p.name for p in Path("checkpoints").glob("step-*"))
    assert names == ["step-000006", "step-000010", "step-000011"]
    assert Path("checkpoints/best").readlink() == Path("step-000006")
    monkeypatch.chdir(done.parent)  # where the run was started, with its environment's file
    assert len(GSPOAgent.load("run/checkpoints/best").evaluate(2)) == 2


def test_the_model_of_the_start_is_played_in_the_environment_of_its_run(done, monkeypatch):
    monkeypatch.chdir(done.parent)
    start, end = (GSPOAgent.load(f"run/{name}") for name in ("checkpoints/start", "model"))
    assert start.env_id == end.env_id
    assert start.config.env_kwargs == end.config.env_kwargs
    assert start.config.rollout == end.config.rollout


def test_only_undamaged_checkpoints_count_as_those_to_keep():
    tensors = [("a", torch.ones(2))]
    with Checkpoints(Path(), CheckpointConfig(save_every=1, keep=3)) as store:
        for step in range(5):
            store.save({"step": step, "best": {}}, tensors)
    for step in (3, 4):
        truncated(Path(f"checkpoints/step-{step:06d}/state-00001.safetensors"))
    with Checkpoints(Path(), CheckpointConfig(save_every=1, keep=2)) as store:
        assert newest_checkpoint(store).step == 2
        for step in (3, 4, 5):
            store.save({"step": step, "best": {}}, tensors)
            good = [n for n in range(6) if Path(f"checkpoints/step-{n:06d}").is_dir()]
            assert good == [step - 1, step]
    assert sorted(p.name for p in Path("checkpoints").glob("damaged-*")) == [
        "damaged-step-000003",
        "damaged-step-000004",
    ]


def test_a_run_that_was_copied_without_its_links_goes_on_with_its_checkpoints(caplog):
    state, tensors = {"best": {"step": 0, "success": 0.5}}, [("a", torch.ones(2))]
    Path("first").mkdir()
    with Checkpoints(Path("first"), CheckpointConfig(save_every=1)) as store:
        assert store.save({"step": 0, **state}, tensors)
    shutil.copytree("first", "copy")  # the link to the best is a folder now
    store = Checkpoints(Path("copy"), CheckpointConfig(save_every=1))
    for step in (1, 2):
        assert store.save({"step": step, **state}, tensors)
    assert Path("copy/checkpoints/best").readlink() == Path("step-000000")
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_without_a_number_of_steps_saving_takes_a_fiftieth_of_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    store = Checkpoints(Path(), CheckpointConfig())

    def slow(path, step):
        now[0] += 3

    store.save({"step": 0, "best": {}}, [("a", torch.ones(2))], slow)
    now[0] += 149
    assert not store.due(1)
    now[0] += 1
    assert store.due(2)


def test_only_the_number_of_steps_and_the_checkpoints_may_change(done):
    cut(done, 2, Path("run"))
    saved = load_toml("run/config.toml")
    for changes, said in [
        ({"seed": 1}, "seed is 1, and 0 in the run that is resumed"),
        ({"learner": {"learning_rate": 0.5}}, "learner.learning_rate is 0.5"),
        ({"rollout": {"max_turns": 3}}, "rollout.max_turns is 3, and"),
        ({"steps": 1}, "steps is 1; expected at least 2"),
    ]:
        with pytest.raises(ConfigError, match=said):
            GSPOAgent.resume("run", override(saved, changes))
    Path("run/warnings.txt").write_bytes(b"\xff\n")  # a stranger's
    changed = override(saved, {"steps": 3, "checkpoints": {"keep": 1, "save_every": 2}})
    assert [step for step, _ in GSPOAgent.resume("run", changed).train()] == [0, 1, 2, 2, 3, 3]


def test_a_finished_run_says_so(done, capsys, monkeypatch):
    monkeypatch.chdir(done.parent)
    main(["train", "--resume", "run"])
    assert "is finished: 3 of 3 steps; --steps adds more" in capsys.readouterr().out


def test_a_run_is_not_trained_twice_in_one_process(tmp_path):
    message = f"still running, in process {os.getpid()}"
    with Checkpoints(tmp_path, CheckpointConfig()), pytest.raises(OutputError, match=message):
        Checkpoints(tmp_path, CheckpointConfig())
    with Checkpoints(tmp_path, CheckpointConfig()):
        pass


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_the_global_generators_of_a_run_follow_from_its_seed(draw):
    draws = []
    for seed in (5, 5, 2**64 - 1):
        draw()
        seed_generators(seed)
        draws.append(draw())
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (None, "Stopped after step 5 of 9. {run!r} has no checkpoint to resume from"),
        (3, "Stopped after step 5 of 9; the last checkpoint has step 3, resuming repeats 2 steps."),
        (5, "Stopped after step 5 of 9. Resume with: gspo-env train --resume "),
    ],
)
def test_a_stopped_run_says_from_which_step_it_resumes(tmp_path, last, words):
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.last = last
        assert checkpoints.stopped(5, 9).startswith(words.format(run=str(tmp_path)))
