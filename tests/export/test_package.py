"""The packages of exported environments, and what is said of each library."""

import importlib.metadata
import json

import pytest
from support.exports import ENVS, ROWS, talks

from gspo_env.errors import ConfigError, EnvironmentContractError, MissingExtraError, OutputError
from gspo_env.export import Stepper, left_out, look, seeds, write_package
from gspo_env.seeding import HELD_OUT


@pytest.fixture
def installed(monkeypatch):
    """Pretends that the libraries have these versions."""
    versions = {"trl": "1.16.0", "verifiers": "0.4.2", "openenv": "0.10.1"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.mark.parametrize("name", ENVS)
def test_actions_from_outside_give_the_episode_of_the_rollout(name):
    spec, kwargs = ENVS[name]
    stepper = Stepper(spec, **kwargs)
    for talk in talks(name):
        shown = [stepper.reset(talk.seed).observation]
        for action in talk.actions:
            stepper.step(action)
            shown.append(stepper.observation)
        assert shown == talk.observations
        ours, theirs = talk.episode, stepper.episode
        assert theirs.rewards.tolist() == ours.rewards.tolist()
        assert (theirs.outcome, theirs.ending) == (ours.outcome, ours.ending)
        with pytest.raises(EnvironmentContractError, match="outside an episode"):
            stepper.step("more")
    stepper.close()


def test_a_running_episode_is_cut_by_the_next():
    stepper = Stepper("gspo/Lookup-v0")
    first = stepper.reset(0)
    assert stepper.cut().stop_reason == "max_turns"
    stepper.reset(1)
    assert stepper.reset(0).observation == first.observation
    assert stepper.episode is None


@pytest.mark.parametrize("peer", ["trl", "verifiers", "openenv"])
def test_a_package_is_written_once_and_says_what_is_left_out(peer, installed, tmp_path):
    folder = tmp_path / "new"
    spec, kwargs = ENVS["file"]
    lines = write_package(spec, peer, folder, **kwargs)
    assert all(line in (folder / "README.md").read_text() for line in lines)
    assert any("turns" in line or "truncation" in line for line in lines)
    assert any("export_shop.py imports" in line for line in lines)
    assert len(list(folder.rglob("export_shop.py"))) == 1
    with pytest.raises(OutputError, match="exists already"):
        write_package(spec, peer, folder, **kwargs)


def test_files_that_arguments_name_are_said_to_be_left_out(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "grade.py").write_text("def right(attempt):\n    return 1.0\n")
    given = {
        "data": ["rows.jsonl", str(rows)],
        "rewards": "grade.py:right",
        "system_prompt": "Add.",
    }
    named = f"(rows.jsonl, {rows}, grade.py:right)"
    lines = write_package("gspo/Dataset-v0", "trl", tmp_path / "one", **given)
    assert [line for line in lines if named in line]
    lines = write_package(
        "gspo/Dataset-v0", "trl", tmp_path / "two", data=ROWS, system_prompt="x" * 999
    )
    assert not [line for line in lines if "that arguments name" in line]


def test_what_is_left_out_depends_on_the_environment():
    lookup, words = look("gspo/Lookup-v0", {}), look("gspo/KeyDoor-v0", {})
    assert not lookup.goes_on
    assert words.goes_on
    assert any("tool `act`" in line for line in left_out("trl", words))
    assert not any("tool `act`" in line for line in left_out("trl", lookup))
    assert any("several calls" in line for line in left_out("trl", lookup))
    assert not any("several calls" in line for line in left_out("trl", words))


def test_another_version_is_refused(installed, tmp_path):
    def refused(peer, error, **kwargs):
        with pytest.raises(error) as refusal:
            write_package("gspo/Lookup-v0", peer, tmp_path / "no", **kwargs)
        assert not (tmp_path / "no").exists()
        return str(refusal.value)

    installed["trl"] = "1.17.0"
    assert "trl 1.17.0 is installed, and the export was tried with 1.16" in refused(
        "trl", ConfigError
    )
    assert "did you mean verifiers?" in refused("verifier", ConfigError)
    assert "expected texts, numbers" in refused("verifiers", ConfigError, hops=object())
    del installed["openenv"]
    assert "pip install 'gspo-env[openenv]'" in refused("openenv", MissingExtraError)


def test_seeds_of_training_and_of_evaluation():
    assert list(seeds(2, first=5)) == [5, 6]
    assert list(seeds(2, held_out=True)) == [HELD_OUT, HELD_OUT + 1]
