"""A real MLflow server that is killed and restarted during a run; `pytest -m trackers`."""

import pytest

from gspo_env.tracking import MLflow, RunInfo, Span, Trace, start
from stress.hostile import server

pytestmark = pytest.mark.trackers


def trace(step):
    span = Span(name="episode", kind="episode", parent=None, start=10**18, end=10**18 + 10**9)
    return Trace(key=f"train-{step}-0-0", name="one", spans=(span,), tags={"step": str(step)})


def test_every_point_and_trace_is_on_the_server_once_after_an_outage(tmp_path):
    from mlflow.tracking import MlflowClient

    (tmp_path / "run").mkdir()
    info = RunInfo(name="run", folder=tmp_path / "run")
    with server(tmp_path) as tracking:
        with start(MLflow(tracking_uri=tracking.uri), info) as tracker:
            for part in range(2):
                if part:
                    tracking.kill()
                for step in range(100 * part, 100 * part + 100):
                    tracker.log({f"m{i}": step / (i + 1) for i in range(20)}, step)
                    if step % 10 == 0:
                        tracker.trace(trace(step))
                tracker.text(f"{part}.txt", "é")
                if part:
                    tracking.start()
        assert tracker.problems == []
        client = MlflowClient(tracking.uri)
        run = client.get_run(tracker.ids["mlflow"])
        for i in range(20):
            history = client.get_metric_history(run.info.run_id, f"m{i}")
            points = [(point.step, point.value) for point in history]
            assert points == [(step, step / (i + 1)) for step in range(200)]
        traces = client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    assert sorted(int(trace.info.tags["step"]) for trace in traces) == list(range(0, 200, 10))
    assert all(len(trace.data.spans) == 1 for trace in traces)
