"""What is on disk arrives at a tracker once, whatever happens to the tracker or the process."""

import json
import os
import resource
import shutil
import signal
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jails import run_python
from support.pretend_http import serve

from gspo_env.errors import OutputError
from gspo_env.tracking import MLflow, MultiTracker, NoTracker, RunInfo, Tracker, start
from gspo_env.tracking.base import Span, Trace
from gspo_env.tracking.jsonl import Received


@dataclass
class Store(Tracker):
    """A repeatable tracker that fails by a plan, before or after it has stored."""

    plan: list[str] = field(default_factory=list)
    points: set[tuple[str, int, int, float]] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    ends: list[tuple[str, str]] = field(default_factory=list)
    id: str = "first"
    traces: int = 1
    stored: dict[str, int] = field(default_factory=dict)
    points_per_call = 200

    def start(self, run):
        return self

    def log(self, metrics, step):
        raise AssertionError("points have times")

    def log_points(self, points):
        self.fail("before")
        self.points |= {(n, p.step, p.time, v) for p in points for n, v in p.metrics.items()}
        self.fail("after")

    def text(self, name, text):
        self.fail("before")
        self.texts[name] = text
        self.fail("after")

    def log_traces(self, traces):
        self.fail("before")
        self.stored |= {trace.key: trace.spans[0].end for trace in traces}
        self.fail("after")

    def artifact(self, path, folder=""):
        self.files.append(path.name)

    def finish(self, status, reason):
        self.ends.append((status, reason))

    def is_transient(self, error):
        return isinstance(error, ConnectionError)

    def fail(self, when):
        if self.plan and self.plan[0] != "works":
            if self.plan[0] == when:
                self.plan.pop(0)
                raise ConnectionError("gone")
        elif self.plan and when == "after":
            self.plan.pop(0)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    for name in ("INTERVAL", "_FIRST_PAUSE"):
        monkeypatch.setattr(f"gspo_env.tracking.sinks.{name}", 0.001)


def trace(key, end=1):
    span = Span(name="episode", kind="episode", parent=None, start=0, end=end, inputs="é\udc80")
    return Trace(key=key, name="episode", spans=(span,), tags={"step": "1"})


def tracked(folder, store=None, **info):
    """A tracker of a run in this folder."""
    return MultiTracker({"store": store or Store()}, RunInfo(name="r", folder=folder, **info))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def written(folder):
    return Counter(
        (name, line["step"], line["time"], value)
        for line in lines(folder)
        for name, value in line["metrics"].items()
    )


