import contextlib
import math
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2
from mlflow.tracking import MlflowClient
from support.pretend_http import serve
from support.turns import episode, turn

from gspo_agents.traces import traces
from gspo_env.errors import ConfigError
from gspo_env.files import MODEL
from gspo_env.tracking.base import SUMMARY, Input, RunInfo
from gspo_env.tracking.jsonl import Received
from gspo_env.tracking.mlflow import MLflow
from gspo_env.tracking.multi import NON_FINITE, start
from gspo_env.types import Group, StepInfo, Task, Timing


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with MLflow's default store; shared, since making one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for name in ("TRACKING_URI", "EXPERIMENT_NAME", "EXPERIMENT_ID", "RUN_ID"):
            patch.delenv(f"MLFLOW_{name}", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield path


@pytest.fixture
def begin(folder, tmp_path):
    """Starts a run; `params`, `tags` and so on belong to it."""

    def start_run(settings=None, **changes):
        info = RunInfo(**{"name": "first", "folder": tmp_path, **changes})
        return start(settings or MLflow(), info)

    return start_run


def recorded(folder):
    """What the store has of the run in a folder."""
    return MlflowClient().get_run(Received.load(folder, "mlflow").id)


def read_artifact(folder, name):
    path = MlflowClient().download_artifacts(recorded(folder).info.run_id, name)
    return Path(path).read_text(encoding="utf-8")


def test_a_run_is_visible_with_the_default_store(folder, begin, tmp_path):
    params = {"learner": {"rate": 1e-5}, "long": "x" * 7000, "odd:key": {"none": None}, "empty": {}}
    with begin(MLflow(experiment="default-store"), params=params, tags={"kind": "test"}) as tracker:
        tracker.log({"train/loss": 0.5, "eval/success": 1}, step=1)
        tracker.log({"train/loss": 0.25, "odd:é": math.nan}, step=2)
        tracker.text("episodes/step-1.txt", "héllo")
    assert (folder / "mlflow.db").is_file()
    assert (folder / "mlruns").is_dir()
    place = f"{recorded(tmp_path).info.experiment_id}/runs/{tracker.ids['mlflow']}"
    address = f"http://127.0.0.1:5000/#/experiments/{place}?workflowType=machine_learning"
    assert tracker.how_to_look == f"mlflow ui, then {address}"
    assert tracker.problems == []
    run = recorded(tmp_path)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.tags["kind"] == "test"
    assert run.data.params["learner.rate"] == "1e-05"
    assert run.data.params["odd_key.none"] == "None"
    assert run.data.params["empty"] == "{}"
    assert len(run.data.params["long"]) == 6000
    assert run.data.metrics == {"train/loss": 0.25, NON_FINITE: 1.0, "eval/success": 1.0}
    history = MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]
    assert read_artifact(tmp_path, "episodes/step-1.txt") == "héllo"


@pytest.mark.parametrize("log_model", [True, False])
def test_files_and_folders_become_artifacts_and_the_model_where_it_is_wanted(
    begin, tmp_path, log_model
):
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


def test_a_run_is_resumed_and_a_run_of_a_comparison_names_its_parent(begin, tmp_path):
    (tmp_path / "child").mkdir()
    parent = begin(name="parent", params={"a": 1})
    parent.finish()
    first = recorded(tmp_path)
    with begin(name="parent", params={"a": 2}, resume={}) as again:
        pass
    begin(MLflow(run_name="all"), name="child", folder=tmp_path / "child", parent=tmp_path).finish()
    assert again.ids == {"mlflow": first.info.run_id}
    assert again.problems == []
    run, child = recorded(tmp_path), recorded(tmp_path / "child")
    assert (run.info.run_id, run.info.status) == (first.info.run_id, "FINISHED")
    assert run.data.params == {"a": "1"}
    assert child.data.tags["mlflow.parentRunId"] == run.info.run_id
    assert child.info.run_name == "child"


def test_a_folder_that_names_the_run_of_another_training_gets_its_own(begin, tmp_path):
    begin(params={"a": 1}).finish()
    first, folder = recorded(tmp_path), tmp_path / "other"
    folder.mkdir()
    (folder / "tracking").mkdir()
    Received(id=first.info.run_id).save(folder, "mlflow")
    with begin(name="other", key="other", folder=folder, resume={}, params={"b": 2}) as tracker:
        tracker.log({"train/loss": 1.0}, 1)
    assert recorded(folder).info.run_id != first.info.run_id
    again = MlflowClient().get_run(first.info.run_id)
    assert again.to_dictionary() == first.to_dictionary()


