"""A real MLflow server that is killed and restarted during a run; `pytest -m trackers`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from gspo_env.tracking import MLflow, RunInfo, Span, Trace, start

pytestmark = pytest.mark.trackers


class Server:
    """An MLflow server over HTTP with an SQLite store."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.uri, self._folder = f"http://127.0.0.1:{port}", folder
        self._command = [
            *(sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)),
            *("--backend-store-uri", f"sqlite:///{folder / 'store.db'}"),
            *("--artifacts-destination", str(folder / "artifacts")),
        ]

    def start(self):
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self._folder / "server.log").read_text()
                time.sleep(0.1)

    def kill(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


def trace(step):
    span = Span(name="episode", kind="episode", parent=None, start=10**18, end=10**18 + 10**9)
    return Trace(key=f"train-{step}-0-0", name="one", spans=(span,), tags={"step": str(step)})


def test_every_point_and_trace_is_on_the_server_once_after_two_outages(server, tmp_path):
    from mlflow.tracking import MlflowClient

    (tmp_path / "run").mkdir()
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
    client = MlflowClient(server.uri)
    run = client.get_run(tracker.ids["mlflow"])
    for i in range(20):
        history = client.get_metric_history(run.info.run_id, f"m{i}")
        points = [(point.step, point.value) for point in history]
        assert points == [(step, step / (i + 1)) for step in range(300)]
    traces = client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    assert sorted(int(trace.info.tags["step"]) for trace in traces) == list(range(0, 300, 10))
    assert all(len(trace.data.spans) == 1 for trace in traces)
