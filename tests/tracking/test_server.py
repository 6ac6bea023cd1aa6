"""A real MLflow server that is killed and restarted during a run; `pytest -m trackers`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gspo_env.tracking import MLflow, RunInfo, Span, Trace, start

pytestmark = pytest.mark.trackers

ROOT = Path(__file__).parents[2]


def trace(step: int) -> Trace:
    span = Span(name="episode", kind="episode", parent=None, start=10**18, end=10**18 + 10**9)
    return Trace(key=f"train-{step}-0-0", name="one", spans=(span,), tags={"step": str(step)})


def test_every_point_and_trace_is_on_the_server_once_after_two_outages(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    spec = importlib.util.spec_from_file_location("o", ROOT / "stress" / "tracking_outage.py")
    assert spec is not None
    assert spec.loader is not None
    outage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(outage)
    (tmp_path / "run").mkdir()
    with outage.server(tmp_path) as server:
        info = RunInfo(name="run", folder=tmp_path / "run")
        with start(MLflow(tracking_uri=server.uri), info) as tracker:
            for part in range(3):
                if part:
                    server.kill()
                for step in range(100 * part, 100 * part + 100):
                    tracker.log({f"m{i}": step / (i + 1) for i in range(20)}, step)
                    if step % 10 == 0:
                        tracker.trace(trace(step))
                tracker.text(f"{part}.txt", "é")
                if part:
                    server.start()
        assert tracker.problems == []
        points = outage.written(tmp_path / "run")
        assert points.total() == 6000
        assert outage.found(server.uri, tmp_path / "run") == points
        client = MlflowClient(server.uri)
        run = client.get_run(tracker.ids["mlflow"]).info
        found = client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
        assert sorted(int(each.info.tags["step"]) for each in found) == list(range(0, 300, 10))
        assert all(len(each.data.spans) == 1 for each in found)
