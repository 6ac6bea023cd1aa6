"""A real MLflow server that is killed and restarted during a run; `pytest -m trackers`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gspo_env.tracking import MLflow, RunInfo, start

pytestmark = pytest.mark.trackers

ROOT = Path(__file__).parents[2]


def test_every_point_is_on_the_server_once_after_two_outages(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("o", ROOT / "benchmarks" / "tracking_outage.py")
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
                tracker.text(f"{part}.txt", "é")
                if part:
                    server.start()
        assert tracker.problems == []
        points = outage.written(tmp_path / "run")
        assert points.total() == 6000
        assert outage.found(server.uri, tmp_path / "run") == points