NAMES = (
    "",
    ".",
    "..",
    "/abs",
    "../../up",
    "a//b",
    "a/./b",
    "a/../b",
    "a/",
    "é" * 300,
    "=cmd|'$a$'",
    "\0",
)


def test_a_name_that_is_no_plain_path_costs_no_other_metric(begin, tmp_path):
    names = dict.fromkeys(NAMES, 1.0)
    params = {"kwargs": dict.fromkeys(NAMES, 1)}
    with begin(params=params, tags=dict.fromkeys(NAMES, "1")) as tracker:
        tracker.log({"fine": 1.0, "a/.b/c..": 1.0, **names}, 1)
    assert tracker.problems == []
    metrics = recorded(tmp_path).data.metrics
    assert {"fine", "a/.b/c..", "_", "_/_/up", "_abs", "a_/b"} < metrics.keys()
    assert len(metrics) >= 10


def test_a_text_in_the_place_of_a_folder_holds_nothing_back(begin, tmp_path):
    with begin() as tracker:
        tracker.text("a/b", "folder")
        tracker.text("a", "file")
        tracker.text("a/b/c", "below")
        tracker.text("d", "fine")
    assert "2 calls failed" in tracker.problems[0]
    assert read_artifact(tmp_path, "d") == "fine"


@pytest.mark.parametrize("error_code", ["TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR"])
def test_first_zeros_arrive_although_the_store_fails_once(begin, tmp_path, monkeypatch, error_code):
    monkeypatch.setattr("gspo_env.tracking.sinks.INTERVAL", 0.01)
    send, failed = MlflowClient.log_batch, threading.Event()

    def fail_once(self, run_id, metrics=(), **others):
        if not failed.is_set() and any(metric.value for metric in metrics):
            failed.set()
            raise MlflowException("503", getattr(databricks_pb2, error_code))
        send(self, run_id, metrics=metrics, **others)

    with begin() as tracker:
        monkeypatch.setattr(MlflowClient, "log_batch", fail_once)
        for step, errors in enumerate((0, 0, 2, 0)):
            tracker.log({"eval/success": 0, "eval/env_errors": errors}, step)
        assert failed.wait(60)
    assert tracker.problems == []
    run, client = recorded(tmp_path), MlflowClient()
    assert run.data.metrics == {"eval/success": 0, "eval/env_errors": 0}
    history = client.get_metric_history(run.info.run_id, "eval/env_errors")
    points = [(point.step, point.value) for point in history]
    assert points == [(0, 0), (1, 0), (2, 2), (3, 0)]


def test_the_summary_is_the_description_and_a_new_experiment_is_marked_as_training(begin, tmp_path):
    with begin(MLflow(experiment="marked")) as tracker:
        tracker.text(SUMMARY, "Success: 75 %")
    run, experiment = recorded(tmp_path), MlflowClient().get_experiment_by_name("marked")
    assert run.data.tags["mlflow.note.content"] == "Success: 75 %"
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.parametrize("settings", [{}, {"experiment": "from-the-settings"}])
@pytest.mark.parametrize("by", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_the_experiment_of_the_environment_is_taken_unless_the_settings_name_one(
    begin, tmp_path, monkeypatch, settings, by
):
    client = MlflowClient()
    experiment = client.get_experiment_by_name("from-the-environment")
    number = experiment.experiment_id if experiment else None
    number = number or client.create_experiment("from-the-environment")
    monkeypatch.setenv(by, number if by.endswith("ID") else "from-the-environment")
    begin(MLflow(**settings)).finish()
    name = client.get_experiment(recorded(tmp_path).info.experiment_id).name
    assert name == settings.get("experiment", "from-the-environment")


def test_the_run_of_the_environment_is_continued_by_one_training_only(begin, tmp_path, monkeypatch):
    client = MlflowClient()
    mine = client.create_run(client.create_experiment("pipeline"), run_name="mine")
    client.log_param(mine.info.run_id, "data", "v1")
    monkeypatch.setenv("MLFLOW_RUN_ID", mine.info.run_id)
    (tmp_path / "child").mkdir()
    with begin(params={"a": 1}, tags={"env": "x"}) as tracker:
        tracker.log({"train/loss": 1.0}, 1)
    begin(name="child", folder=tmp_path / "child", parent=tmp_path).finish()
    (tmp_path / "second").mkdir()
    begin(name="second", folder=tmp_path / "second", params={"a": 2}).finish()
    run = recorded(tmp_path)
    assert (run.info.run_id, run.info.run_name) == (mine.info.run_id, "mine")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"data": "v1", "a": "1"}
    assert (run.data.tags["env"], run.data.metrics) == ("x", {"train/loss": 1.0})
    for folder in ("child", "second"):
        assert recorded(tmp_path / folder).info.run_name == folder


