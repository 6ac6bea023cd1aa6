"""The adapters over the real libraries, offline; run with `pytest -m trackers`."""

import struct
import time

import pytest

from gspo_env.config import Config
from gspo_env.tracking import NoTracker, RunInfo, TensorBoard, Trackio, WandB, combine, start
from gspo_env.tracking.multi import NON_FINITE

pytestmark = pytest.mark.trackers


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """Trackio's folder, which it reads when it is imported, and no calls home."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.chdir(folder)
        yield folder


def record(choice, folder, name="a run, é", **more):
    """A run with everything that a tracker can be given."""
    (folder / "out" / "model").mkdir(parents=True, exist_ok=True)
    (folder / "out" / "model" / "weights.txt").write_text("1")
    (folder / "out" / "config.toml").write_text("a = 1")
    picture(folder / "out" / "curve.png")
    info = RunInfo(
        name=name,
        folder=folder / "out",
        params={"learner": {"rate": 1e-5, "none": None, "list": [1, 2]}},
        tags={"env": "gspo/Lookup-v0"},
        **more,
    )
    with start(choice, info) as tracker:
        for step in range(3):
            tracker.log({"train/loss": step / 2, "näme, odd": 1.0, "x": float("nan")}, step)
            tracker.text(f"episodes/step {step}.txt", f"héllo\n*{step}*")
        tracker.log({f"m/{i}": float(i) for i in range(10_000)}, step=3)
        tracker.artifact(folder / "out" / "curve.png")
        tracker.artifact(folder / "out" / "config.toml")
        tracker.artifact(folder / "out" / "model", "model")
    assert tracker.problems == []
    return tracker


def picture(path):
    from matplotlib.figure import Figure

    Figure().savefig(path)


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    read.Reload()
    return read


def test_tensorboard_reads_back_curves_texts_and_pictures(tmp_path):
    tracker = record(TensorBoard(), tmp_path)
    read = events(tmp_path / "out")
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(0, 0), (1, 0.5), (2, 1)]
    assert read.Scalars(NON_FINITE)[0].value == 1
    assert len(read.Tags()["scalars"]) == 10_003
    assert read.Tags()["images"] == ["curve"]

    def text(name):
        return read.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()

    assert "| learner.rate | 1e-05 |" in text("params")
    assert "| env | gspo/Lookup-v0 |" in text("params")
    assert text("episodes/step 2.txt") == "    héllo\n    *2*"
    assert text("status") == "FINISHED"
    assert tracker.how_to_look == f"tensorboard --logdir {tmp_path / 'out'}"


@pytest.mark.parametrize("choice", [TensorBoard(), WandB(mode="offline"), Trackio(project="again")])
def test_a_run_goes_on_in_the_same_run_of_the_tracker(tmp_path, choice):
    first = start(choice, RunInfo(name="on", folder=tmp_path))
    checkpoint = first.recorded
    first.log({"x": 1.0}, 1)
    first.finish("KILLED")
    second = start(choice, RunInfo(name="on", folder=tmp_path, resume=checkpoint))
    second.log({"x": 1.0}, 1)
    second.log({"x": 2.0}, 2)
    second.finish()
    assert first.problems == second.problems == []
    assert first.ids == second.ids
    if isinstance(choice, TensorBoard):
        assert [(e.step, e.value) for e in events(tmp_path).Scalars("x")] == [(1, 1), (2, 2)]
    if isinstance(choice, Trackio):
        from trackio.sqlite_storage import SQLiteStorage

        rows = SQLiteStorage.get_logs("again", first.ids["trackio"])
        points = [(row["step"], row["x"]) for row in rows if "x" in row]
        assert sorted(set(points)) == [(1, 1.0), (2, 2.0)]  # it keeps what was cut, too


def test_trackio_stores_a_run_and_runs_of_a_comparison_as_a_group(tmp_path):
    from trackio.sqlite_storage import SQLiteStorage

    tracker = record(Trackio(project="trk"), tmp_path)
    assert tracker.how_to_look == "trackio show --project trk"
    other = record(Trackio(project="trk"), tmp_path / "b", name="child", parent=tmp_path)
    name = tracker.ids["trackio"]
    assert name.startswith("a run, é-")
    rows = SQLiteStorage.get_logs("trk", name)
    loss = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert loss == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert any(row.get("m/9999") == 9999 for row in rows)
    assert any(row.get("status", {}).get("_value") == "FINISHED" for row in rows)
    assert any("héllo" in str(row.get("episodes/step 1.txt")) for row in rows)
    config = SQLiteStorage.get_run_config("trk", name)
    assert (config["learner.rate"], config["env"]) == (1e-5, "gspo/Lookup-v0")
    child = SQLiteStorage.get_run_config("trk", other.ids["trackio"])
    assert child["_Group"] == tmp_path.name


def test_wandb_writes_a_run_that_can_be_synced(tmp_path):
    tracker = record(WandB(mode="offline"), tmp_path)
    (folder,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    assert tracker.how_to_look == f"wandb sync {folder}"
    files = folder / "files"
    assert (files / "episodes" / "step 2.txt").read_text() == "héllo\n*2*"
    assert (files / "config.toml").read_text() == "a = 1"
    assert (files / "curve.png").exists()
    records = ended(next(folder.glob("*.wandb")))
    losses = [float(v) for r in records for k, v in history(r) if k == "train/loss"]
    assert losses == [0.0, 0.5, 1.0]
    kinds = [record.WhichOneof("record_type") for record in records]
    assert "artifact" in str(kinds) or "request" in kinds
    assert exit_codes(records) == [0]


def history(record):
    for item in record.history.item:
        yield item.key or item.nested_key[0], item.value_json


def ended(path):
    """The records of a run's file, as soon as the process that writes it has written its end."""
    end = time.monotonic() + 60.0
    while not exit_codes(records := read_wandb(path)) and time.monotonic() < end:
        time.sleep(0.1)
    return records


