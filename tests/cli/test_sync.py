"""`gspo-env sync`: what a run recorded while its tracking server was away arrives later."""

from pathlib import Path

import pytest
from support.cli_errors import refused

from gspo_env.cli.main import main
from gspo_env.tracking import MLflow, RunInfo, start
from gspo_env.tracking.mlflow import MLflowTracker

pytestmark = pytest.mark.usefixtures("quick_store")


@pytest.fixture(autouse=True)
def _folder(in_folder, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def untracked(monkeypatch):
    """A run that ended while its store was away."""
    folder = Path("run")
    folder.mkdir()

    def away(self):
        raise ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(MLflowTracker, "open", away)
        patch.setattr("gspo_env.tracking.jsonl.PATIENCE", 0.5)
        info = RunInfo(name="late", folder=folder, params={"seed": 3})
        with pytest.raises(ZeroDivisionError), start(MLflow(), info) as tracker:  # noqa: PT012
            tracker.log({"a": 1.0}, 1)
            tracker.text("episodes/step-1.txt", "hello")
            raise ZeroDivisionError("no luck")
    (problem,) = tracker.problems
    assert "1 points, 1 files and 0 traces, which wait in run: ConnectionError: away" in problem
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
    assert run.data.metrics == {"a": 1.0}
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["episodes"]
    main(["sync", str(folder)])
    assert "MLflow has everything." in capsys.readouterr().out
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"


def test_an_address_in_the_folder_is_used_only_if_the_user_names_it(monkeypatch, capsys):
    folder = untracked(monkeypatch)
    (folder / "config.toml").write_text(
        '[tracker]\nname = "mlflow"\ntracking_uri = "http://127.0.0.1:9"\n'
    )
    flag = "--tracking-uri http://127.0.0.1:9"
    assert f"add {flag} if you trust it" in refused(capsys, "sync", str(folder))
    assert "does not answer" in refused(capsys, "sync", str(folder), *flag.split())
