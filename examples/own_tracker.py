"""A tracker of your own: `gspo-env train --tracker examples/own_tracker.py:JsonLines`."""

import json
import shutil
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Writes each step's metrics as a line of JSON beside the run."""

    file: str = "metrics.jsonl"
    """Name of the file."""

    def start(self, run):
        (run.folder / "params.json").write_text(json.dumps(run.params, default=str))
        return Writer(run.folder, self.file)


class Writer:
    def __init__(self, folder, file):
        self.folder = folder
        self.lines = open(folder / file, "a")
        self.how_to_look = f"cat {folder / file}"

    def log(self, metrics, step):
        print(json.dumps({"step": step, **metrics}), file=self.lines, flush=True)

    def text(self, name, text):
        self.log({"text": text}, name)

    def artifact(self, path, folder=""):
        if self.folder not in path.parents:  # the run's own files lie here already
            shutil.copy(path, self.folder)

    def finish(self, status):
        self.log({}, status)
        self.lines.close()
