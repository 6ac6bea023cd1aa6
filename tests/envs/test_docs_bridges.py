"""The code blocks of docs/bridges.md run unchanged, in order."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from gspo_env.config import load_toml

PAGE = Path(__file__).parents[2] / "docs" / "bridges.md"


def sections():
    """The blocks of each section of the page: language and code."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    block = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {name: block.findall(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def run(section, server=""):
    """Run the blocks of a section in the working folder; write those with a file name.

    Args:
        section: Its title.
        server: The address of a server, which the page starts by hand at another one.
    """
    for language, code in sections()[section]:
        if server:
            assert "http://127.0.0.1:8000" in code
            code = code.replace("http://127.0.0.1:8000", server)
        if named := re.match(r"# (\w+\.(?:py|toml))", code):
            Path(named[1]).write_text(code)
        if language == "toml":
            load_toml(named[1])
        elif not named:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
            for expected in re.findall(r"^(?:print.*  )?# (.+)$", code, re.MULTILINE):
                assert expected.removesuffix("...").strip() in said.getvalue()


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_datasets():
    run("Datasets and reward functions")


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("section", "package"), [("MCP", "mcp"), ("SkyRL-Gym", "skyrl_gym"), ("verifiers", "verifiers")]
)
def test_bridges(section, package):
    pytest.importorskip(package)
    run(section)


@pytest.mark.openenv
def test_openenv(serve):
    with serve(2) as url:
        run("OpenEnv", url)
