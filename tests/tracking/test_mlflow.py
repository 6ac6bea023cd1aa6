from __future__ import annotations

import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_env.errors import ConfigError
from gspo_env.tracking.base import MODEL, RunInfo
from gspo_env.tracking.delivery import Cursor
from gspo_env.tracking.mlflow import MLflow
from gspo_env.tracking.several import NON_FINITE, Several, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with MLflow's default store; shared, since making one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield path


@pytest.fixture
def begin(folder: Path, tmp_path: Path) -> Callable[..., Several]:
    """Starts a run; `params`, `tags` and so on belong to it."""

    def start_run(settings: MLflow | None = None, **changes: Any) -> Several:
        info = RunInfo(**{"name": "first", "folder": tmp_path, **changes})
        return start(settings or MLflow(), info)

    return start_run


def recorded(folder: Path) -> Any:
    """What the store has of the run in a folder."""
    from mlflow.tracking import MlflowClient

    return MlflowClient().get_run(Cursor.read(folder, "mlflow").id)


def read_artifact(folder: Path, name: str) -> str:
    from mlflow.tracking import MlflowClient

    path = MlflowClient().download_artifacts(recorded(folder).info.run_id, name)
    return Path(path).read_text(encoding="utf-8")


def test_a_run_is_visible_with_the_default_store(
    folder: Path, begin: Callable[..., Several], tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    params = {"learner": {"rate": 1e-5}, "long": "x" * 7000, "odd:key": {"none": None}, "empty": {}}
    with begin(MLflow(experiment="default-store"), params=params, tags={"kind": "test"}) as tracker:
        tracker.log({"train/loss": 0.5, "eval/success": 1}, step=1)
        tracker.log({"train/loss": 0.25}, step=2)
        tracker.text("episodes/step-1.txt", "héllo")
    assert (folder / "mlflow.db").is_file()
    assert (folder / "mlruns").is_dir()
    assert tracker.how_to_look == "mlflow ui"
    assert tracker.problems == []
    run = recorded(tmp_path)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.tags["kind"] == "test"
    assert run.data.params["learner.rate"] == "1e-05"
    assert run.data.params["odd_key.none"] == "None"
    assert run.data.params["empty"] == "{}"
    assert len(run.data.params["long"]) == 6000
    assert run.data.metrics == {"train/loss": 0.25, "eval/success": 1.0}
    history = MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]
    assert read_artifact(tmp_path, "episodes/step-1.txt") == "héllo"


@pytest.mark.parametrize("log_model", [True, False])
def test_files_and_folders_become_artifacts_and_the_model_where_it_is_wanted(
    begin: Callable[..., Several], tmp_path: Path, log_model: bool
) -> None:
    from mlflow.tracking import MlflowClient

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.txt").write_text("1")
    (tmp_path / "a näme.txt").write_text("2")
    with begin(MLflow(log_model=log_model)) as tracker:
        tracker.artifact(tmp_path / "model", MODEL)
        tracker.artifact(tmp_path / "a näme.txt")
        tracker.text("épisodes/step 1.txt", "é")
    run_id = recorded(tmp_path).info.run_id
    names = {item.path for item in MlflowClient().list_artifacts(run_id)}
    assert names == {"a näme.txt", "épisodes", *(["model"] if log_model else [])}
    assert tracker.problems == []
    if log_model:
        assert read_artifact(tmp_path, "model/weights.txt") == "1"


def test_non_finite_metrics_and_odd_names_and_ten_thousand_metrics(
    begin: Callable[..., Several], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), begin() as tracker:
        tracker.log({"a": math.nan, "b": -math.inf, "c d:é": 3.0}, step=4)
        tracker.log({f"m/{i}": float(i) for i in range(10_000)}, step=5)
    metrics = recorded(tmp_path).data.metrics
    assert len(metrics) == 10_002
    assert (metrics["c d_é"], metrics[NON_FINITE], metrics["m/9999"]) == (3.0, 2.0, 9999.0)
    assert "step 4: metric a is nan" in caplog.text
    assert tracker.problems == []


@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_an_exception_ends_the_run_as_failed(
    begin: Callable[..., Several], tmp_path: Path, error: type[BaseException], status: str
) -> None:
    with pytest.raises(error), begin() as tracker:  # noqa: PT012 - what counts is where it leaves
        tracker.log({"a": 1.0}, step=1)
        raise error
    run = recorded(tmp_path)
    assert run.info.status == status
    assert run.data.metrics == {"a": 1.0}


def test_logging_forty_metrics_does_not_keep_the_caller(begin: Callable[..., Several]) -> None:
    with begin() as tracker:
        metrics = {f"train/metric_{i}": float(i) for i in range(40)}
        costs = []
        for step in range(20):
            began = time.perf_counter()
            tracker.log(metrics, step)
            costs.append(time.perf_counter() - began)
    assert sorted(costs)[len(costs) // 2] < 0.005


def test_one_lost_artifact_costs_neither_the_rest_nor_the_report_of_it(
    begin: Callable[..., Several], tmp_path: Path
) -> None:
    tracker = begin()
    tracker.artifact(tmp_path / "missing.txt")
    tracker.log({"a": 1.0}, step=1)
    tracker.finish()
    tracker.finish()
    assert "1 call failed" in tracker.problems[0]
    assert "missing.txt" in tracker.problems[0]
    assert recorded(tmp_path).data.metrics == {"a": 1.0}


def test_a_run_is_resumed_and_a_run_of_a_comparison_names_its_parent(
    begin: Callable[..., Several], tmp_path: Path
) -> None:
    (tmp_path / "child").mkdir()
    parent = begin(name="parent", params={"a": 1})
    parent.finish()
    first = recorded(tmp_path)
    again = begin(name="parent", params={"a": 2}, resume={"mlflow": ""})
    begin(MLflow(run_name="all"), name="child", folder=tmp_path / "child", parent=tmp_path).finish()
    deadline = time.monotonic() + 30
    while recorded(tmp_path).info.status != "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert again.ids == {"mlflow": first.info.run_id}
    again.finish()
    assert again.problems == []
    run, child = recorded(tmp_path), recorded(tmp_path / "child")
    assert (run.info.run_id, run.info.status) == (first.info.run_id, "FINISHED")
    assert run.data.params == {"a": "1"}
    assert child.data.tags["mlflow.parentRunId"] == run.info.run_id
    assert child.info.run_name == "child"


def test_two_runs_can_be_recorded_at_once(begin: Callable[..., Several], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = (begin(folder=folder) for folder in folders)
    first.log({"a": 1.0}, 1)
    second.log({"a": 2.0}, 1)
    second.finish()
    first.finish()
    assert [recorded(f).data.metrics["a"] for f in folders] == [1.0, 2.0]


def test_a_store_of_ones_own_is_named_in_the_hint(
    begin: Callable[..., Several], tmp_path: Path
) -> None:
    with begin(MLflow(tracking_uri=f"sqlite:///{tmp_path}/my runs.db")) as tracker:
        pass
    assert tracker.how_to_look == (
        f"mlflow ui --backend-store-uri 'sqlite:///{tmp_path}/my runs.db'"
    )


def test_an_experiment_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"tracker\.experiment"):
        MLflow(experiment=" ")


def test_importing_the_settings_of_trackers_imports_no_library() -> None:
    code = (
        "import sys\nfrom gspo_env.registry import find, names\n"
        "[find('tracker', name)() for name in names('tracker')]\n"
        "heavy = {'mlflow', 'torch', 'tensorboard', 'wandb', 'trackio'} & {*sys.modules}\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
