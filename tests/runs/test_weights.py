"""Which weights a folder has: no reader falls back to older ones silently."""

import json
import shutil
from pathlib import Path

import pytest
from support.runs import talks
from torch import equal

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import override
from gspo_env.errors import ModelError
from gspo_env.model.weights import find_weights


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    shutil.copy(Path(__file__).parents[1] / "support" / "talk.py", tmp_path)


def write(run, *steps, models=(), best=None, last=None, planned=30):
    """Writes a run with checkpoints of some steps, of which some have models."""
    (run / "checkpoints").mkdir(parents=True)
    folders = {run / "checkpoints" / f"step-{step:06d}": step in models for step in steps}
    for folder, has_model in folders.items():
        folder.mkdir()
        (folder / "state.json").write_text("{}")
        if has_model:
            write_model(folder / "model", int(folder.name[5:]))
    if best is not None:
        (run / "checkpoints" / "best").symlink_to(f"step-{best:06d}")
    if last is not None:
        write_model(run / "model", last)
    (run / "config.toml").write_text(f"steps = {planned}\n")
    return run


def write_model(folder, step):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "gspo_env.json").write_text(json.dumps({"config": "", "step": step}))


def test_the_newest_weights_are_those_of_the_latest_step_wherever_they_are(tmp_path):
    run = write(tmp_path / "run", 8, 12, models=[8, 12], best=8, last=10)
    assert str(find_weights(run)) == f"{run}, weights of step 12, the newest"
    assert find_weights(run).folder == str(run / "checkpoints/step-000012/model")
    assert str(find_weights(run, best=True)) == f"{run}, weights of step 8"
    assert find_weights(run, 10).folder == str(run / "model")
    assert find_weights(run / "checkpoints/best").step == 8
    assert find_weights(run / "model").folder == str(run / "model")


def test_a_newer_checkpoint_without_a_model_is_an_error_that_names_the_commands(tmp_path):
    run = write(tmp_path / "a run", 8, 12, models=[8], best=8, last=4)
    with pytest.raises(ModelError) as error:
        find_weights(run)
    text = f"the run {str(run)!r} is at step 12 of 30, of which it has no model yet; it has those"
    assert f"{text} of step 4, 8 (choose with --step); resume with: " in str(error.value)
    assert f"gspo-env train --resume '{run}' --steps 12" in str(error.value)
    assert find_weights(run, 4).folder == str(run / "model")
    with pytest.raises(
        ModelError, match=r"no weights of step 5; it has those of step 4, 8 \(choose with --step\)"
    ):
        find_weights(run, 5)
    with pytest.raises(ModelError, match="has no model, which only the best one has; save it with"):
        find_weights(run / "checkpoints/step-000012")


def test_a_run_that_was_copied_without_its_links_has_the_same_best(tmp_path):
    run = write(tmp_path / "run", 8, 12, models=[8], best=8, last=12)
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/checkpoints/step-000008")
    assert find_weights(tmp_path / "copy", best=True).step == 8
    assert find_weights(tmp_path / "copy", 8).step == 8
    assert find_weights(tmp_path / "copy").step == 12


@pytest.mark.parametrize(
    "text", ["", "[]", '{"step": true}', '{"step": "12"}', '{"step": -1}', '{"step": 1e300}']
)
def test_a_step_that_is_damaged_is_not_known(tmp_path, text):
    run = write(tmp_path / "run", 8, 12, models=[8], best=8, last=12)
    (run / "model/gspo_env.json").write_text(text)
    with pytest.raises(ModelError, match="is at step 12 of 30, of which it has no model yet"):
        find_weights(run)
    assert find_weights(run, best=True).step == 8


def test_only_a_run_has_several_weights(tmp_path):
    write_model(tmp_path / "model", 3)
    assert find_weights(tmp_path).folder == str(tmp_path / "model")
    assert str(find_weights("some/hub-id")) == "some/hub-id"
    with pytest.raises(ModelError, match="'some/hub-id' is not the folder of a run, whose"):
        find_weights("some/hub-id", best=True)
    for steps, words in (((), "yet$"), ((0,), "yet; resume with: gspo-env train --resume ")):
        with pytest.raises(ModelError, match=f"has no model {words}"):
            find_weights(write(tmp_path / f"run{len(steps)}", *steps))


def test_a_run_that_was_stopped_before_its_first_step_has_the_weights_of_step_0(tmp_path):
    run = write(tmp_path / "run", 0, last=0)
    assert str(find_weights(run)) == f"{run}, weights of step 0, the newest"
    assert find_weights(run, 0).folder == str(run / "model")


def parameters(agent):
    return dict(agent.model.named_parameters())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_loaded_step_has_the_weights_of_that_step(rank):
    config = talks(output="run", learner={"lora_rank": rank}, steps=2, eval_every=1)
    GSPOAgent(config=config).train()
    shutil.copytree("run/model", "two")
    agent = GSPOAgent.resume("run", override(config, {"steps": 4}))
    agent.train()
    assert find_weights("run").step == 4
    best = GSPOAgent.load("run", best=True)
    at = find_weights("run", best=True).step
    assert best.env_id == agent.env_id
    saved = parameters(GSPOAgent.load(f"run/checkpoints/step-{at:06d}"))
    assert all(equal(saved[name], weight) for name, weight in parameters(best).items())
    newest, two = (
        parameters(GSPOAgent.load("run")),
        parameters(GSPOAgent.load("two", "talk.py:Talk")),
    )
    assert not all(equal(newest[name], weight) for name, weight in two.items())
