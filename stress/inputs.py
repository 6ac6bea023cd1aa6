"""Types inputs at the command line as a new user might, and checks what the program says.

    python stress/inputs.py [WORDS] [--cold] [--write FILE]

`inputs.txt` has the inputs. Each runs in a folder with small files, some of them broken. Printed
are the input, the last sentence, the exit code and the seconds until the command ended. Exit code 1
if an input ends with another code than is listed, with a traceback, by a signal, without a word, or
if a training goes through although no episode had a turn.

Each input runs in a fork of a process that has imported everything; with `--cold` it is a process
of its own, so that its imports count too. The hub is never asked.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TINY = (
    "--hidden-size 16 --demonstrations 16 --imitation-steps 2 --steps 1 --tasks-per-step 2 "
    "--group-size 2 --eval-tasks 4 --tracker none"
)
"""A training of seconds, `$T` in the inputs."""
SECONDS = 120
"""Time after which an input is ended."""

ENV = """from gspo_env import TextEnv
class E(TextEnv):
    system_prompt = "say yes"
    def __init__(self, words=2):
        {init}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        {reset}
        return "yes or no", {{}}
    def step(self, action):
        {step}
        return "", float("yes" in action), True, False, {{"success": "yes" in action}}
    def expert_action(self, noise=0.0):
        {expert}
        return "yes"
    def close(self):
        {close}
"""
FAULTS = {
    "ok": {},
    "init": {"init": "1 / 0"},
    "initkey": {"init": "{}['x']"},
    "initexit": {"init": "raise SystemExit(3)"},
    "reset": {"reset": "1 / 0"},
    "step": {"step": "raise KeyError('k')"},
    "stepexit": {"step": "raise SystemExit(3)"},
    "expert": {"expert": "1 / 0"},
    "close": {"close": "1 / 0"},
    "flaky": {"step": "import random\n        if random.random() < 0.3: raise OSError('disk')"},
    "nan": {"step": "return '', float('nan'), True, False, {}"},
    "text": {"step": "return '', 1.0, True, False, {'success': 'yes'}"},
    "image": {"reset": "return b'PNG', {}"},
    "huge": {"reset": "return 'a ' * 100_000, {}"},
    "hang": {"reset": "import time; time.sleep(1000)"},
    "hangstep": {"step": "import time; time.sleep(1000)"},
    "hangexpert": {"expert": "import time; time.sleep(1000)"},
    "hangclose": {"close": "import time; time.sleep(1000)"},
}
"""Environments that fail, by file name."""

FILES: dict[str, bytes] = {
    **{
        f"{name}.py": ENV.format(
            **{m: code.get(m, "pass") for m in ("init", "reset", "step", "expert", "close")}
        ).encode()
        for name, code in FAULTS.items()
    },
    "async.py": b"""import asyncio, sqlite3