@settings(max_examples=25, deadline=None)
@given(
    plan=st.lists(st.sampled_from(["works", "before", "after"]), max_size=12),
    parts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_every_point_arrives_once_if_calls_fail_before_or_after_the_store_has_them(
    tmp_path_factory, plan, parts
):
    folder = tmp_path_factory.mktemp("run")
    store = Store(plan=list(plan))
    resume = None
    for part, steps in enumerate(parts):  # a run that is stopped and goes on
        with tracked(folder, store, resume=resume) as tracker:
            for step in range(steps):
                tracker.log({"a": step + part / 10, f"b{part}": 0.0}, step)
                tracker.trace(trace(f"train-{step}-0-0", end=part))
            tracker.text(f"{part}.txt", "é")
        assert tracker.problems == []
        resume = tracker.recorded
    assert tracker.ids == {"store": "first"}
    assert Counter(store.points) == written(folder)
    assert {p[:2] for p in store.points if p[0] == "a"} == {("a", s) for s in range(max(parts))}
    assert store.stored.keys() == {f"train-{step}-0-0" for step in range(max(parts))}
    assert len(store.texts) == len(parts)
    assert store.ends == [("FINISHED", "")] * len(parts)


def test_a_store_that_has_lost_the_run_gets_everything_again(tmp_path):
    info = RunInfo(name="r", folder=tmp_path)
    with MultiTracker({"store": Store()}, info) as tracker:
        tracker.log({"a": 1.0}, 1)
    again = Store(id="second")
    with tracked(tmp_path, again, resume={}) as tracker:
        tracker.log({"a": 2.0}, 2)
    assert Counter(again.points) == written(tmp_path)
    assert tracker.ids == {"store": "second"}


def test_a_resumed_run_is_cut_to_its_checkpoint_and_sends_what_it_records_again(tmp_path):
    store = Store()
    with tracked(tmp_path, store) as tracker:
        for step in range(5):
            tracker.log({"a": float(step), "zero": 0.0}, step)
            tracker.text(f"{step}.txt", "old")
            if step == 2:
                checkpoint = tracker.recorded
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time": 1, "metri')  # killed in the middle of a write
    again = Store()
    with tracked(tmp_path, again, resume=checkpoint) as tracker:
        for step in (3, 4, 5):
            tracker.log({"a": step + 100.0}, step)
            tracker.text(f"{step}.txt", "new")
    assert [line["metrics"]["a"] for line in lines(tmp_path)] == [0, 1, 2, 103, 104, 105]
    assert {point[:2] for point in again.points} == {("a", 3), ("a", 4), ("a", 5)}
    assert again.texts == {f"{step}.txt": "new" for step in (3, 4, 5)}
    assert again.ends == [("FINISHED", "")]


def test_damaged_files_of_the_queue_cost_no_point(tmp_path):
    with tracked(tmp_path) as tracker:
        tracker.log({"a": 1.0}, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 1.0}\n\0\0\0\n[]\n')
    (tmp_path / "tracking" / "store.json").write_text('{"id": "fir')
    store = Store()
    with tracked(tmp_path, store, resume={}) as again:
        again.log({"a": 2.0}, 2)
    assert again.problems == []
    assert sorted(point[:2] for point in store.points) == [("a", 1), ("a", 2)]
    for text in ("{", "7", '{"name": "r"}'):
        (tmp_path / "tracking" / "run.json").write_text(text)
        with pytest.raises(OutputError, match=r"run\.json.* is damaged"):
            tracked(tmp_path, store, resume={})


def test_a_lone_surrogate_in_the_error_of_a_run_reaches_no_store(tmp_path):
    store = Store()
    tracker = tracked(tmp_path, store)
    tracker.finish("FAILED", "no \ud800 name")
    assert store.ends == [("FAILED", "no ? name")]


def test_a_hostile_name_of_a_run_or_metric_reaches_no_store_as_it_is(tmp_path):
    class Choice(Store):
        def start(self, run):
            infos.append(run)
            return self

    infos, store = [], Choice()
    name, params = "../../\x1b[31m\ud800", {"kwargs": {"\ud800": "\udfff"}}
    for step, resume in enumerate((None, {})):
        info = RunInfo(name=name, folder=tmp_path, params=params, tags={"\ud800": "a"})
        with MultiTracker({"store": store}, replace(info, resume=resume)) as tracker:
            tracker.log({"a\ud800": 1.0}, step)
        assert tracker.problems == []
    assert {point[:2] for point in store.points} == {("a?", 0), ("a?", 1)}
    for run in infos:
        assert run.name == "../../\\x1b[31m\\ud800"
        assert "/" not in run.unique_name
        assert (run.params, run.tags) == ({"kwargs.?": "?"}, {"?": "a"})


def test_a_new_run_does_not_write_into_the_metrics_of_another(tmp_path):
    with start(NoTracker(), RunInfo(name="r", folder=tmp_path)) as tracker:
        tracker.log({"a": 1.0}, 1)
    with pytest.raises(OutputError, match="another run"):
        start(NoTracker(), RunInfo(name="r", folder=tmp_path))


def test_a_store_for_files_that_fails_does_not_keep_the_points(tmp_path, monkeypatch):
    monkeypatch.setattr("gspo_env.tracking.sinks.PATIENCE", 0.5)
    store = Store()
    monkeypatch.setattr(Store, "artifact", lambda *_: (_ for _ in ()).throw(ConnectionError("s3")))
    (tmp_path / "a.txt").write_text("a")
    with tracked(tmp_path, store) as tracker:
        tracker.log({"a": 1.0}, 1)
        tracker.artifact(tmp_path / "a.txt")
        tracker.log({"a": 2.0}, 2)
    assert Counter(store.points) == written(tmp_path)
    (problem,) = tracker.problems
    assert "0 points, 1 files and 0 traces" in problem
    assert f"gspo-env sync {tmp_path}" in problem


@pytest.mark.parametrize(
    ("method", "message"),
    [("artifact", "artifact: ValueError: refused"), ("log_traces", "traces: ValueError: refused")],
)
def test_a_call_that_the_store_refuses_is_counted_and_the_rest_arrives(
    tmp_path, monkeypatch, method, message
):
    def refuse(self, *arguments):
        raise ValueError("refused")

    monkeypatch.setattr(Store, method, refuse)
    store = Store()
    (tmp_path / "a.txt").write_text("a")
    with tracked(tmp_path, store) as tracker:
        tracker.artifact(tmp_path / "a.txt")
        tracker.trace(trace("train-1-0-0"))
        tracker.log({"a": 1.0}, 1)
    assert Counter(store.points) == written(tmp_path)
    assert store.ends == [("FINISHED", "")]
    assert f"1 call failed, the first was {message}" in tracker.problems[0]


def test_a_queue_of_a_stranger_names_no_file_outside_of_the_run(tmp_path):
    run = tmp_path / "run"
    (run / "tracking").mkdir(parents=True)
    (run / "folder").mkdir()
    (tmp_path / "secret.txt").write_text("s")
    (run / "folder" / "link").symlink_to(tmp_path / "secret.txt")
    paths = ("../secret.txt", str(tmp_path / "secret.txt"), "folder", "folder/link")
    calls = [{"name": "artifact", "arguments": {"path": path, "folder": ""}} for path in paths]
    lines = [*map(json.dumps, calls), "not json\n"]
    (run / "tracking" / "calls.jsonl").write_text("\n".join(lines))
    store = Store()
    store.is_transient = lambda error: False
    with tracked(run, store, resume={}) as tracker:
        pass
    assert store.files == []
    assert "4 calls failed" in tracker.problems[0]
    assert store.ends == [("FINISHED", "")]


@pytest.mark.parametrize("name", ["../../x.txt", "/x.txt", "a/../../../x.txt", "a\0"])
def test_a_queue_of_a_stranger_writes_nothing_outside_of_the_store(store, tmp_path, name):
    (tmp_path / "tracking").mkdir()
    lines = [{"name": "text", "arguments": {"name": n, "text": "a"}} for n in (name, "good.txt")]
    (tmp_path / "tracking" / "calls.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    with start(
        MLflow(tracking_uri=store), RunInfo(name="r", folder=tmp_path, resume={})
    ) as tracker:
        pass
    assert [*tmp_path.rglob("x.txt"), *Path.cwd().rglob("x.txt")] == []
    assert [*tmp_path.rglob("good.txt"), *Path.cwd().rglob("good.txt")] != []
    assert name == "a\0" or tracker.problems == []  # the line is skipped


@pytest.mark.parametrize("name", ["metrics.jsonl", "tracking/calls.jsonl", "tracking"])
def test_a_link_in_the_folder_of_a_run_is_refused_and_nothing_is_written(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "elsewhere" if name == "tracking" else tmp_path / "elsewhere/file")
    with pytest.raises(OutputError, match="is a link"):
        tracked(tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@contextmanager
def file_size(limit):
    """Makes writes behind this size fail, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_neither_the_run_nor_loses_points_when_there_is_room_again(
    tmp_path, caplog
):
    with start(NoTracker(), RunInfo(name="r", folder=tmp_path)) as tracker:
        tracker.log({"a": 0.0}, 0)
        with file_size((tmp_path / "metrics.jsonl").stat().st_size + 10):
            for step in range(1, 5):
                tracker.log({"a": float(step)}, step)
        tracker.log({"a": 5.0}, 5)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert tracker.problems == []
    assert caplog.text.count("the run continues") == 1


@pytest.mark.parametrize("name", ["run", "store"])
def test_a_disk_that_is_full_at_the_start_of_a_run_is_one_sentence(tmp_path, name):
    if name == "store":  # of a run that is resumed
        tracked(tmp_path).finish()
    with file_size(0), pytest.raises(OutputError, match=f"cannot write '.*/{name}.json': File too"):
        tracked(tmp_path, resume={})


@pytest.fixture(scope="module")
def store(tmp_path_factory, empty_store):
    """An SQLite store of MLflow."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_store, folder / "runs.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield f"sqlite:///{folder / 'runs.db'}"


def stored(uri, run_id):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(run_id)
    return Counter(
        (point.key, point.step, point.timestamp, point.value)
        for name in run.data.metrics
        for point in client.get_metric_history(run_id, name)
    )


KILLED = """
import os, signal, sys
from pathlib import Path
from gspo_env.tracking import MLflow, RunInfo, start
import time
tracker = start(MLflow(tracking_uri=sys.argv[1]), RunInfo(name="killed", folder=Path(sys.argv[2])))
while not tracker.ids["mlflow"]:
    time.sleep(0.01)
for step in range(500):
    tracker.log({"a": (step + 1) / 7, "b": 1.0}, step)
    time.sleep(0.002)
    if step == 300:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_points_of_a_killed_process_arrive_when_the_run_goes_on(store, tmp_path):
    ended = run_python("-c", KILLED, store, str(tmp_path))
    assert ended.returncode == -signal.SIGKILL
    first = Received.load(tmp_path, "mlflow")
    assert len(lines(tmp_path)) == 301
    assert first.metrics < (tmp_path / "metrics.jsonl").stat().st_size
    written_lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    checkpoint = {"metrics": sum(map(len, written_lines[:250]))}
    info = RunInfo(name="killed", folder=tmp_path, resume=checkpoint)
    with start(MLflow(tracking_uri=store), info) as tracker:
        for step in range(250, 310):
            tracker.log({"a": (step + 1) / 7, "b": 1.0}, step)
    assert tracker.ids == {"mlflow": first.id}
    assert len(lines(tmp_path)) == 310
    assert stored(store, first.id) >= written(tmp_path)  # MLflow keeps what was cut, too


def test_a_run_whose_process_was_killed_before_it_kept_the_id_is_found_again(store, tmp_path):
    from mlflow.tracking import MlflowClient

    settings, info = MLflow(tracking_uri=store), RunInfo(name="r", folder=tmp_path, params={"p": 1})
    with start(settings, info) as first:
        first.log({"a": 1.0}, 1)
    (tmp_path / "tracking" / "mlflow.json").unlink()
    with start(settings, replace(info, resume={})) as again:
        again.log({"a": 2.0}, 2)
    assert again.ids == first.ids
    run = MlflowClient(tracking_uri=store).get_run(again.ids["mlflow"])
    assert (run.data.params, run.data.metrics) == ({"p": "1"}, {"a": 2.0})


STORED_RUN = {
    "experiment": {"experiment_id": "1", "name": "a"},
    "run": {
        "info": {
            **{"run_id": "a" * 32, "run_uuid": "a" * 32, "experiment_id": "1"},
            **{"status": "RUNNING", "artifact_uri": "mlflow-artifacts:/1"},
        },
        "data": {},
    },
}
"""What a server answers about the run."""


def test_a_server_that_hangs_ends_neither_the_run_nor_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setattr("gspo_env.tracking.sinks.PATIENCE", 0.5)
    hung, release = threading.Event(), threading.Event()

    def hang(handler):
        handler.body()
        if handler.path.endswith("log-batch"):
            hung.set()
            release.wait(60)
        handler.answer(STORED_RUN)

    with serve(do_GET=hang, do_POST=hang) as uri:
        with start(MLflow(tracking_uri=uri), RunInfo(name="r", folder=tmp_path)) as tracker:
            tracker.log({"a": 1.0, "b": 2.0}, 1)
            assert hung.wait(60)
        release.set()
    (problem,) = tracker.problems
    assert "has not received 2 points" in problem
    assert len(lines(tmp_path)) == 1


def test_the_files_of_the_queue_can_be_read_by_their_owner_alone(tmp_path):
    with tracked(tmp_path) as tracker:
        tracker.text("a.txt", "x")
    for path in (tmp_path / "tracking").iterdir():
        assert os.stat(path).st_mode & 0o077 == 0, path


def test_the_points_of_many_steps_are_few_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("gspo_env.tracking.sinks.INTERVAL", 600.0)
    calls: list[int] = []

    class Counts(Store):
        def log_points(self, points):
            super().log_points(points)
            calls.append(len(points))

    with tracked(tmp_path, Counts()) as tracker:
        for step in range(40):
            tracker.log({"a": 1.0}, step)
    assert sum(calls) == 40
    assert len(calls) <= 2  # one at the start, one at the end


def test_more_episodes_become_traces_while_they_cost_little(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("gspo_env.tracking.multi.time.monotonic", lambda: now)
    with MultiTracker({"none": NoTracker()}, RunInfo(name="r", folder=tmp_path)) as untracked:
        now += 100
        assert untracked.traces("eval") == 0
    (tmp_path / "run").mkdir()
    with MultiTracker({"s": Store()}, RunInfo(name="r", folder=tmp_path / "run")) as tracker:
        assert (tracker.traces("train"), tracker.traces("eval")) == (0, 1)
        now += 100.0
        assert tracker.traces("train") == 20  # 0.2 % of 100 s at 10 ms each
        for n in range(20):
            tracker.trace(trace(f"train-0-0-{n}"))
        assert (tracker.traces("train"), tracker.traces("eval")) == (0, 1)
