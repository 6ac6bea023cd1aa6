"""`gspo-env view`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge

from gspo_env.errors import ConfigError, OutputError, raised_as
from gspo_env.redaction import visible
from gspo_env.settings import settings


@settings
class View:
    """Show the metrics and the episodes of a run in the browser."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of the run, such as runs/Lookup-v0-seed0-1."""
    out: str = ""
    """The file to write; by default view.html in the folder of the run."""
    browser: bool = True
    """Whether to open it."""
    mb: Annotated[int, Ge(1)] = 64
    """Megabytes that the episodes may take in the page; steps in between are left out."""

    def run(self) -> None:
        """Writes the page and opens it."""
        from gspo_env.episodes.schema import PAGE
        from gspo_env.runs import Run, write_page

        if not self.folder:
            raise ConfigError("folder is ''; expected the folder of a run, such as runs/NAME")
        out = Path(self.out or Path(self.folder, PAGE))
        mend = (
            "; expected a file that can be written, named with --out, and a run whose files are "
            "not links"
        )
        with raised_as(OutputError, f"cannot make {str(out)!r}", OSError, mend=mend, reason=str):
            page = write_page(Run.open(self.folder), out, most_mb=self.mb)
        print(f"Wrote {visible(str(page))} ({page.stat().st_size / 1e6:.1f} MB)", flush=True)
        if self.browser:
            webbrowser.open(page.resolve().as_uri())
