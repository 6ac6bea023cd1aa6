"""`gspo-env view`."""

from __future__ import annotations

import contextlib
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import tyro

from gspo_env.errors import ConfigError, OutputError


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Show the metrics and the episodes of a run in the browser."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of the run, such as runs/Lookup-v0-seed0-1."""
    out: str = ""
    """The file to write; by default view.html in the folder of the run."""
    browser: bool = True
    """Whether to open it."""
    live: bool = False
    """Follow a run that is still going on, from a server on this machine, until Ctrl-C."""
    port: int = 0
    """Port of that server; 0 takes a free one."""
    mb: int = 64
    """Megabytes that the episodes may take in the page; steps in between are left out."""

    def run(self) -> None:
        """Writes the page or serves it."""
        if not self.folder:
            raise ConfigError("folder is ''; expected the folder of a run, such as runs/NAME")
        if self.mb < 1:
            raise ConfigError(f"mb is {self.mb}; expected at least 1")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}; expected a number from 0 to 65535")
        if self.live and self.out:
            raise ConfigError("live and out are given; expected one of them")
        if self.live:
            self._serve()
        else:
            self._write()

    def _write(self) -> None:
        from gspo_env.episodes.page import PAGE, write_page

        out = Path(self.out or Path(self.folder, PAGE))
        try:
            page = write_page(self.folder, out, most_mb=self.mb)
        except OSError as error:
            if error.filename not in (None, str(out)):
                raise OutputError(f"cannot read {error.filename!r}: {error.strerror}") from error
            raise OutputError(
                f"cannot write {str(out)!r}: {error.strerror}; expected a file that can be "
                "written, named with --out"
            ) from error
        print(f"Wrote {page} ({page.stat().st_size / 1e6:.1f} MB)", flush=True)
        self._open(page.resolve().as_uri())

    def _serve(self) -> None:
        from gspo_env.episodes.episodes_live import LiveServer

        try:
            server = LiveServer(self.folder, port=self.port, most_mb=self.mb)
        except OSError as error:
            raise ConfigError(
                f"cannot serve at port {self.port}: {error.strerror}; expected a free port"
            ) from error
        with server, contextlib.suppress(KeyboardInterrupt):
            print(f"Following {self.folder} at {server.url} until Ctrl-C", flush=True)
            self._open(server.url)
            server.serve_forever()

    def _open(self, address: str) -> None:
        if self.browser:
            webbrowser.open(address)
