"""The Python blocks of the documentation run as written, in order, and print what they say."""

import re
from pathlib import Path

import pytest
from support.jails import run_python

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w-]+\.py)\n")
SHOWN = re.compile(r"^\s*print\(.*?\)  # (.+)$|^# (.+)$(?<!\.py)", re.MULTILINE)
PLAIN = ("coming-from", "credit", "data", "environments", "learner", "runs")
PAGES = {
    **dict.fromkeys(["README.md", *(f"docs/{name}.md" for name in PLAIN)], pytest.mark.commands),
    **dict.fromkeys(["docs/built-in.md", "docs/tools.md"], pytest.mark.adapters),
    "docs/programs.md": pytest.mark.agents,
}

BEFORE = {
    "docs/runs.md": """
from gspo_env.cli.main import main
flags = "--steps 1 --tasks-per-step 2 --group-size 2 --eval-every 0 --eval-tasks 2 --tracker none"
tiny = "--hidden-size 16 --demonstrations 16 --imitation-steps 2"
main(["train", *flags.split(), *tiny.split(), "--output", "runs/Lookup-v0-seed0-1"])
"""
}
"""Programs that make what the blocks of a page read, by page."""


def test_every_page_with_python_blocks_is_run():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert PAGES.keys() == {
        str(path.relative_to(ROOT)) for path in pages if BLOCK.search(path.read_text())
    }


def expected(block):
    """What the comments behind the prints of a block say that is printed."""
    return [behind or below for behind, below in SHOWN.findall(block)]


@pytest.mark.parametrize("page", [pytest.param(page, marks=mark) for page, mark in PAGES.items()])
def test_the_python_blocks_of_a_page_run_in_order_and_print_what_they_say(page, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script, shown = [BEFORE.get(page, "")], []
    for block in BLOCK.findall((ROOT / page).read_text()):
        if file := FILE.match(block):
            (tmp_path / file[1]).write_text(block)
        else:
            script.append(block)
            script += [f"{name}()" for name in re.findall(r"^def (test_\w+)\(", block, re.M)]
            shown += expected(block)
    (tmp_path / "page.py").write_text("\n".join(script))
    done = run_python("page.py", cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    for text in shown:
        wanted = re.escape(text).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(wanted, line) for line in printed), (text, printed)
