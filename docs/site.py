"""Pages of the site that are made from other files, and links to files outside of `docs`."""

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
COPIES = {
    "index.md": "README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "stress.md": "stress/README.md",
    "studies.md": "studies/README.md",
}
"""Pages of the site, and the files outside of `docs` that they show."""
ROOMS = {
    "gspo_env.env": "Environments",
    "gspo_env.check": "Checks of environments",
    "gspo_env.credit": "Credit",
    "gspo_env.engines": "Engines",
    "gspo_env.rollout": "Rollout",
    "gspo_env.batch": "Batches",
    "gspo_env.learner": "Learner",
    "gspo_env.training": "Training",
    "gspo_env.recipes": "Recipes",
    "gspo_env.serving": "Serving",
    "gspo_env.compare": "Comparisons",
    "gspo_env.report": "Reports",
    "gspo_env.chat": "Chats",
    "gspo_env.distributed": "Distributed",
    "gspo_env.runs": "Runs",
    "gspo_env.episodes": "Episodes",
    "gspo_env.health": "Health",
    "gspo_env.tracking": "Tracking",
    "gspo_env": "Records, errors and settings",
}
"""Packages whose public names the reference shows, and their headings."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures that are not in `docs`."""
    pages = {page: (ROOT / name).read_text() for page, name in COPIES.items()}
    for page, text in (pages | {"api.md": api(), "examples.md": examples()}).items():
        files.append(File.generated(config, page, content=text))
    for path in (ROOT / "studies/images").iterdir():
        files.append(File.generated(config, f"images/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files of the repository at the pages that show them."""
    source = ROOT / COPIES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {name: page for page, name in COPIES.items()}

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve().relative_to(ROOT).as_posix()
        anchor = match[2] or ""
        if target in pages:
            return f"]({pages[target]}{anchor})"
        if target == "examples":
            return "](examples.md)"
        if target.startswith("examples/"):
            return f"](examples.md#{heading_id(target)})"
        if target.startswith(("docs/", "studies/images/")):
            return f"]({target.removeprefix('docs/').removeprefix('studies/')}{anchor})"
        return "](api.md)"

    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", link, markdown)


def heading_id(path: str) -> str:
    """Returns the anchor of an example's heading."""
    return re.sub(r"[^a-z0-9]+", "-", path.lower())


def examples() -> str:
    """Returns the page of the examples: each file with its first docstring or comment."""
    parts = ["# Examples\n\nThe files of the folder `examples`. All of them run in the tests.\n"]
    for path in sorted((ROOT / "examples").rglob("*")):
        if (
            path.suffix not in (".py", ".toml", ".js", ".json", ".jsonl")
            or path.stat().st_size > 20_000
        ):
            continue
        name = path.relative_to(ROOT).as_posix()
        parts.append(f"## `{name}` {{ #{heading_id(name)} }}\n")
        parts.append(f"````{path.suffix[1:]}\n{path.read_text()}````\n")
    return "\n".join(parts)


def api() -> str:
    """Returns the page of the public names of each room, from the stubs of their fronts."""
    direct = ", ".join(f"`{path.rpartition('.')[2]}`" for path in public_names("gspo_env"))
    parts = [
        f"# Python reference\n\nThese names can be imported from `gspo_env` itself: {direct}.\n"
    ]
    shown: set[str] = set()
    for room, title in ROOMS.items():
        new = [path for path in public_names(room) if path not in shown]
        shown.update(new)
        parts.append(f"## {title}: `{room}`\n")
        parts += [f"::: {path}\n" for path in new]
    return "\n".join(parts)


def public_names(room: str) -> list[str]:
    """Returns the full paths of the names that a package's `__init__.pyi` lists."""
    stub = ast.parse((ROOT / room.replace(".", "/") / "__init__.pyi").read_text())
    paths: dict[str, str] = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            module = f"{room}.{node.module}" if node.level else str(node.module)
            paths |= {str(a.asname or a.name): f"{module}.{a.name}" for a in node.names}
    return [paths[name] for name in sorted(paths)]
