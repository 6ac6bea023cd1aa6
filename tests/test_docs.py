"""The documentation is valid: code blocks, links, and the names of our modules and files."""

import ast
import json
import pkgutil
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

from gspo_env.cli.main import parse
from gspo_env.config import Config, from_dict, to_toml
from gspo_env.env.registration import ENTRY_POINT_GROUP

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for folder in (".", "docs", "benchmarks", "stress", "studies")
    for page in (ROOT / folder).glob("*.md")
)

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAME = re.compile(r"\bgspo_(?:env|envs|agents)(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(
    r"(?<![\w/.])(?:gspo_env|envs|agents|tests|benchmarks|stress|studies|examples|\.ci)/[\w/.-]+\.\w+"
)
COMMAND = re.compile(r"^(?:.*&& )?gspo-env (.+)$", re.MULTILINE)
SPAN = re.compile(r"`gspo-env (\w[^`]* [^`]+)`")


def page(path):
    return pytest.param(path, id=str(path.relative_to(ROOT)))


pages = pytest.mark.parametrize("path", list(map(page, PAGES)))


def blocks(path, language):
    """The code of a page's blocks, each at its own line, so that errors name the line."""
    text = path.read_text()
    for block in BLOCK.finditer(text):
        if block[1] == language:
            yield "\n" * text.count("\n", 0, block.start(2)) + block[2]


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    text = BLOCK.sub("", path.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def is_missing(name):
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return True
    return False


def imported_names(code):
    """The dotted names that a block imports from our packages."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gspo_"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pages
def test_blocks_are_valid_and_import_what_exists(path):
    for code in blocks(path, "toml"):
        tomllib.loads(code)
    codes = list(blocks(path, "python"))
    for code in codes:
        compile(code, str(path), "exec")
    assert sorted(filter(is_missing, {n for code in codes for n in imported_names(code)})) == []


@pages
def test_named_objects_and_files_exist(path):
    text = path.read_text()
    assert sorted(filter(is_missing, {*NAME.findall(text)} - {ENTRY_POINT_GROUP})) == []
    assert sorted(name for name in {*FILE.findall(text)} if not (ROOT / name).exists()) == []


@pages
def test_links_and_images_exist(path):
    broken = []
    for link in LINK.findall(BLOCK.sub("", path.read_text())):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_the_architecture_table_lists_the_import_layers_in_order():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms")[2]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    names = [re.findall(r"`(\w+)(?:\.py|/)`", row) for row in rows]
    order = [layer for layer in reversed(layers) if layer != "__main__"]
    assert [name for row in names for name in row] == order


@pages
def test_commands_have_options_that_exist(path, tmp_path, in_folder):
    for name in ("examples", "studies"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "run.toml").touch()
    (tmp_path / "mine.py").symlink_to(ROOT / "examples" / "own_estimator.py")
    saved = tmp_path / "runs/Lookup-v0-seed0-1/checkpoints/step-000001"
    saved.mkdir(parents=True)
    settings = to_toml(Config.from_recipe())
    batch = tmp_path / "runs/kept/batches/step-000001"
    batch.mkdir(parents=True)
    for folder in (saved, batch):
        (folder / "state.json").write_text(json.dumps({"config": settings}))
    (saved.parents[1] / "config.toml").write_text(settings)
    for code in blocks(path, "toml"):
        if named := re.match(r"\n*# ([\w-]+\.toml)\n", code):
            (tmp_path / named[1]).write_text(code)
    text = path.read_text()
    commands = [c for block in blocks(path, "bash") for c in COMMAND.findall(block)]
    for command in {*commands, *SPAN.findall(BLOCK.sub("", text))}:
        arguments = shlex.split(command, comments=True)
        if "--help" not in arguments:
            parse(["0" if argument == "N" else argument for argument in arguments])


def test_the_page_about_comparisons_shows_the_example_that_is_shipped():
    (shown,) = blocks(ROOT / "docs/compare.md", "toml")
    assert shown.lstrip("\n") == (ROOT / "examples/compare.toml").read_text()


def test_the_settings_of_each_size_are_settings_of_a_run():
    for code in blocks(ROOT / "docs/engines.md", "toml"):
        from_dict(tomllib.loads(code))


@pages
def test_tables_are_those_of_the_code(path):
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    assert tables["filled"](path.read_text()) == path.read_text(), "run python docs/tables.py"


def named(root):
    """Each (file, test) of the table of attacks; the test is empty if the whole file is named."""
    text = (root / "SECURITY.md").read_text()
    return re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)


def test_every_attack_has_a_test_that_exists(request):
    root = request.config.rootpath
    rows = [row for row in (root / "SECURITY.md").read_text().splitlines() if "`tests/" in row]
    assert len(rows) > 20
    for file, name in named(root):
        tests = {
            node.name
            for node in ast.walk(ast.parse((root / file).read_text()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        assert name in tests if name else any(t.startswith("test_") for t in tests), (file, name)