@pytest.mark.parametrize("value", ["77", "abc", "deleted"])
@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"])
def test_an_id_of_the_environment_that_the_store_lacks_is_refused_before_training(
    begin, monkeypatch, variable, value
):
    client = MlflowClient()
    if value == "deleted":
        experiment = client.get_experiment_by_name("removed")
        value = experiment.experiment_id if experiment else client.create_experiment("removed")
        if not experiment:
            client.delete_experiment(value)
        if variable == "MLFLOW_RUN_ID":
            value = client.create_run(client.create_experiment("kept")).info.run_id
            client.delete_run(value)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"MLflow cannot open: .*{value}.*--tracker none"):
        begin()


@pytest.fixture
def pipeline(folder, monkeypatch):
    """A store with a named experiment, and a function that makes the run `MLFLOW_RUN_ID` in it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    client = MlflowClient()

    def make(experiment="pipeline steps"):
        stored = client.get_experiment_by_name(experiment)
        number = stored.experiment_id if stored else client.create_experiment(experiment)
        run = client.create_run(number, run_name="mine")
        monkeypatch.setenv("MLFLOW_RUN_ID", f" {run.info.run_id} ")
        return client, run.info.run_id

    return make


def test_a_run_of_the_environment_that_refuses_a_parameter_stays_as_it_was(begin, pipeline):
    client, run_id = pipeline()
    client.log_param(run_id, "seed", "7")
    client.set_terminated(run_id, "FAILED")
    before = client.get_run(run_id).to_dictionary()
    for _ in range(2):
        with pytest.raises(ConfigError, match="'seed', 'old_value': '7', 'new_value': '1'"):
            begin(params={"seed": 1}, tags={"env": "x"})
        assert client.get_run(run_id).to_dictionary() == before


def test_a_deleted_run_of_the_environment_is_refused_with_the_command_that_restores_it(pipeline):
    client, run_id = pipeline()
    client.delete_run(run_id)
    with pytest.raises(ConfigError, match=f"was deleted; .*mlflow runs restore --run-id {run_id}"):
        MLflow().check()
    client, run_id = pipeline("removed later")
    number = client.get_run(run_id).info.experiment_id
    client.delete_experiment(number)
    with pytest.raises(ConfigError, match=f"mlflow experiments restore -x {number}"):
        MLflow().check()
    client.restore_experiment(number)
    MLflow().check()


def test_a_run_of_the_environment_and_another_experiment_of_the_settings_contradict(
    begin, tmp_path, pipeline, monkeypatch
):
    client, run_id = pipeline()
    with pytest.raises(ConfigError, match=r"run of the experiment 'pipeline steps'.*'elsewhere'"):
        MLflow(experiment="elsewhere").check()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "elsewhere")
    MLflow(experiment="pipeline steps").check()
    begin().finish()
    (tmp_path / "child").mkdir()
    begin(name="child", folder=tmp_path / "child", parent=tmp_path).finish()
    parent, child = recorded(tmp_path).info, recorded(tmp_path / "child").info
    assert parent.run_id == run_id
    assert parent.experiment_id == child.experiment_id  # MLflow nests runs of one experiment only
    assert client.get_experiment_by_name("elsewhere") is None


def test_a_finished_run_of_another_training_is_left_and_said(begin, tmp_path, pipeline, caplog):
    client, run_id = pipeline()
    begin(params={"seed": 1}).finish()
    before = client.get_run(run_id).to_dictionary()
    (tmp_path / "second").mkdir()
    with begin(folder=tmp_path / "second", params={"seed": 2}) as tracker:
        tracker.log({"train/loss": 1.0}, 1)
    assert f"MLFLOW_RUN_ID is '{run_id}', the run of another training" in caplog.text
    assert client.get_run(run_id).to_dictionary() == before
    resumed = begin(folder=tmp_path / "second", resume=tracker.recorded)
    resumed.finish()
    assert resumed.ids == tracker.ids != {"mlflow": run_id}


@pytest.mark.parametrize("by", ["name", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(begin, monkeypatch, by):
    client = MlflowClient()
    experiment = client.get_experiment_by_name("thrown away")
    number = experiment.experiment_id if experiment else client.create_experiment("thrown away")
    if not experiment:
        client.delete_experiment(number)
    if by != "name":
        monkeypatch.setenv(by, number if by.endswith("ID") else "thrown away")
    named = MLflow(experiment="thrown away" if by == "name" else "")
    words = rf"'thrown away' was deleted; .*mlflow experiments restore -x {number}.*experiment"
    with pytest.raises(ConfigError, match=words):
        begin(named)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    with pytest.raises(ConfigError, match=words):
        named.check()


def test_an_experiment_that_is_deleted_while_a_run_records_is_named_and_misses_nothing_later(
    begin, tmp_path, monkeypatch
):
    monkeypatch.setattr("gspo_env.tracking.sinks.PATIENCE", 0.5)
    client = MlflowClient()
    settings = MLflow(experiment="short-lived")
    with begin(settings) as tracker:
        tracker.log({"train/loss": 1.0}, 1)
        number = recorded(tmp_path).info.experiment_id
        client.delete_experiment(number)
        tracker.log({"train/loss": 2.0}, 2)
    (problem,) = tracker.problems
    assert "deleted" in problem
    client.restore_experiment(number)
    begin(settings, resume=tracker.recorded).finish()
    history = client.get_metric_history(tracker.ids["mlflow"], "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 2.0)]


def test_a_named_experiment_makes_the_id_of_the_environment_irrelevant(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    MLflow(experiment="named").check()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named")
    MLflow().check()


def played():
    """An episode of two turns, the first of which calls a tool."""
    call = '<tool_call>\n{"name": "lookup", "arguments": {"key": "ant"}}\n</tool_call>'
    turns = tuple(
        turn(
            text=text,
            observation=observation,
            reward=reward,
            info=StepInfo(observation_role="tool"),
            timing=Timing(generate=0.5, step=0.25, began=1000.0 + k),
        )
        for k, (text, observation, reward) in enumerate(
            [(call, "start \ud800", 0.25), ("answer sk-abcdefghijklmnopqrstuvwxyz", "bee", 1.0)]
        )
    )
    task = Task(env_id="gspo/Lookup-v0", seed=7)
    return episode(*turns, task=task, success=True, final_observation="end")


def test_an_episode_is_a_trace_with_its_turns_tool_calls_tokens_times_and_tags(begin, tmp_path):
    group = Group(task=played().task, episodes=(played(), played()))
    with begin() as tracker:
        for trace in traces(3, "train", {5: group}, 2):
            tracker.trace(trace)
            tracker.trace(trace)
    assert tracker.problems == []
    run = recorded(tmp_path)
    stored = MlflowClient().search_traces(
        locations=[run.info.experiment_id],
        run_id=run.info.run_id,
        filter_string="tags.success = 'true' and tags.step = '3' and tags.phase = 'train'",
    )
    assert len(stored) == 2
    assert (stored[0].info.request_time, stored[0].info.execution_duration) == (1_000_000, 1750)
    spans = stored[0].data.spans
    attributes = {name: spans[0].get_attribute(name) for name in ("return", "group", "stop")}
    assert attributes == {"return": "1.25", "group": "train-3-5", "stop": "terminated"}
    assert [(s.name, s.span_type) for s in spans] == [
        *(("episode", "AGENT"), ("turn 0", "CHAT_MODEL"), ("lookup", "TOOL")),
        *(("turn 1", "CHAT_MODEL"), ("step", "TOOL")),
    ]
    ids = [s.span_id for s in spans]
    assert [s.parent_id for s in spans] == [None, ids[0], ids[1], ids[0], ids[3]]
    assert [(s.start_time_ns, s.end_time_ns) for s in spans[3:]] == [
        (1001 * 10**9, 1001_750_000_000),
        (1001_500_000_000, 1001_750_000_000),
    ]
    assert spans[2].inputs == {"key": "ant"}
    assert spans[2].outputs == {"observation": "bee", "reward": 0.25}
    usage = spans[3].get_attribute("mlflow.chat.tokenUsage")
    assert usage == {"input_tokens": 8, "output_tokens": 2, "total_tokens": 10}
    assert spans[3].get_attribute("mean_logprob") == -1.0
    assert spans[3].outputs["messages"][0]["content"] == "answer [redacted]"
    assert spans[1].inputs["messages"][0]["content"] == "start \\ud800"


def test_inputs_are_recorded_once_and_the_model_becomes_a_version_once(begin, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    source = {"env": "gspo/Lookup-v0", "arguments": {"api_key": "secret"}}
    data = Input(name="gspo/Lookup-v0", digest="1234", context="training", source=source)
    with begin(MLflow(register="policy")) as tracker:
        for _ in range(2):
            tracker.input(data)
            tracker.artifact(tmp_path / "model", MODEL)
    assert tracker.problems == []
    run = recorded(tmp_path)
    (stored,) = run.inputs.dataset_inputs
    assert (stored.dataset.name, stored.dataset.digest) == ("gspo/Lookup-v0", "1234")
    assert "secret" not in stored.dataset.source
    assert [tag.value for tag in stored.tags] == ["training"]
    (version,) = MlflowClient().search_model_versions("name = 'policy'")
    assert version.run_id == run.info.run_id


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"register": "policy", "log_model": False}, "log_model is false"),
        ({"register": "a/b"}, "a name without / and :"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        MLflow(**settings)


@contextlib.contextmanager
def answering(serve):
    """The address of a server that does this with its one request."""

    def work():
        listener.accept()[0].close()  # the look whether a server is there
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=work)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 nope\r\n\r\n", b"\0" * 70_000]
)
def test_an_address_that_speaks_no_http_is_refused_in_one_sentence(answer):
    def serve(connection):
        connection.recv(1000)
        connection.sendall(answer)

    refused = pytest.raises(ConfigError, match="which MLflow cannot open: API request to")
    with answering(serve) as uri, refused:
        MLflow(tracking_uri=uri).check()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nX", b"HTTP/1.1 200 OK\r\n", b"H"],
)
def test_an_answer_that_never_ends_is_refused(answer, monkeypatch):
    def serve(connection):
        connection.sendall(answer)
        while not refused.wait(0.05):
            connection.sendall(answer if answer.endswith(b"\r\n\r\n") else b"a")

    monkeypatch.setattr("gspo_env.tracking.mlflow.OPENING", 0.5)
    refused = threading.Event()
    with answering(serve) as uri:
        with pytest.raises(ConfigError, match=r"no answer within 0\.5 seconds"):
            MLflow(tracking_uri=uri).check()
        refused.set()


def test_a_store_in_a_file_has_longer_to_open_than_a_server(begin, folder, monkeypatch):
    monkeypatch.setattr("gspo_env.tracking.mlflow.OPENING", 0.01)  # its tables take longer
    begin().finish()
    assert (folder / "mlflow.db").is_file()


@pytest.mark.parametrize("address", ["{}", "file://{}", "{}/sub/.."])
def test_a_server_names_no_folder_of_the_user(tmp_path, monkeypatch, address):
    mine = tmp_path / "mine" / "model" / "precious.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    home = address.format(tmp_path / "mine")
    run = {"run_id": "a" * 32, "run_uuid": "a" * 32, "experiment_id": "1", "artifact_uri": home}
    answer = {"experiment": {"experiment_id": "1", "name": "a"}, "runs": []}
    answer["run"] = {"info": {**run, "status": "RUNNING"}, "data": {}}
    monkeypatch.setattr("gspo_env.tracking.sinks.PATIENCE", 1.0)
    (tmp_path / "run" / "model").mkdir(parents=True)

    def reply(handler):
        handler.body()
        handler.answer(answer)

    info = RunInfo(name="run", folder=tmp_path / "run")
    refused = pytest.raises(ConfigError, match="expected a folder RUN_ID/artifacts")
    with serve(do_GET=reply, do_POST=reply) as uri, refused:
        start(MLflow(tracking_uri=uri), info)
    assert mine.read_text() == "mine"


def test_what_a_server_sends_does_not_act_on_the_terminal(capfd):
    hostile = {"error_code": "\x1b[31m", "message": "\x1b[2J\u202e"}
    refused = pytest.raises(ConfigError, match=r"31m|2J")
    with serve(do_GET=lambda handler: handler.answer(hostile, 400)) as uri, refused as caught:
        MLflow(tracking_uri=uri).check()
    shown = f"{caught.value}{''.join(capfd.readouterr())}"
    assert not {"\x1b", "\u202e"} & set(shown)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["", "sqlite:///store.db"])
def test_runs_that_start_at_the_same_time_share_a_new_store(in_folder, address):
    program = (
        "import sys, pathlib, mlflow.tracking\n"
        "from gspo_env.tracking.mlflow import MLflow\n"
        "from gspo_env.tracking.base import RunInfo\n"
        "folder = pathlib.Path(sys.argv[1]); folder.mkdir()\n"
        "print('ready', flush=True); sys.stdin.read()\n"
        f"MLflow(tracking_uri={address!r}).start(RunInfo(name='run', folder=folder))\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    runs = [
        subprocess.Popen([sys.executable, "-c", program, f"run-{n}"], **pipes) for n in range(3)
    ]
    for run in runs:
        assert run.stdout.readline() == b"ready\n"
    for run in runs:
        run.stdin.close()
    faults = [run.stderr.read().decode() for run in runs]
    assert [run.wait(120) for run in runs] == [0, 0, 0], "\n".join(faults)
