"""Trains while the MLflow server is killed and restarted; counts points written and points found.

    python stress/tracking_outage.py [--steps 60] [--outages 2]

The server is a real one over HTTP with an SQLite store. It is killed with SIGKILL, stays away for
some seconds, and is started again. Every line of the run's `metrics.jsonl` has to be on the server
once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Server:
    """An MLflow server in a folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._folder = folder
        self.uri = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            TimeoutError: It did not within three minutes.
        """
        store = f"sqlite:///{self._folder / 'store.db'}"
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--workers",
            "1",
        ]
        command += ["--port", str(self._port), "--backend-store-uri", store]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        self.kill()
        raise TimeoutError(f"no server at {self.uri}: {self._folder / 'server.log'}")

    def kill(self) -> None:
        """Kills the server and its workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Yields a server that runs; kills it afterwards."""
    process = Server(folder)
    process.start()
    try:
        yield process
    finally:
        process.kill()


def written(run: Path) -> Counter[tuple[str, int, int, float]]:
    """Returns name, step, time and value of each point in a run's folder."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return Counter(
        (name, line["step"], line["time"], value)
        for line in lines
        for name, value in line["metrics"].items()
    )


def received(uri: str, run: Path) -> Counter[tuple[str, int, int, float]]:
    """Returns the same of each point on the server, in all of its runs."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [e.experiment_id for e in client.search_experiments()]
    points: Counter[tuple[str, int, int, float]] = Counter()
    for each in client.search_runs(experiments):
        for name in each.data.metrics:
            history = client.get_metric_history(each.info.run_id, name)
            points.update((p.key, p.step, p.timestamp, p.value) for p in history)
    return points


def main() -> None:
    """Trains, and says what arrived; exit code 1 if that is not every point once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--outages", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as tracking:
        run = Path(name, "run")
        arguments = ["train", "--output", str(run), "--steps", str(options.steps)]
        arguments += ["--tracking-uri", tracking.uri]
        code = f"from gspo_env.cli.main import main; main({arguments!r})"
        training = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        lines, outages = run / "metrics.jsonl", options.outages
        for outage in range(outages):
            begin = (outage + draw.random()) / outages * (options.steps - 1)
            while training.poll() is None and (
                not lines.exists() or lines.read_bytes().count(b"\n") < begin
            ):
                time.sleep(0.02)
            away = 2 + 6 * draw.random()
            print(f"killed after step {begin:.0f}, away for {away:.1f} s", flush=True)
            tracking.kill()
            time.sleep(away)
            tracking.start()
        ended = training.wait(600)
        have, want = received(tracking.uri, run), written(run)
        print(
            f"exit code {ended}; {want.total():,} points written, {have.total():,} found, "
            f"{(want - have).total()} missing, {(have - want).total()} too many"
        )
    sys.exit(ended != 0 or not want or have != want)


if __name__ == "__main__":
    main()
