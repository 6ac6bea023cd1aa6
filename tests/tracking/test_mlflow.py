from __future__ import annotations

import logging
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gspo_env.errors import ConfigError
from gspo_env.tracking.mlflow import NON_FINITE, Tracker, TrackingConfig


@dataclass(frozen=True)
class Learner:
    learning_rate: float = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with the default store of MLflow; shared, because creating one is slow."""
    path = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield path


def read_artifact(run_id: str, name: str) -> str:
    from mlflow.tracking import MlflowClient

    return Path(MlflowClient().download_artifacts(run_id, name)).read_text(encoding="utf-8")


def test_a_run_is_visible_with_the_default_store(folder: Path) -> None:
    from mlflow.tracking import MlflowClient

    with Tracker(TrackingConfig(experiment="default-store", run_name="first")) as tracker:
        tracker.start(
            {"learner": Learner(), "long": "x" * 7000, "odd:key": {"none": None}, "empty": {}},
            tags={"kind": "test"},
        )
        tracker.log({"train/loss": 0.5, "eval/success": 1}, step=1)
        tracker.log({"train/loss": 0.25}, step=2)
        tracker.text("episodes/step-1.txt", "héllo")
    assert (folder / "mlflow.db").is_file()
    assert (folder / "mlruns").is_dir()
    assert tracker.how_to_look == "mlflow ui"
    assert tracker.run_url == ""

    client = MlflowClient()
    run = client.get_run(tracker.run_id)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.tags["kind"] == "test"
    assert run.data.params["learner.learning_rate"] == "1e-05"
    assert run.data.params["odd_key.none"] == "None"
    assert run.data.params["empty"] == "{}"
    assert len(run.data.params["long"]) == 6000
    assert run.data.metrics == {"train/loss": 0.25, "eval/success": 1.0}
    history = client.get_metric_history(tracker.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]
    assert read_artifact(tracker.run_id, "episodes/step-1.txt") == "héllo"


@pytest.mark.usefixtures("folder")
def test_figures_files_and_folders_become_artifacts(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    from gspo_env.report.curves import learning_curve

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.txt").write_text("1")
    (tmp_path / "note.txt").write_text("2")
    with Tracker() as tracker:
        tracker.start()
        tracker.figure("plots/curve.png", learning_curve([(1, {"rollout/success": 0.5})], "curve"))
        tracker.artifact(tmp_path / "model", "model")
        tracker.artifact(tmp_path / "note.txt")
    names = {item.path for item in MlflowClient().list_artifacts(tracker.run_id)}
    assert names == {"plots", "model", "note.txt"}
    assert read_artifact(tracker.run_id, "model/weights.txt") == "1"


@pytest.mark.usefixtures("folder")
def test_non_finite_metrics_are_dropped_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from mlflow.tracking import MlflowClient

    with caplog.at_level(logging.WARNING), Tracker() as tracker:
        tracker.start()
        tracker.log({"a": math.nan, "b": -math.inf, "c": 3.0}, step=4)
    assert MlflowClient().get_run(tracker.run_id).data.metrics == {"c": 3.0, NON_FINITE: 2.0}
    assert "step 4: metric a is nan" in caplog.text


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_an_exception_ends_the_run_as_failed(error: type[BaseException], status: str) -> None:
    from mlflow.tracking import MlflowClient

    tracker = Tracker()
    with pytest.raises(error), tracker:  # noqa: PT012 - what counts is where it leaves the context
        tracker.start()
        tracker.log({"a": 1.0}, step=1)
        raise error
    run = MlflowClient().get_run(tracker.run_id)
    assert run.info.status == status
    assert run.data.metrics == {"a": 1.0}


@pytest.mark.usefixtures("folder")
def test_logging_forty_metrics_does_not_keep_the_caller() -> None:
    with Tracker() as tracker:
        tracker.start()
        metrics = {f"train/metric_{i}": float(i) for i in range(40)}
        costs = []
        for step in range(20):
            began = time.perf_counter()
            tracker.log(metrics, step)
            costs.append(time.perf_counter() - began)
    assert sorted(costs)[len(costs) // 2] < 0.005


@pytest.mark.usefixtures("folder")
def test_a_store_that_cannot_be_opened_is_reported_at_once_and_raised_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(TrackingConfig(tracking_uri="nonsense://store"))
    tracker.start()
    with pytest.raises(Exception, match="nonsense"):
        _ = tracker.run_id
    assert "cannot be opened" in caplog.text
    tracker.log({"a": 1.0}, step=1)
    with pytest.raises(Exception, match="nonsense"):
        tracker.finish()


@pytest.mark.usefixtures("folder")
def test_one_lost_artifact_costs_neither_the_rest_nor_the_report_of_it(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    tracker = Tracker()
    tracker.start()
    tracker.artifact(tmp_path / "missing.txt")
    tracker.log({"a": 1.0}, step=1)
    with pytest.raises(OSError, match=r"missing\.txt"):
        tracker.finish()
    tracker.finish()
    assert MlflowClient().get_run(tracker.run_id).data.metrics == {"a": 1.0}


def test_a_store_of_ones_own_is_named_in_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    local = Tracker(TrackingConfig(tracking_uri="sqlite:///my runs.db"))
    assert local.how_to_look == "mlflow ui --backend-store-uri 'sqlite:///my runs.db'"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert Tracker().how_to_look == "http://127.0.0.1:5000"


def test_without_tracking_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Tracker(TrackingConfig(enabled=False)) as tracker:
        tracker.start({"a": 1})
        tracker.log({"a": 1.0}, step=1)
        tracker.text("a.txt", "a")
    assert tracker.run_id == tracker.how_to_look == ""
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.experiment"):
        TrackingConfig(experiment=" ")


def test_importing_the_module_imports_no_mlflow() -> None:
    code = "import sys, gspo_env.tracking.mlflow; sys.exit('mlflow' in sys.modules)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