def exit_codes(records):
    return [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"]


def read_wandb(path):
    """The records of a run's file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, part, records = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (rest := 32768 - place % 32768) < 7:  # a block's padding
            place += rest
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if place > len(data):  # it is being written
            break
        if kind in (1, 4):  # a whole record, or its last part
            records.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return records


@pytest.mark.parametrize(("status", "code"), [("FAILED", 1), ("KILLED", 255)])
def test_wandb_ends_a_failed_run_with_an_exit_code(tmp_path, status, code):
    info = RunInfo(name="bad", folder=tmp_path)
    start(WandB(mode="offline"), info).finish(status)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert exit_codes(ended(path)) == [code]


def test_a_comparison_keeps_its_parent_open_while_its_runs_are_recorded(tmp_path):
    from gspo_env.compare import Arm, PlannedRun, read
    from gspo_env.compare.runner import Recorder

    (tmp_path / "run").mkdir()
    with start(NoTracker(), RunInfo(name="one", folder=tmp_path / "run")) as worker:
        worker.log({"x": 1.0}, 0)
    picture(tmp_path / "curve.png")
    choice = combine("tensorboard,trackio,wandb")(wandb=WandB(mode="offline"))
    (tmp_path / "run" / "model").mkdir()
    run = PlannedRun(
        problem="Lookup",
        arm=Arm(name="one", changes={}),
        seed=0,
        config=Config(),
        start=None,
        folder=tmp_path / "run",
    )
    problems: list[str] = []
    for _ in range(2):
        with Recorder(choice, tmp_path, {"seeds": 1}, problems.append) as recorder:
            recorder.child(read(run))
            recorder.artifact(tmp_path / "curve.png")
    assert problems == []
    assert len(events(tmp_path / "run").Scalars("x")) == 1
    assert events(tmp_path).Tags()["images"] == ["curve"]
