"""`gspo-env sync`: what a run recorded while its tracking server was away arrives later."""

from pathlib import Path

import pytest
from support.cli_errors import refused

from gspo_env.cli.main import main
from gspo_env.config import Config, to_toml
from gspo_env.tracking import MLflow, RunInfo, start
from gspo_env.trust import record

pytestmark = pytest.mark.usefixtures("quick_store")


@pytest.fixture(autouse=True)
def _folder(in_folder, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def untracked(monkeypatch, settings=None):
    """A run whose store went away after the start."""
    from mlflow.tracking import MlflowClient

    folder, settings = Path("run"), settings or MLflow()
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    config = Config(tracker=settings)
    (folder / "config.toml").write_text(to_toml(config))
    record(folder, config)

    def away(self, *arguments, **keywords):
        raise ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr("gspo_env.tracking.sinks.PATIENCE", 0.5)
        info = RunInfo(name="late", folder=folder, params={"seed": 3})
        with pytest.raises(ZeroDivisionError), start(settings, info) as tracker:  # noqa: PT012
            patch.setattr(MlflowClient, "log_batch", away)
            patch.setattr(MlflowClient, "log_text", away)
            tracker.log({"a": 1.0, "zero": 0.0}, 1)
            tracker.text("episodes/step-1.txt", "hello")
            tracker.artifact(folder / "model", "model")
            raise ZeroDivisionError("no luck")
    (problem,) = tracker.problems
    assert "2 points, 2 files and 0 traces, which wait in run: ConnectionError: away" in problem
    assert "`gspo-env sync run` sends them" in problem
    return folder


def test_a_run_that_ended_without_its_server_is_sent_later_with_its_own_times(monkeypatch, capsys):
    from mlflow.tracking import MlflowClient

    folder = untracked(monkeypatch)
    main(["sync", str(folder)])
    assert "Sent. Tracked: mlflow ui, then http" in capsys.readouterr().out
    client = MlflowClient()
    experiment = client.get_experiment_by_name("gspo_env")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("late", "FAILED")
    assert run.data.tags["error"] == "ZeroDivisionError: no luck"
    assert run.data.tags["folder"] == str(folder.absolute())
    assert run.data.params == {"seed": "3"}
    assert run.data.metrics == {"a": 1.0, "zero": 0.0}
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {"episodes", "model"}
    main(["sync", str(folder)])
    assert "The tracker has everything." in capsys.readouterr().out
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"


@pytest.mark.parametrize("register", ["policy", ""])
def test_a_run_is_sent_with_its_own_settings_to_its_own_store(monkeypatch, tmp_path, register):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'other.db'}"
    settings = MLflow(
        tracking_uri=uri, experiment="mine", register=register, log_model=bool(register)
    )
    main(["sync", str(untracked(monkeypatch, settings))])
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    paths = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert ("model" in paths) == bool(register)
    assert [v.name for v in client.search_model_versions()] == [register] * bool(register)
    assert not Path("mlflow.db").exists()


def test_a_store_that_only_the_environment_named_is_not_replaced_by_the_default(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'first.db'}")
    folder = untracked(monkeypatch)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert "first.db', and the environment names ''" in refused(capsys, "sync", str(folder))
    main(["sync", str(folder), "--tracking-uri", f"sqlite:///{tmp_path / 'first.db'}"])
    assert not Path("mlflow.db").exists()


def test_a_complete_run_is_sent_to_another_store_and_back_without_a_second_run(
    monkeypatch, tmp_path, capsys
):
    from mlflow.tracking import MlflowClient

    first, other = (f"sqlite:///{tmp_path / name}.db" for name in ("first", "other"))
    folder = str(untracked(monkeypatch, MLflow(tracking_uri=first)))
    ways = [([], "Sent."), (["--tracking-uri", other], "Sent."), (["--tracking-uri", other], "has")]
    for flags, said in [*ways, (["--tracking-uri", first], "Sent."), ([], "has everything")]:
        capsys.readouterr()
        main(["sync", folder, *flags])
        assert said in capsys.readouterr().out
    for uri in (first, other):
        client = MlflowClient(uri)
        (run,) = client.search_runs([client.get_experiment_by_name("gspo_env").experiment_id])
        assert run.data.metrics == {"a": 1.0, "zero": 0.0}
        assert len(client.get_metric_history(run.info.run_id, "a")) == 1


def test_an_address_in_the_folder_is_used_only_if_the_user_names_it(monkeypatch, capsys):
    folder = untracked(monkeypatch)
    (folder / "config.toml").write_text(
        '[tracker]\nname = "mlflow"\ntracking_uri = "http://127.0.0.1:9"\n'
    )
    flag = "--tracking-uri http://127.0.0.1:9"
    assert f"if you trust it, add {flag}" in refused(capsys, "sync", str(folder))
    assert "Connection refused" in refused(capsys, "sync", str(folder), *flag.split())
