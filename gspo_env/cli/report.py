"""`gspo-env report`."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import tyro

from gspo_env.errors import ConfigError
from gspo_env.redaction import visible


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Write pictures and a page about one or several runs."""

    folders: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of runs, or folders that have runs. Those with the same settings but for the seed are
    one arm."""
    out: str = ""
    """Folder for the files; by default `report` in the folder of the run, or in the working folder
    for several runs."""
    markdown: bool = False
    """Also write Markdown: tables, links to the pictures, commands and settings."""
    browser: bool = True
    """Whether to open the page."""

    def run(self) -> None:
        """Reads the runs and writes the report."""
        if not self.folders or not all(self.folders):
            raise ConfigError("folders is empty; expected the folders of runs, such as runs/NAME")
        from gspo_env.report.run_record import read_run, runs_in
        from gspo_env.report.run_report import write_run_report

        folders = [run for folder in self.folders for run in runs_in(folder)]
        places = {str(Path(folder).resolve()): folder for folder in folders}
        runs = [read_run(folder) for folder in places.values()]
        out = Path(self.out or (runs[0].folder / "report" if len(runs) == 1 else "report"))
        by = shlex.join(["gspo-env", *sys.argv[1:]]) if sys.argv[1:2] == ["report"] else ""
        paths = write_run_report(runs, out, with_markdown=self.markdown, made_by=by)
        for path in paths:
            print(f"Wrote {visible(str(path))}", flush=True)
        if self.browser:
            webbrowser.open(paths[0].resolve().as_uri())
