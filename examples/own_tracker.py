"""A custom tracker: `gspo-env train --tracker examples/own_tracker.py:JsonLines`."""

import json
import shutil
from dataclasses import dataclass

from gspo_env.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Writes the metrics of each step as a line of JSON into the folder of the run."""

    file: str = "lines.jsonl"
    """Name of the file."""

    def start(self, run):
        (run.folder / "params.json").write_text(json.dumps(run.params, default=str))
        return Writer(run.folder, run.folder / self.file)


class Writer(Tracker):
    def __init__(self, folder, file):
        self.folder, self.file = folder, file
        self.how_to_look = f"cat {file}"

    def log(self, metrics, step):
        self.write({"step": step, **metrics})

    def text(self, name, text):
        self.write({"name": name, "text": text})

    def artifact(self, path, folder=""):
        if self.folder.resolve() not in path.resolve().parents:  # else it is already here
            shutil.copy(path, self.folder)

    def finish(self, status, reason):
        self.write({"status": status})

    def write(self, record):
        with self.file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
