from __future__ import annotations

import dataclasses
import json
import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import tyro

from gspo_env.errors import ConfigError, MissingExtraError
from gspo_env.registry import find
from gspo_env.tracking import NoTracker, RunInfo, Tracker, combine, start
from gspo_env.tracking.multi import NON_FINITE, MultiTracker, parts

OWN = str(Path(__file__).parents[2] / "examples" / "own_tracker.py")


class Level(Enum):
    TURN = "turn"


@dataclass(frozen=True)
class Learner:
    learning_rate: float = 1e-5
    level: Level = Level.TURN


@dataclass(frozen=True)
class Kept(Tracker):
    """Notes every call."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def start(self, run):
        self.calls.append(("start", run))
        return self

    def log(self, metrics, step):
        self.calls.append(("log", metrics, step))

    def text(self, name, text):
        self.calls.append(("text", name, text))

    def artifact(self, path, folder=""):
        self.calls.append(("artifact", path, folder))

    def finish(self, status, reason):
        self.calls.append(("finish", status, reason))

    how_to_look = "look here"


class Broken(Tracker):
    """Raises in every method of its trackers."""

    def start(self, run):
        return self

    def fail(self, *arguments, **keywords):
        raise OSError("it is broken")

    log = text = artifact = finish = fail


class NeverStarts:
    def start(self, run):
        raise ConnectionError("nobody answers")


@pytest.fixture
def run(tmp_path):
    return RunInfo(name="first", folder=tmp_path, params={"learner": Learner(), "empty": {}})


def test_a_tracker_that_fails_in_everything_stops_neither_the_run_nor_the_other(run, caplog):
    kept = Kept()
    choices = {"broken": Broken(), "kept": kept}
    with MultiTracker(choices, run) as tracker:
        tracker.log({"a": 1}, step=1)
        tracker.text("a.txt", "a")
        tracker.artifact(__file__, "model")
        assert tracker.ids == {"broken": "", "kept": ""}
    tracker.finish("FAILED")
    tracker.log({"a": 2}, step=2)
    assert tracker.how_to_look == "look here"
    assert kept.calls[0][1].params == {
        "learner.learning_rate": 1e-5,
        "learner.level": "turn",
        "empty": {},
    }
    assert kept.calls[1:] == [
        ("log", {"a": 1.0}, 1),
        ("text", "a.txt", "a"),
        ("artifact", Path(__file__), "model"),
        ("finish", "FINISHED", ""),
    ]
    assert tracker.failed == {"broken"}
    assert tracker.problems == [
        "broken did NOT record everything: 4 calls failed, the first was log: OSError: it is broken"
    ]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_an_error_at_the_start_of_a_tracker_ends_the_run_and_the_other_tracker(run):
    kept = Kept()
    with pytest.raises(ConnectionError, match="nobody answers"):
        MultiTracker({"kept": kept, "silent": NeverStarts()}, run)
    assert kept.calls[-1] == ("finish", "FAILED", "")


@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_an_exception_of_the_run_is_never_hidden_and_ends_it_as_failed(run, caplog, error, status):
    kept = Kept()
    with pytest.raises(error), MultiTracker({"broken": Broken(), "kept": kept}, run):
        raise error
    assert kept.calls[-1] == ("finish", status, error.__name__)
    assert "broken did NOT record everything" in caplog.text


def test_non_finite_metrics_never_reach_a_tracker(run, caplog):
    kept = Kept()
    with caplog.at_level(logging.WARNING), MultiTracker({"kept": kept}, run) as tracker:
        tracker.log({"a": float("nan"), "b": float("-inf"), "c": 3, "d": None}, step=4)
    assert kept.calls[1] == ("log", {"c": 3.0, NON_FINITE: 3.0}, 4)
    assert "step 4: metric a is nan" in caplog.text
    assert "step 4: metric d is None" in caplog.text


def test_a_missing_extra_stops_the_run_before_it_begins_with_the_install_command(run):
    class Missing:
        package = "no_such_package"

    kept = Kept()
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-env\[no_such_package\]'"):
        MultiTracker({"kept": kept, "missing": Missing()}, run)
    assert kept.calls[-1] == ("finish", "FAILED", "")


def test_no_tracker_writes_only_the_metrics(run, tmp_path):
    with start(NoTracker(), run) as tracker:
        tracker.log({"a": 1.0}, step=1)
        tracker.text("a.txt", "a")
        tracker.artifact(tmp_path)
    assert tracker.how_to_look == ""
    assert tracker.ids == {}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (line["step"], line["metrics"]) == (1, {"a": 1.0})
    assert abs(line["time"] / 1000 - time.time()) < 60


def test_combined_trackers_are_one_choice_with_the_settings_of_each(run):
    names = f"none,{OWN}:JsonLines"
    choice = tyro.cli(combine(names), args=["--jsonlines.file", "lines.jsonl"])
    assert combine(names) is combine(names)
    assert choice == combine(names)(
        jsonlines=find("tracker", f"{OWN}:JsonLines")(file="lines.jsonl")
    )
    assert list(parts(choice)) == ["none", f"{OWN}:JsonLines"]
    assert dataclasses.replace(choice) == choice
    with start(choice, run) as tracker:
        tracker.log({"a": 1.0}, step=1)
    assert (run.folder / "lines.jsonl").exists()
    assert combine("mlflow,none")().mlflow.traces == 1


@pytest.mark.parametrize("names", ["mlflow,mlflow", "none,nonsense", "mlflow,"])
def test_combining_refuses_what_is_unknown_or_there_twice(names):
    with pytest.raises(ConfigError, match="tracker is"):
        combine(names)
