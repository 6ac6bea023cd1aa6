"""`gspo-env sync`."""

from __future__ import annotations

from pathlib import Path

import tyro

from gspo_env.errors import ConfigError, OutputError, TrackingError
from gspo_env.files import check_folder
from gspo_env.settings import settings


@settings
class Sync:
    """Send to MLflow what a run recorded while its tracking server was away."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of a run that has ended."""
    tracking_uri: str = ""
    """The store; empty is MLflow's default: `MLFLOW_TRACKING_URI`, else ./mlflow.db."""
    experiment: str = ""
    """The experiment; by default that of the run."""

    def run(self) -> None:
        """Sends what is missing.

        Raises:
            OutputError: The folder is none of a run that was tracked.
            ConfigError: The store does not answer, or is another than the run's.
            TrackingError: Something could not be sent.
        """
        from gspo_env.tracking.base import RunInfo
        from gspo_env.tracking.jsonl import DESCRIPTION, Received
        from gspo_env.tracking.mlflow import MLflow
        from gspo_env.tracking.multi import MultiTracker

        folder = Path(self.folder)
        if not self.folder or not (folder / DESCRIPTION).exists():
            raise OutputError(
                f"folder is {self.folder!r}; expected a run that was tracked, such as runs/NAME"
            )
        check_folder(folder)
        settings = _settings(folder)
        experiment = self.experiment or str(settings.get("experiment", "gspo_env"))
        choice = MLflow(experiment=experiment, tracking_uri=self.tracking_uri)
        recorded = str(settings.get("tracking_uri", ""))
        if recorded and not choice.address:  # an address in a folder may be a stranger's
            raise ConfigError(
                f"the run is tracked at {recorded!r}; add --tracking-uri {recorded} if you trust it"
            )
        if Received.load(folder, "mlflow").is_complete(folder):
            print("MLflow has everything.")
            return
        choice.check()
        info = RunInfo(name=folder.name, folder=folder, resume={"mlflow": ""})
        tracker = MultiTracker({"mlflow": choice}, info)
        tracker.wait()
        if tracker.problems:
            raise TrackingError("; ".join(tracker.problems))
        print(f"Sent. Tracked: {tracker.how_to_look}")


def _settings(folder: Path) -> dict[str, object]:
    """Returns the settings of the tracker in the run's file, if it is MLflow."""
    from gspo_env.config import read_toml
    from gspo_env.files import regular_file

    try:
        tracker = read_toml(regular_file(folder, "config.toml", 1 << 20)).get("tracker", {})
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise OutputError(f"cannot read {error.filename!r}: {error.strerror}") from error
    if not isinstance(tracker, dict):
        return {}
    inner = tracker.get("mlflow", tracker)
    return inner if isinstance(inner, dict) else {}
