"""The shell blocks of the documentation run as written, in order, but with fewer steps.

A page runs in a folder with `examples/`, `studies/` and the files it shows. A training gets the
flags of `SHORT`, which win over those of the page, and a hub's model is the run before it. Commands
that cannot run in a test are listed in `ELSEWHERE` with the reason.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_env.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```\w+\n# ([\w-]+\.(?:py|toml))\b(.*?)^```$", re.MULTILINE | re.DOTALL)

SHORT = {
    "--steps": "1",
    "--tasks-per-step": "2",
    "--group-size": "2",
    "--eval-every": "0",
    "--eval-tasks": "4",
    "--tracker": "none",
}
TINY = {"--hidden-size": "16", "--demonstrations": "16", "--imitation-steps": "2"}
"""Flags of a training of the tiny model, besides `SHORT`."""
SHORTER = {
    "evaluate": {"--tasks": "4"},
    "capture": {"--episodes": "4"},
    "compare": {**SHORT, **TINY, "--seeds": "1", "--workers": "1", "--pilot": ""},
}
"""Flags of the other commands that take long."""
HUB = "Qwen/Qwen3-0.6B"

ELSEWHERE = {
    "pip": "needs a package index; .ci/run installs the extras in new environments",
    "python -m venv": "needs a package index; .ci/run makes the environments",
    "source": "changes the shell that it is typed in",
    "pre-commit install": "writes hooks into the repository",
    "pytest": "runs these tests",
    ".ci/run": "runs these tests",
    "torchrun": "starts processes; see tests/distributed, with the marker ranks",
    "gspo-env sync": "needs a run with a tracker; see tests/tracking",
    "gspo-env episodes": "needs episodes with success; see tests/cli/test_episodes.py",
    "gspo-env export": "needs the library that it exports to; see tests/export",
    "gspo-env replay": "needs a run that kept its batches; see tests/training/test_batches.py",
    "gspo-env rewind": "needs a run that kept its batches; see tests/agents/test_rewind.py",
    "gspo-env whatif": "needs a run that kept its batches; see tests/training/test_batches.py",
    "python examples/shell_tasks.py": "see tests/envs/test_harbor.py",
    "gspo-env audit gspo/Harbor-v0": "plays 30 tasks; see tests/envs/test_harbor.py",
    "gspo-env train --env gspo/Harbor-v0": "needs the tasks; see tests/envs/test_harbor.py",
    "gspo-env train --env gspo/Tau2-v0": "needs the suite; see tests/envs/test_suites.py",
    "gspo-env train --env gspo/TextWorldExpress-v0": "needs the suite and Java",
    "gspo-env evaluate runs/telecom": "needs the training before it",
    "gspo-env evaluate trl": "needs TRL's training before it",
    "python benchmarks/against_trl.py success": "needs TRL, and minutes",
    "gspo-env verify": "needs a batch; see tests/verify",
    "gspo-env play": "waits for a person; see tests/cli/test_play.py",
    "gspo-env train --engine vllm": "needs vLLM; run by the tests with the marker vllm",
    "gspo-env train --config one-gpu.toml": "needs vLLM and a GPU",
    "gspo-env train --recipe smollm2": "needs a package; run by the tests with the marker real",
    "gspo-env train --config story.toml": "needs the package of a model",
    "gspo-env train --config examples/sums.toml": "needs the package of a model",
    "gspo-env evaluate runs/shell": "needs the training before it",
    "gspo-env evaluate --model smollm2": "needs the package of a model",
    "gspo-env train --env gspo/Program-v0": "needs tasks that a Python block writes",
    "gspo-env compare --config examples/compare.toml": "takes hours; see tests/compare",
    "gspo-env compare --recipe smollm2": "needs the package of a model, and an hour",
    "gspo-env compare --config studies/credit/distillation.toml": "needs a trained teacher",
}
"""The beginnings of commands that are not run here, each with the reason."""
SLOW = ("gspo-env compare", "gspo-env doctor")
"""The beginnings of commands that take seconds; they have tests of their own."""
EXTRA = {
    **{"TextArena": "adapters", "self_play": "adapters"},
    **{"examples/agents": "agents", "runs/lookup": "agents"},  # need node
}
"""Words of commands that need an extra, by its marker."""


def commands(path):
    """The commands of a page's shell blocks, without comments."""
    for block in BLOCK.findall(path.read_text()):
        for line in block.splitlines():
            for part in line.split(" && "):
                if command := shlex.join(shlex.split(part, comments=True)):
                    yield command if " > " not in part else part


def kind(command):
    """Where a command runs: elsewhere, or the marker of its test; empty for the main tests."""
    if command.startswith(tuple(ELSEWHERE)):
        return "elsewhere"
    if markers := [marker for word, marker in EXTRA.items() if word in command]:
        return markers[0]
    return "commands" if command.startswith(SLOW) else ""


def cases():
    """A case for each page and marker, with its commands in order."""
    for path in PAGES:
        page = list(commands(path))
        for name in ("", "commands", "adapters", "agents"):
            if some := [command for command in page if kind(command) == name]:
                marks = getattr(pytest.mark, name or "commands")
                yield pytest.param(path, some, id=f"{path.stem}-{name or 'main'}", marks=marks)


def shortened(arguments, flags):
    """Sets flags to other values, or adds them."""
    arguments = list(arguments)
    for flag, value in flags.items():
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        else:
            arguments += [flag, value] if value else [flag]
    return arguments


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of `gspo-env train`, which is the first command of two pages."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(shortened(["train"], {**SHORT, **TINY, "--steps": "2"}))
    return folder / "runs"


def type_in(command, trained):
    """Runs a command in the working folder."""
    name, *arguments = shlex.split(command)
    if " > " in command:
        subprocess.run(["bash", "-c", command], check=True)
    elif name == "python":
        subprocess.run([sys.executable, *arguments], check=True, timeout=300)
    elif arguments == ["train"]:
        shutil.copytree(trained, "runs", symlinks=True, dirs_exist_ok=True)
    else:
        if "--resume" in arguments:
            flags = {"--steps": "3"} if "--steps" in arguments else {}
        elif arguments[0] == "train":
            flags = SHORT if "--model" in arguments else {**SHORT, **TINY}
        else:
            flags = SHORTER.get(arguments[0], {})
        arguments = shortened(arguments, flags)
        if HUB in arguments and not Path("runs/Lookup-v0-seed0-1").exists():
            shutil.copytree(trained, "runs", symlinks=True, dirs_exist_ok=True)
        main(["runs/Lookup-v0-seed0-1" if a == HUB else a for a in arguments])


@pytest.mark.parametrize(("path", "some"), list(cases()))
def test_the_shell_blocks_of_a_page_run_in_order(
    path, some, trained, in_folder, monkeypatch, capfd
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for name in ("examples", "studies"):
        Path(name).symlink_to(ROOT / name)
    for name, code in SHOWN.findall(path.read_text()):
        Path(name).write_text(code)
    for command in some:
        try:
            type_in(command, trained)
        except SystemExit as end:
            if end.code:
                pytest.fail(f"{command}: exit code {end.code}: {capfd.readouterr().err}")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.commands
@pytest.mark.parametrize("folder", ["benchmarks", "stress", "studies/credit", "studies/density"])
def test_the_programs_of_a_folder_find_what_they_import(folder):
    needs_vllm = {"vllm_child", "vllm_rollout"}
    programs = sorted({path.stem for path in (ROOT / folder).glob("*.py")} - needs_vllm)
    assert programs
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    subprocess.run(
        [sys.executable, "-c", program, *programs], cwd=ROOT / folder, check=True, timeout=300
    )
