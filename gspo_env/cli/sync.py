"""`gspo-env sync`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tyro

from gspo_env.errors import ConfigError, OutputError, TrackingError
from gspo_env.settings import settings


@settings
class Sync:
    """Send what a run recorded while its tracking server was away, to the tracker of the run."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of a run that has ended."""
    tracking_uri: str = ""
    """The store of MLflow; by default that of the run."""
    experiment: str = ""
    """The experiment; by default that of the run."""
    run_name: str = ""
    """The name in the store; by default that of the run."""
    register: str = ""
    """The registered model; by default that of the run."""

    def run(self) -> None:
        """Sends what is missing.

        Raises:
            OutputError: The folder is not that of a run that was tracked.
            ConfigError: The store cannot be opened, or is not the run's.
            TrackingError: Something could not be sent.
        """
        from gspo_env.config import from_dict, override
        from gspo_env.redaction import redact_text
        from gspo_env.tracking.base import RunInfo
        from gspo_env.tracking.jsonl import DESCRIPTION, Received
        from gspo_env.tracking.multi import parts, start
        from gspo_env.training.resume import saved_settings

        folder = Path(self.folder)
        if not self.folder or not (folder / DESCRIPTION).exists():
            raise OutputError(
                f"folder is {self.folder!r}; expected a run that was tracked, such as runs/NAME"
            )
        saved = saved_settings(folder)
        names = ("tracking_uri", "experiment", "run_name", "register")
        flags = {name: value for name in names if (value := getattr(self, name))}
        untrusted = {  # the flags are those of this command
            name.removeprefix("tracker."): value
            for name, value in saved.untrusted.items()
            if name.startswith("tracker.")
        }
        tree = replace(saved, untrusted=untrusted).settings(flags)
        config = override(from_dict({"tracker": tree.get("tracker", {})}), {"tracker": flags})
        received = {name: Received.load(folder, name) for name in parts(config.tracker)}
        for name, choice in parts(config.tracker).items():
            address = redact_text(getattr(choice, "address", ""))
            if received[name].address == address:
                continue
            if not self.tracking_uri:
                raise ConfigError(
                    f"the run is tracked at {received[name].address!r}, and the environment names "
                    f"{address!r}; choose one with --tracking-uri"
                )
            received[name] = Received()  # the store may be another one, which lacks the run
        if all(each.is_complete(folder) for each in received.values()):
            print("The tracker has everything.")
            return
        info = RunInfo(name=folder.name, folder=folder, resume={})
        tracker = start(config.tracker, info)
        tracker.wait()
        if tracker.problems:
            raise TrackingError("; ".join(tracker.problems))
        print(f"Sent. Tracked: {tracker.how_to_look}")