from gspo_env import ToolEnv, tool
class E(ToolEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.db = sqlite3.connect(":memory:")
        return "how many", {}
    @tool
    async def count(self) -> int:
        \"\"\"Count.\"\"\"
        await asyncio.sleep(0)
        return self.db.execute("select 7").fetchone()[0]
    def on_final(self, text):
        return "", float(text == "7"), True
    def expert_action(self, noise=0.0):
        return "7"
""",
    "spaceless.py": b"""import gymnasium
class E(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return "yes or no", {}
    def step(self, action):
        return "", 1.0, True, False, {}
""",
    "untyped.py": b"""from gspo_env import ToolEnv, tool
class E(ToolEnv):
    @tool
    def price(self, item):
        \"\"\"Look up a price.\"\"\"
        return 3
""",
    "syntax.py": b"def (:\n",
    "raises.py": b"1 / 0\n",
    "empty.py": b"",
    "latin.toml": "seed = 1 # \u00e9".encode("latin-1"),
    "bad.toml": b"seed = = 1",
    "bom.toml": b"\xef\xbb\xbfseed = 1\n",
    "unknown.toml": b"stepz = 3\n",
    "neg.toml": b"steps = -3\n",
    "float.toml": b"seed = 1e3\n",
    "dirty.toml": b'[rollout]\ngroup_size = "x"\n',
    "dmg/gspo_env.json": b'{"config": ',
    "emptydir/.keep": b"",
    "full/x": b"x",
    "data.csv": b"question,answer\n2+2,4\n3+3,6\n",
    "list.json": json.dumps(
        [{"prompt": f"{n}+2", "answer": f"{n + 2}"} for n in range(8)]
    ).encode(),
    "share.json": json.dumps(
        [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}]
        * 8
    ).encode(),
    "gsm.jsonl": "\n".join(
        json.dumps({"question": f"{n}+1", "answer": f"work #### {n + 1}"}) for n in range(16)
    ).encode(),
    "broken.jsonl": b'{"prompt": "a"}\n{oops\n',
    "data.txt": b"hello",
    "scalar.json": b"3",
    "nul.csv": b"a,b\n\x00,1\n",
    "rew.py": b"def exact(completions, answer, **k):\n"
    b"    return [float(a in c) for c, a in zip(completions, answer)]\n"
    b"def grade(completions, solution, **k):\n"
    b"    return [float(s in c) for c, s in zip(completions, solution)]\n",
    "program.py": b"def bare(task):\n    return 1.0\n"
    b"def silent(task, base_url, api_key):\n    return 1.0\n",
    "two.py": b"""import sqlite3
from gspo_env import ToolEnv, format_tool_call, tool
class Stock(ToolEnv):
    max_turns = 4
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table parts (name text, shelf text, pieces int)")
        self.pieces = int(self.np_random.integers(10, 100))
        self.db.execute("insert into parts values ('bolt', 'A', ?)", (self.pieces,))
        self.called = []
        return "How many bolts are there?", {"task_key": self.pieces}
    @tool
    def find_shelf(self, part: str) -> str:
        \"\"\"Find the shelf of a part.\"\"\"
        rows = self.db.execute("select shelf from parts where name = ?", (part,)).fetchall()
        return str(rows[0][0]) if rows else "no such part"
    @tool
    def count(self, part: str, shelf: str) -> str:
        \"\"\"Count the pieces of a part on a shelf.\"\"\"
        where = "select pieces from parts where name = ? and shelf = ?"
        return str((self.db.execute(where, (part, shelf)).fetchone() or [0])[0])
    def on_tool_result(self, call, result):
        self.called.append(call.name)
        return 0.1
    def on_final(self, text):
        return "", float(text.strip() == str(self.pieces)), True
    def expert_action(self, noise=0.0):
        if "find_shelf" not in self.called:
            return format_tool_call("find_shelf", {"part": "bolt"})
        if "count" not in self.called:
            return format_tool_call("count", {"part": "bolt", "shelf": "A"})
        return str(self.pieces)
""",
}
"""The files of the folder in which inputs are typed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of an input."""

    line: str
    expected: int
    code: int
    seconds: float
    output: str
    folder: Path
    """The folder of the inputs."""
    run_folders: tuple[str, ...]
    """The runs that it made."""

    @property
    def sentence(self) -> str:
        """The sentence of a refusal, else the last line."""
        lines = [
            line for line in self.output.splitlines() if line.strip(" |\u2502\u2570\u256f\u2500")
        ]
        sentences = [line for line in lines if line.startswith("gspo-env: ")]
        return (sentences or lines or [""])[-1].strip(" |\u2502")

    @property
    def clear(self) -> bool:
        """Whether a refusal is one sentence and nothing else after it."""
        return (
            self.output.strip().splitlines()[-1:] == [self.sentence]
            and self.output.count("gspo-env: ") == 1
        )

    def fault(self) -> str:
        """Returns what is wrong, or nothing."""
        if "Traceback (most recent call last)" in self.output:
            return "a traceback"
        if self.code != self.expected:
            return f"exit code {self.code}, expected {self.expected}"
        if not self.output.strip():
            return "not a word"
        for run in self.run_folders if not self.code else ():
            lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
            metrics = {k: v for line in lines for k, v in json.loads(line)["metrics"].items()}
            if not metrics.get("rollout/turns"):
                return "it trained on nothing"
        return ""


def runs(folder: Path) -> frozenset[str]:
    """Returns the names of the runs in a folder."""
    return frozenset(path.name for path in folder.glob("runs/*"))


def inputs(words: str) -> list[tuple[str, int]]:
    """Returns the inputs that contain the words, each with the exit code that it should have.

    `doctor` answers with a list, and with 1 if something is not as it should be.
    """
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    every = [(line, int(code)) for code, _, line in (line.partition(" ") for line in lines)]
    return [(line, code) for line, code in every if words in line]


def type_in(line: str, expected: int, folder: Path, cold: bool) -> Row:
    """Runs one input."""
    before, output = runs(folder), folder.with_name("output")
    arguments = shlex.split(line.replace("$T", TINY))
    started = time.monotonic()
    with output.open("w") as file:
        if cold:
            command = ["timeout", str(SECONDS), sys.executable, "-m", "gspo_env", *arguments]
            code = subprocess.run(
                command, cwd=folder, stdout=file, stderr=file, check=False
            ).returncode
        else:
            code = _forked(arguments, folder, file.fileno())
    return Row(
        line=f"gspo-env {line}".strip(),
        expected=expected,
        code=code,
        seconds=time.monotonic() - started,
        output=output.read_text(errors="replace"),
        folder=folder,
        run_folders=tuple(sorted(runs(folder) - before)),
    )


def _forked(arguments: list[str], folder: Path, output: int) -> int:
    def prepare() -> None:
        os.chdir(folder)
        signal.alarm(SECONDS)

    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    become(arguments, output, prepare)


def become(arguments: list[str], output: int, prepare: Callable[[], object]) -> NoReturn:
    """Runs a command in this process, a fork, and ends it."""
    code: object = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        prepare()
        from gspo_env.cli.main import main

        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def import_all() -> None:
    """Imports what every command needs."""
    names = ("torch", "transformers", "tyro", "gspo_agents.gspo", "gspo_agents.scripted")
    ours = (
        "gspo_env.cli.options",
        "gspo_env.compare.runner",
        "gspo_envs.data.dataset",
        "gspo_envs.text.lookup",
    )
    for name in (*names, *ours, "transformers.models.qwen3.modeling_qwen3"):
        importlib.import_module(name)


def main() -> None:
    """Prints a row for each input and a summary; exits with 1 if an input has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="?", default="", help="only inputs that contain this")
    parser.add_argument(
        "--cold", action="store_true", help="one process an input, with its imports"
    )
    parser.add_argument("--write", help="a file for the table")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    if not options.cold:
        import_all()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "in")
        os.environ["XDG_STATE_HOME"] = str(Path(place, "state"))
        for name, content in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        for line, code in inputs(options.words):
            row = type_in(line, code, folder, options.cold)
            rows.append(row)
            print(
                f"{row.code:3} {row.seconds:6.1f} s  {row.line}\n             {row.sentence[:300]}"
            )
            if fault := row.fault():
                print(f"             FAULT: {fault}\n{row.output[-3000:]}")
            sys.stdout.flush()
        faults = [row for row in rows if row.fault()]
    refusals = [row for row in rows if row.expected == 2]
    slow, clear = max((r.seconds for r in refusals), default=0.0), sum(r.clear for r in refusals)
    print(
        f"\n{len(rows)} inputs, {len(faults)} with a fault; {len(refusals)} refused, "
        f"{clear} of them in one sentence, the slowest after {slow:.1f} s"
    )
    if options.write:
        table = ["| input | sentence | exit code | seconds |", "|---|---|---|---|"]
        cells = [(f"`{r.line}`", r.sentence, str(r.code), f"{r.seconds:.1f}") for r in rows]
        table += ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
        Path(options.write).write_text("\n".join(table) + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
