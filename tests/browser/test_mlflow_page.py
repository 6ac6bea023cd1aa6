"""MLflow's own page on the store of a real run: the run, its curves, artifacts and a trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

_TRAIN = (
    "--steps 2 --eval-every 1 --eval-tasks 4 --tasks-per-step 3 --group-size 3 --hidden-size 32 "
    "--recipe.demonstrations 64 --recipe.imitation-steps 60 --tracker.register policy"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """An MLflow server on the store of one run."""

    page: str
    """The address of the run."""
    name: str


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("mlflow_page")
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    env.pop("MLFLOW_TRACKING_URI", None)
    train = [sys.executable, "-m", "gspo_env", "train", *_TRAIN.split()]
    subprocess.run(train, cwd=folder, env=env, check=True, timeout=300)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--backend-store-uri", "sqlite:///mlflow.db"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health")
        yield _find(f"http://127.0.0.1:{port}")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait(address: str, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError):
            urllib.request.urlopen(address, timeout=5).close()
            return
        time.sleep(0.5)
    raise TimeoutError(address)


def _find(address: str) -> Store:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("gspo_env")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    page = f"{address}/#/experiments/{experiment.experiment_id}/runs/{run.info.run_id}"
    return Store(page=page, name=str(run.info.run_name))


def test_mlflow_shows_the_run_its_curves_its_files_and_a_trace(
    store: Store, chromium: Any, tmp_path: Path
) -> None:
    context = chromium.new_context(viewport={"width": 1500, "height": 950})
    context.set_default_timeout(90_000)
    page = context.new_page()

    def see(path: str, *texts: str) -> None:
        page.goto(store.page + path)
        for text in texts:
            page.get_by_text(text).first.wait_for()
        page.screenshot(path=tmp_path / f"{path.strip('/') or 'run'}.png")

    assert store.name.endswith("-Lookup-v0-seed0-1")
    see("", store.name, "Finished", "gspo/Lookup-v0", "version.torch", "policy")
    see("/model-metrics", "outcome")  # charts further down are drawn later
    see("/system-metrics", "cpu_utilization_percentage")
    see("/artifacts", "learning_curve.png", "view.html", "model")
    see("/traces", "tr-")
    page.get_by_text("tr-").first.click()
    page.get_by_text("turn 0").first.wait_for()
    page.wait_for_timeout(1000)
    page.screenshot(path=tmp_path / "trace.png")
    context.close()
