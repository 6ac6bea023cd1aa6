"""Breaks what a run stands on: the disk, the server, the clock, its folder, its data, its programs.

    python stress/hostile.py [--only NAME ...] [--list] [--seed N]

A case is a function `case_NAME`. It runs commands in forks of a process that has imported
everything, and looks at their exit codes, sentences and memory, and at what is left on the disk and
of processes. Exit code 1 if a case is wrong. Needs `unshare`, because small and read-only file
systems are mounted where no other process sees them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pickle
import random
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

if __name__ == "__main__" and "GSPO_HOSTILE" not in os.environ:
    os.environ |= {"GSPO_HOSTILE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    root = ["--map-root-user"] if os.geteuid() else []
    os.execvp("unshare", ["unshare", "--mount", *root, sys.executable, *sys.argv])
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from stress import inputs, kill_resume

SECONDS = 600.0
"""Time after which a command hangs."""
MEMORY = 500
"""MiB that a command may take beyond what a process with all imports has."""
SENTINEL = "this file is outside of the run"
TINY = shlex.split(
    "--hidden-size 16 --demonstrations 16 --imitation-steps 2 --tasks-per-step 2 --group-size 2 "
    "--eval-tasks 4 --eval-every 2 --steps 4 --save-every 1 --keep-episodes all"
)
"""A training of seconds."""
SHORT = shlex.split(
    "--env gspo/Additive-v0 --hidden-size 32 --demonstrations 200 --imitation-steps 40 "
    f"--imitation-learning-rate 1e-2 --steps {kill_resume.STEPS} --tasks-per-step 4 "
    "--group-size 4 --eval-tasks 4 --eval-every 2 --save-every 1 --tracker none"
)
"""A training that learns, as that of `kill_resume.py`."""
COMPARE = ["--arm", "loss=gspo,grpo", "--pilot", "--seeds", "1", "--tracker", "none", *TINY]
MLFLOW = ["--tracker", "mlflow", "--tracking-uri"]
KINDS = shlex.split(
    "types types types gone folder link pipe empty half garbage deep pickle long numbers"
)
"""Ways to spoil a file."""

PEAK = [0.0]
"""MiB of the largest command of a case."""
WRONGS: list[str] = []
"""Faults after which a case goes on."""
SCRATCH, SEED = Path(tempfile.gettempdir()), 0


class Wrong(Exception):
    """What a case found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A command that ended."""

    line: str
    code: int
    """The exit code, or the negative number of the signal."""
    output: str
    seconds: float
    cpu: float
    """CPU seconds, with those of the children that it waited for."""
    memory: float
    """Highest resident MiB beyond those of a fork that does nothing."""

    @property
    def sentence(self) -> str:
        """The refusal, else the last line."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        refusals = [line for line in lines if line.startswith("gspo-env: ")]
        return (refusals or lines or [""])[-1]

    def expect(self, *codes: int, word: str = "") -> Self:
        """Checks that a command ended as it should."""
        problems = {
            f"exit code {self.code}, expected {codes}": self.code not in codes,
            "a traceback": "Traceback (most recent call last)" in self.output,
            "not one sentence": self.code == 2 and self.output.count("gspo-env: ") != 1,
            f"{self.memory:.0f} MiB": self.memory > MEMORY,
            f"no word of {word!r}": word not in self.output,
        }
        if problem := ", ".join(text for text, holds in problems.items() if holds):
            raise Wrong(f"{self.line}: {problem}\n{self.output[-3000:]}")
        return self


class Command:
    """A command in a fork of this process.

    Args:
        arguments: Its arguments.
        prepare: Called in the fork before the command.
        seconds: Time after which it is killed.
    """

    def __init__(
        self,
        *arguments: Any,
        prepare: Callable[[], object] = lambda: None,
        seconds: float = SECONDS,
    ) -> None:
        self.line, self._seconds = shlex.join(map(str, arguments)), seconds
        self._output = tempfile.NamedTemporaryFile(dir=SCRATCH)  # noqa: SIM115
        self._begun = time.monotonic()
        if not (idle := os.fork()):
            os._exit(0)
        self._base = os.wait4(idle, 0)[2].ru_maxrss
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            inputs.become([*map(str, arguments)], self._output.fileno(), prepare)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> Ended:
        """Kills it, but not its children."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> Ended:
        """Waits for its end, and kills it if it hangs."""
        while self.running and time.monotonic() < self._begun + self._seconds:
            time.sleep(0.01)
        hangs = self.running
        if hangs:
            os.kill(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        text = Path(self._output.name).read_text(errors="replace")
        self._output.close()
        memory = max(0, usage.ru_maxrss - self._base) / 1024
        PEAK[0] = max(PEAK[0], memory)
        return Ended(
            line=self.line,
            code=os.waitstatus_to_exitcode(status),
            output=text + f"\nit did not end within {self._seconds:g} s" * hangs,
            seconds=time.monotonic() - self._begun,
            cpu=usage.ru_utime + usage.ru_stime,
            memory=memory,
        )


def run(*arguments: Any, **how: Any) -> Ended:
    """Runs a command to its end."""
    return Command(*arguments, **how).wait()


def train(output: Any, *arguments: Any, **how: Any) -> Ended:
    """Runs a tiny training to its end."""
    tracker = () if "--tracker" in arguments else ("--tracker", "none")
    return run("train", *TINY, *tracker, "--output", output, *arguments, **how)


def resume(place: Path) -> Path:
    """Resumes a run that was cut, or begins again as the refusal says; returns the folder."""
    if not (place / "config.toml").exists():
        train(place.with_name(f"{place.name}-again")).expect(0)
        return place.with_name(f"{place.name}-again")
    again = run("train", "--resume", place)
    line = again.sentence.partition("begin again with: gspo-env ")[2]
    if again.code != 2 or not line:
        again.expect(0)
        return place
    run(*shlex.split(line)).expect(0)
    return Path(shlex.split(line)[-1])


@contextlib.contextmanager
def disk(folder: Path, size: str) -> Iterator[Callable[[str], object]]:
    """Mounts a small file system; yields a function that remounts it with other options."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield lambda how: subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


class Server:
    """An MLflow server in a folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._folder = folder
        self.uri = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            TimeoutError: It did not within three minutes.
        """
        store = f"sqlite:///{self._folder / 'store.db'}"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--workers", "1", "--port", str(self._port), "--backend-store-uri", store]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        self.kill()
        raise TimeoutError(f"no server at {self.uri}: {self._folder / 'server.log'}")

    def kill(self) -> None:
        """Kills the server and its workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Yields a server that runs; kills it afterwards."""
    process = Server(folder)
    process.start()
    try:
        yield process
    finally:
        process.kill()


def written(run: Path) -> Counter[tuple[str, int, int, float]]:
    """Returns name, step, time and value of each point in a run's folder."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return Counter(
        (name, line["step"], line["time"], value)
        for line in lines
        for name, value in line["metrics"].items()
    )


def received(uri: str, run: Path) -> Counter[tuple[str, int, int, float]]:
    """Returns the same of each point on the server, in all of its runs."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [e.experiment_id for e in client.search_experiments()]
    points: Counter[tuple[str, int, int, float]] = Counter()
    for each in client.search_runs(experiments):
        for name in each.data.metrics:
            history = client.get_metric_history(each.info.run_id, name)
            points.update((p.key, p.step, p.timestamp, p.value) for p in history)
    return points


def tally(ends: Sequence[Ended]) -> str:
    """Returns how commands ended."""
    codes = Counter(end.code for end in ends)
    return ", ".join(f"{n} with {code}" for code, n in sorted(codes.items()))


def check_points(uri: str, place: Path, what: str) -> int:
    """Checks that every point of a run is in the store once; returns their number."""
    want, have = written(place), received(uri, place)
    if not want or want != have:
        missing, surplus = (want - have).total(), (have - want).total()
        raise Wrong(f"{what}: of {want.total()} points {missing} are missing, {surplus} too many")
    return want.total()


def check_processes(what: str, *words: str, patience: float = 60.0) -> None:
    """Checks that processes whose commands have one of the words end by themselves."""
    end = time.monotonic() + patience
    while left := [p for p in psutil.process_iter() if any(w in command_of(p) for w in words)]:
        if time.monotonic() > end:
            raise Wrong(f"{what}: process {left[0].pid} is left: {command_of(left[0])[:200]}")
        time.sleep(0.1)


def command_of(process: psutil.Process) -> str:
    """Returns the command line of a process, or nothing of this one and of those that ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()) if process.pid != os.getpid() else ""
    return ""


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


def parts(place: Path) -> list[str]:
    """Returns the temporary files in a folder."""
    return [str(path) for path in place.rglob(".*")]


# The disk


def case_disk_full(folder: Path) -> str:
    """The disk is full in imitation, in a checkpoint, in an episode file, in the summary."""
    ends: list[Ended] = []
    for size in (4, 16, 48, 80, 112, 144, 192, 256, 384, 512, 768, 1024):
        with disk(folder / f"disk{size}", f"{size}k") as remount:
            place = folder / f"disk{size}" / "run"
            ends.append(train(place).expect(0, 2))
            remount("size=64m")
            resume(place)
    for size in (4000, 16000, 40000, 60000, 100000, 200000):

        def limit(size: int = size) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        place = folder / f"limit{size}"
        ends.append(train(place, prepare=limit).expect(0, 2))
        resume(place)
    return f"{len(ends)} trainings: {tally(ends)}; all finished with more space"


def case_disk_full_store(folder: Path) -> str:
    """The disk of MLflow's store is full when the run begins, and later."""
    ends = []
    for size in (64, 400, 700, 800, 900, 1000):
        with disk(folder / f"disk{size}", f"{size}k") as remount:
            uri, output = f"sqlite:///{folder}/disk{size}/store.db", folder / f"run{size}"
            ends.append(train(output, *MLFLOW, uri).expect(0, 2))
            remount("size=64m")
            if ends[-1].code == 0:
                run("sync", output).expect(0)
                check_points(uri, output, f"a disk of {size} KiB")
            else:
                (folder / f"disk{size}/store.db").unlink(missing_ok=True)
                train(output, *MLFLOW, uri).expect(0)
    return f"{len(ends)} trainings: {tally(ends)}; every point arrived once"


def case_read_only(folder: Path) -> str:
    """The output, the working folder, the home, the temporary folder or the store is read-only."""
    train(folder / "run", *MLFLOW, f"sqlite:///{folder}/store.db").expect(0)
    fixed, ends = folder / "fixed", []
    with disk(fixed, "64m") as remount:
        shutil.copytree(folder / "run", fixed / "run", symlinks=True)
        shutil.copy(folder / "store.db", fixed)
        (fixed / "empty").mkdir()
        remount("ro")

        def chdir() -> None:
            os.chdir(fixed)

        def home() -> None:
            os.environ |= {"XDG_STATE_HOME": str(fixed / "state"), "HOME": str(fixed)}

        def temporary() -> None:
            os.environ["TMPDIR"] = tempfile.tempdir = str(fixed)

        none = ("--tracker", "none")
        ends = [
            train(fixed / "new").expect(2),
            train(fixed / "empty").expect(2),
            run("train", *TINY, *none, prepare=chdir).expect(2),
            run("train", *TINY, prepare=chdir).expect(2),
            train(folder / "home", prepare=home).expect(0),
            train(folder / "temporary", prepare=temporary).expect(0),
            train(folder / "stored", *MLFLOW, f"sqlite:///{fixed}/store.db").expect(0, 2),
            run("evaluate", fixed / "run").expect(0),
            run("diagnose", fixed / "run").expect(0, 1),
            run("view", fixed / "run", "--no-browser").expect(0, 2),
            run("view", fixed / "run", "--out", folder / "page.html", "--no-browser").expect(0),
            run("sync", fixed / "run").expect(0, 2),
            run("train", "--resume", fixed / "run", "--steps", 6).expect(2),
            run("compare", *COMPARE, "--output", fixed / "compared").expect(2),
            run("doctor", fixed / "run/model").expect(0, 1),
        ]
    return f"{len(ends)} commands: {tally(ends)}"


# Two at a time


def case_two_at_a_time(folder: Path) -> str:
    """Two trainings, resumes, `sync` and comparisons of one folder, and two without a name."""
    texts, uri = [], f"sqlite:///{folder}/store.db"
    none = ["train", *TINY, "--tracker", "none"]
    (folder / "named").mkdir()

    def two(wins: int, *arguments: Any, prepare: Any = lambda: None) -> None:
        ends = [Command(*arguments, prepare=prepare) for _ in range(2)]
        ended = [each.wait().expect(0, 2) for each in ends]
        if sum(end.code == 0 for end in ended) != wins:
            outputs = "\n".join(end.output[-800:] for end in ended)
            WRONGS.append(f"two of {ended[0].line[:60]}: {tally(ended)}\n{outputs}")
        texts.append(f"{arguments[0]} {tally(ended)}")

    two(1, *none, "--output", folder / "run")
    two(2, *none, prepare=lambda: os.chdir(folder / "named"))
    two(1, "train", "--resume", folder / "run", "--steps", 20)
    train(folder / "tracked", *MLFLOW, uri).expect(0)
    sent = folder / "tracked/tracking/mlflow.json"
    sent.write_text(json.dumps(json.loads(sent.read_text()) | {"metrics": 0, "calls": 0}))
    two(2, "sync", folder / "tracked")
    check_points(uri, folder / "tracked", "two `sync` at a time")
    two(1, "compare", *COMPARE, "--output", folder / "compared")
    run("compare", *COMPARE, "--output", folder / "compared").expect(0)
    return "; ".join(texts)


# Environments

ENVIRONMENTS = """
import threading
from gspo_env import TextEnv
HELD = []
class Leaks(TextEnv):
    system_prompt = "say yes"
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        HELD.append(open(__file__))
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return "yes or no", {}
    def step(self, action):
        return "", float("yes" in action), True, False, {"success": "yes" in action}
    def expert_action(self, noise=0.0):
        return "yes"
class Big(TextEnv):
    system_prompt = "say yes"
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turns = 0
        return "x" * 1_000_000 if seed % 2 else "yes or no", {}
    def step(self, action):
        self.turns += 1
        text = ("yes and no, " if self.turns % 2 else "\u6771<tool_call>{") * 90_000
        return text[:1_000_000], float("yes" in action), self.turns > 2, False, {}
    def expert_action(self, noise=0.0):
        return "yes"
"""


def case_leaking_environment(folder: Path) -> str:
    """Each of 2,000 episodes leaks a thread and a descriptor, of 1,024 or 20,000."""
    (folder / "envs.py").write_text(ENVIRONMENTS)
    texts = []
    for files, isolation in ((20_000, "thread"), (1024, "thread"), (1024, "process")):

        def limit(files: int = files) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        sizes = ["--steps", 20, "--tasks-per-step", 12, "--group-size", 8, "--eval-every", 10]
        where = ["--env", f"{folder}/envs.py:Leaks", "--isolation", isolation]
        output = folder / f"{isolation}{files}"
        ended = train(output, *sizes, *where, prepare=limit, seconds=400).expect(0, 2)
        texts.append(f"{isolation}, {files}: {ended.code}, {ended.sentence[:200]}")
    return "; ".join(texts)


def case_big_observations(folder: Path) -> str:
    """Observations of 1 MB at the start of an episode and later."""
    (folder / "envs.py").write_text(ENVIRONMENTS)
    big = ["--env", f"{folder}/envs.py:Big"]
    train(folder / "short", *big).expect(2, word="1000000 characters long")
    flags = ["--env-kwargs", "max_observation=1000000", "--steps", 2]
    ended = train(folder / "run", *big, *flags).expect(0, 2)
    return f"exit code {ended.code} after {ended.seconds:.0f} s: {ended.sentence[:200]}"


# The server and the clock


def case_server_outage(folder: Path) -> str:
    """MLflow's server is killed twice in a training, stays away, and comes back."""
    with server(folder) as tracking:
        flags = [*TINY, "--steps", 60, "--save-every", 20, *MLFLOW, tracking.uri]
        training = Command("train", *flags, "--output", folder / "run")
        lines = folder / "run/metrics.jsonl"
        for step in (10, 35):
            while training.running and (
                not lines.exists() or lines.read_bytes().count(b"\n") < step
            ):
                time.sleep(0.02)
            tracking.kill()
            time.sleep(3)
            tracking.start()
        # on a busy machine the training may end before the server is back, which is slow at first
        waits = "mlflow has not received" in training.wait().expect(0).output
        if waits:
            patient = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "120"}
            run("sync", folder / "run", prepare=lambda: os.environ.update(patient)).expect(0)
        points = check_points(tracking.uri, folder / "run", "two outages")
    return f"{points} points, each on the server once" + " after `sync`" * waits


def case_clock_jumps(folder: Path) -> str:
    """The clock jumps by up to a day, forwards and backwards, whenever somebody looks."""
    uri = f"sqlite:///{folder}/store.db"

    def jump() -> None:
        clock, draw = time.time, random.Random(0)
        time.time = lambda: clock() + draw.uniform(-86400, 86400)
        time.time_ns = lambda: int(time.time() * 1e9)

    train(folder / "steady").expect(0)
    train(folder / "run", *MLFLOW, uri, prepare=jump).expect(0)
    check_points(uri, folder / "run", "a clock that jumps")
    if kill_resume.points(folder / "run") != kill_resume.points(folder / "steady"):
        raise Wrong("other metrics than with a steady clock")
    run("view", folder / "run", "--no-browser", prepare=jump).expect(0)
    run("train", "--resume", folder / "run", "--steps", 6, prepare=jump).expect(0)
    check_points(uri, folder / "run", "a clock that jumps in a resumed run")
    run("compare", *COMPARE, "--output", folder / "compared", prepare=jump).expect(0)
    return "the same metrics as with a steady clock"


# Folders, data and settings from elsewhere


class Boom:
    """Writes a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {SCRATCH}/boom",)


def hostile_json(draw: random.Random, value: Any) -> Any:
    """Returns JSON in which some values have another type or size."""
    if draw.random() < 0.1:
        return draw.choice([
            None, True, -1, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 100_000, [], {},
            [[]], {"": None}, "../../outside", "/dev/zero", "\ud800", "\x1b[2J", -(2**63), 0.5,
        ])  # fmt: skip
    if isinstance(value, dict):
        return {key: hostile_json(draw, each) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile_json(draw, each) for each in value]
    return value


def hostile_toml(draw: random.Random, text: str) -> str:
    """Returns TOML in which some values and lines are others."""
    values = [
        *('""', "[]", "{}", "nan", "inf", "-1", "9" * 400, "true", '"../x"', "1979-05-27"),
        *("[[1], [2]]", "{a = 1}", '"\\ud800"', f'"{"x" * 9999}"', "'" * 3, "0x1F", "= ="),
    ]
    lines = text.splitlines()
    for number, line in enumerate(lines):
        name, equal, _ = line.partition("=")
        if equal and draw.random() < 0.05:
            lines[number] = f"{name}= {draw.choice(values)}"
        elif draw.random() < 0.01:
            lines[number] = draw.choice(["[", "[[a]]", "[loss]", "\0", "a.b.c = 1", "[learner]"])
    return "\n".join(lines) + "\n"


def spoil(path: Path, kind: str, draw: random.Random, outside: Path) -> None:
    """Spoils a file in one of the ways of `KINDS`."""
    data = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
        (path / "x").write_text("x")
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "types" and path.suffix in (".json", ".jsonl"):
        lines = data.decode().splitlines() if path.suffix == ".jsonl" else [data.decode()]
        values = [json.dumps(hostile_json(draw, json.loads(line))) for line in lines if line]
        path.write_text("\n".join(values) + "\n")
    elif kind == "types" and path.suffix == ".toml":
        path.write_text(hostile_toml(draw, data.decode()))
    elif kind != "gone":
        cut, bits = draw.randrange(len(data) + 1), draw.randbytes(64)
        contents = {
            "empty": b"",
            "half": data[:cut],
            "garbage": data[:cut] + bits + data[cut + 64 :],
            "deep": b"[" * 300_000,
            "pickle": pickle.dumps(Boom()),
            "long": data + b"x" * 10**7,
        }
        path.write_bytes(contents.get(kind, data.replace(b"1", b"9" * 400)))


def reseal(path: Path) -> None:
    """Writes the checksum of a changed file of a checkpoint, as who changes it on purpose does."""
    from gspo_env.training.checkpoints import checksum

    folder = next((each for each in path.parents if (each / "manifest.json").is_file()), None)
    if folder and path.name != "manifest.json" and path.is_file() and not path.is_symlink():
        manifest = json.loads((folder / "manifest.json").read_text())
        if (name := str(path.relative_to(folder))) in manifest["files"]:
            manifest["files"][name] = checksum(path)
            (folder / "manifest.json").write_text(json.dumps(manifest))


def judge(ends: list[Ended], ended: Ended, what: str, outside: Path, *codes: int) -> None:
    """Notes what is wrong with a command that met something hostile."""
    try:
        ends.append(ended.expect(*codes))
    except Wrong as wrong:
        WRONGS.append(f"{what}: {wrong}")
        print(f"    {WRONGS[-1][:300]}", flush=True)
    if outside.read_text() != SENTINEL or SENTINEL in ended.output:
        WRONGS.append(f"{what}, {ended.line}: the file outside was read or written")
        outside.write_text(SENTINEL)
    if (SCRATCH / "boom").exists():
        WRONGS.append(f"{what}, {ended.line}: a pickle ran")
        (SCRATCH / "boom").unlink()


def case_hostile_folder(folder: Path, draws: int = 100) -> str:
    """A file of a run or a comparison is spoiled; each command looks at the folder."""
    draw, ends, outside = random.Random(SEED), list[Ended](), folder / "outside"
    outside.write_text(SENTINEL)
    uri = f"sqlite:///{folder}/store.db"
    (folder / "reward.py").write_text("def right(attempt):\n    return float(len(attempt.text))\n")
    train(folder / "run", *MLFLOW, uri).expect(0)
    run("compare", *COMPARE, "--output", folder / "compared").expect(0)
    begin = ["--tracker", "none", "--steps", "1", "--output", f"{folder}/new"]
    commands = [
        ["evaluate", "{}"],
        ["doctor", "{}/model"],
        ["view", "{}", "--no-browser"],
        ["diagnose", "{}"],
        ["rescore", "{}", "--rewards", f"{folder}/reward.py:right"],
        ["sync", "{}", "--tracking-uri", uri],
        ["train", "--resume", "{}", "--tracking-uri", uri, "--steps", "5"],
        ["train", "--resume", "{}", "--tracking-uri", uri],
        ["train", "--model", "{}", "--env", "gspo/Lookup-v0", *TINY[6:], *begin],
        ["compare", *COMPARE, "--output", "{}"],
    ]
    place = folder / "spoiled"
    for number in range(draws):
        command = commands[number % len(commands)]
        shutil.copytree(
            folder / ("compared" if command[0] == "compare" else "run"), place, symlinks=True
        )
        files = [p for p in sorted(place.rglob("*")) if p.is_file() and not p.is_symlink()]
        path = draw.choice([p for p in files if p.suffix not in (".png", ".html", "")])
        kind = draw.choice(KINDS)
        spoil(path, kind, draw, outside)
        if draw.random() < 0.7:
            reseal(path)
        ended = run(*(part.replace("{}", str(place)) for part in command))
        codes = (0, 1, 2) if command[0] in ("doctor", "diagnose") else (0, 2)
        judge(ends, ended, f"draw {number}, {kind} of {path.relative_to(place)}", outside, *codes)
        shutil.rmtree(place)
        shutil.rmtree(folder / "new", ignore_errors=True)
    return f"{draws} spoiled files: {tally(ends)}"


def case_hostile_data(folder: Path, draws: int = 60) -> str:
    """Datasets and settings of other forms than they should have."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, ends, outside = random.Random(SEED), list[Ended](), folder / "outside"
    outside.write_text(SENTINEL)
    train(folder / "run").expect(0)
    config = (folder / "run/config.toml").read_text()
    reward = folder / "reward.py"
    reward.write_text("def right(attempt):\n    return float(attempt.text == attempt.row['a'])\n")
    rows = [{"prompt": f"{n} + 1", "a": f"{n + 1}", "tools": []} for n in range(8)]
    chats = [{"messages": [{"role": "user", "content": f"{n}"}], "a": "x"} for n in range(8)]
    for number in range(draws):
        kind, output, table = (
            draw.choice(KINDS),
            folder / f"out{number}",
            draw.choice((rows, chats)),
        )
        suffix = draw.choice((".jsonl", ".json", ".csv", ".parquet"))
        path = folder / ("settings.toml" if number % 2 else f"data{suffix}")
        if number % 2:
            path.write_text(config)
            command = ["train", "--config", path, "--output", output, "--steps", 1]
        else:
            texts = {
                ".jsonl": "\n".join(map(json.dumps, table)),
                ".json": json.dumps(table),
                ".csv": "prompt,a\n" + "".join(f"{n}+1,{n + 1}\n" for n in range(8)),
            }
            path.write_text(texts.get(suffix, ""))
            if suffix == ".parquet":
                pq.write_table(pa.table({"prompt": ["a", "b"] * 8, "a": ["c", "d"] * 8}), path)
            kwargs = ["--env-kwargs", f"data={path}", f"rewards={reward}:right"]
            command = ["train", *TINY, "--tracker", "none", "--output", output, "--steps", 1]
            command += ["--env", "gspo/Dataset-v0", *kwargs]
        spoil(path, kind, draw, outside)
        judge(ends, run(*command), f"draw {number}, {kind} of {path.name}", outside, 0, 2)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return f"{draws} spoiled files: {tally(ends)}"


X = "{% set x = 'a' * 99999 %}"
LIST, TWICE = "{% set x = [0] %}", "{% set x = [x, x] %}"
LOOPS = "{% for a in range(200) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "widths": "{{ ('{0:9999}' * 300000).format(1) | length }}",
    "a width from an argument": "{{ ('{0:{1}}' * 300000).format(1, 9999) | length }}",
    "a fill from an argument": "{{ ('{0:{2}>{1}}' * 300000).format(1, 9999, '\u20ac') | length }}",
    "one width": "{{ '{0:180000000}'.format(1) | length }}",
    "widths of %": "{{ ('%09999d' * 9999) % ((1,) * 9999) | length }}",
    "nested lists": LIST + TWICE * 60 + "{{ x | tojson | length }}",
    "nested lists below the bound": LIST + TWICE * 12 + "{{ x | tojson | length }}",
    "reversals": X + "{% for i in range(99999) %}{% set y = (x * 40)[::-1] %}{% endfor %}",
    "reversals of lists": "{% set x = [0] * 9000000 %}"
    "{% for i in range(99999) %}{% set y = x[::-1] %}{% endfor %}",
    "output below the bound": "{{ '\U0001f600' * 260000 }}",
    "memory below the bound": "{{ ([0] * 20000000) | length }}",
    "time below the bound": LOOPS,
}
"""Chat templates that would take much memory or time."""


def case_templates(folder: Path) -> str:
    """Chat templates that would take gigabytes or minutes, and some just below the bounds."""
    train(folder / "run").expect(0)
    model, texts = folder / "run/model", []
    plain = (model / "chat_template.jinja").read_text()
    usual = run("doctor", model).expect(0, 1)
    for name, bomb in TEMPLATES.items():
        (model / "chat_template.jinja").write_text(bomb + plain)
        ended = run("doctor", model).expect(0, 1, 2)
        memory, cpu = ended.memory - usual.memory, ended.cpu - usual.cpu
        if memory > 300 or cpu > 5:
            WRONGS.append(f"{name}: {memory:.0f} MiB, {cpu:.1f} s of CPU\n{ended.output[-500:]}")
        texts.append(f"{name} {ended.code} ({memory:.0f} MiB, {cpu:.1f} s)")
    return ", ".join(texts)


def case_parquet(folder: Path) -> str:
    """Files of episodes of less than 50 KB that would unpack to gigabytes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    train(folder / "run").expect(0)
    (folder / "reward.py").write_text("def right(attempt):\n    return float(len(attempt.text))\n")
    path, texts = min((folder / "run/episodes").glob("*-train.parquet")), []
    usual, words = pq.read_table(path), pa.array(["x" * 300_000])
    bombs: dict[str, tuple[Sequence[str], Any, int]] = {
        "texts": (("observation", "action", "final_observation"), words, 4000),
        "other texts": (("error", "agent", "options", "task_key", "tools"), words, 1400),
        "ids": (("prompt_ids",), pa.array(np.full(20_000_000, 50_000, np.int32)), 1),
        "flags": (("clipped",), pa.array(np.full(40_000_000, True)), 1),
        "nothing": (("advantages", "ratios", "entropies"), pa.nulls(9_000_000, pa.float32()), 1),
    }
    for name, (columns, value, rows) in bombs.items():
        table = usual.take([0] * rows)
        indices = pa.array([0] * rows, pa.int32())
        column = pa.DictionaryArray.from_arrays(indices, value) if rows > 1 else None
        if column is None:
            column = pa.ListArray.from_arrays(pa.array([0, len(value)], pa.int32()), value)
        for each in columns:
            table = table.set_column(table.schema.get_field_index(each), each, column)
        pq.write_table(table, path, store_schema=False, compression="zstd")
        commands = (["view", "--no-browser"], ["rescore", "--rewards", f"{folder}/reward.py:right"])
        for command, *flags in commands:
            ended = run(command, folder / "run", *flags).expect(0, 2, word="unpacks to more than")
            size = f"{path.stat().st_size >> 10} KiB, {ended.memory:.0f} MiB, {ended.cpu:.1f} s"
            texts.append(f"{name} {command} {ended.code} ({size})")
    return ", ".join(texts)


# Programs

DAEMON = """
import json, os, subprocess, sys, time
def leave_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "hostile-daemon"],
                     start_new_session=True)
"""
PROGRAM = (
    DAEMON
    + """
import http.client
from urllib.parse import urlparse
task, kind = json.load(sys.stdin), sys.argv[1]
if kind == "hang":
    time.sleep(1000)
if kind == "die":
    os.kill(os.getpid(), 9)
if kind == "flood":
    for _ in range(200):
        os.write(1, b"x" * 1_000_000)
        os.write(2, b"y" * 1_000_000)
if kind == "daemon":
    leave_child()
place = urlparse(os.environ["OPENAI_BASE_URL"])
line = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
body = json.dumps({"messages": [{"role": "user", "content": "yes or no"}]})
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
if kind == "garbage":
    body = "{[" * 99
line.request("POST", place.path + "/chat/completions", body, head)
answer = line.getresponse()
if kind == "half":
    os._exit(0)
answer.read()
print({"garbage": "{" * 1000, "nan": "NaN"}.get(kind, "1.0"))
"""
)
SERVER = (
    DAEMON
    + """
kind = sys.argv[1]
if kind == "daemon":
    leave_child()
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method, result = message["method"], {}
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}},
                  "serverInfo": {"name": "x", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        if kind == "hang":
            time.sleep(1000)
        if kind == "die":
            os.kill(os.getpid(), 9)
        for _ in range({"garbage": 1, "flood": 100}.get(kind, 0)):
            print("{[" * 500_000, flush=True)
        result = {"content": [{"type": "text", "text": "ok"}]}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
)
CALLER = """
from gspo_env.tools.tool import format_tool_call
from gspo_envs.tools.mcp.env import MCPEnv
class Caller(MCPEnv):
    def expert_action(self, noise=0.0):
        return format_tool_call("t", {})
"""


def with_programs(folder: Path, script: str, kinds: str, *flags: str) -> str:
    """Trains with each kind of a program; nothing of it may be left."""
    (folder / "script.py").write_text(script)
    (folder / "caller.py").write_text(CALLER)
    (folder / "data.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    texts = []
    for kind in kinds.split():
        command = json.dumps([sys.executable, "-S", f"{folder}/script.py", kind])
        filled = [flag.replace("COMMAND", command) for flag in flags]
        ended = train(folder / kind, *filled, f"data={folder}/data.jsonl", "held_out=0.5")
        try:
            check_processes(kind, f"{folder}/script.py", "hostile-daemon")
            ended.expect(*((0,) if kind == "fine" else (0, 2)))
        except Wrong as wrong:
            WRONGS.append(f"{wrong}\n{ended.output[-1000:]}")
        texts.append(f"{kind} {ended.code} ({ended.seconds:.0f} s)")
    return ", ".join(texts)


def case_programs(folder: Path) -> str:
    """Programs that hang, die, flood, write garbage, leave children, or go while they ask."""
    kinds, once = "fine hang die flood daemon garbage half nan", ("--steps", "1")
    more = ("--max-retries", "0", "--env", "gspo/Program-v0", "--env-kwargs", "command=COMMAND")
    return with_programs(folder, PROGRAM, kinds, *once, *more, "timeout=5", "silence=3")


def case_tool_servers(folder: Path) -> str:
    """MCP servers that hang, die, flood, write garbage, or leave children."""
    if importlib.util.find_spec("mcp") is None:
        return "NOT RUN, it needs the extra mcp"
    kinds, env = "fine hang die flood daemon garbage", f"{folder}/caller.py:Caller"
    kwargs = ('servers={"w": COMMAND}', "timeout=2", "max_turns=2")
    return with_programs(
        folder, SERVER, kinds, "--steps", "1", "--env", env, "--env-kwargs", *kwargs
    )


# Kills


def case_kills(folder: Path, kills: int = 20) -> str:
    """Trainings and comparisons are killed at random moments, many of them in imitation."""
    draw, where = random.Random(SEED), Counter[str]()
    reference, compared = folder / "reference", folder / "compared"
    seconds = run("train", *SHORT, "--output", reference).expect(0).seconds
    long = run("compare", *COMPARE, "--output", compared).expect(0).seconds
    for number in range(kills):
        place = folder / f"run{number}"
        if number % 4 == 3:
            command = ["compare", *COMPARE, "--output", place]
            killed = Command(*command)
            time.sleep(draw.uniform(0.1, 1.0) * long)
            where["comparison" if killed.kill().code else "ended"] += 1
            time.sleep(1)
            run(*command).expect(0)
            names = [p.relative_to(compared) for p in compared.rglob("metrics.jsonl")]
            changed = [
                n for n in names if kill_resume.points(compared / n.parent)
                != kill_resume.points(place / n.parent)
            ]  # fmt: skip
        else:
            killed = Command("train", *SHORT, "--output", place)
            if number % 4 == 1:
                kill_resume.until_first(killed.pid, place)
            time.sleep(draw.uniform(0.0, 0.5) * seconds)
            code, steps = killed.kill().code, any(place.glob("checkpoints/step-*"))
            where["after a checkpoint" if steps else "before a checkpoint" if code else "end"] += 1
            if not (place / "config.toml").exists():
                run("train", "--resume", place).expect(2)
                continue
            place = resume(place)
            changed = [text] if (text := kill_resume.differences(reference, place)) else []
        if changed or parts(place):
            raise Wrong(f"kill {number}: {changed} differ, {parts(place)} are left")
    return f"{kills} kills, {dict(where)}; all ended as the undisturbed ones"


CASES = {name[5:]: case for name, case in list(globals().items()) if name.startswith("case_")}


def main() -> None:
    """Runs the cases and prints their table."""
    global SCRATCH, SEED
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.list:
        for name, case in CASES.items():
            print(f"{name:20} {case.__doc__}")
        return
    inputs.import_all()
    SEED, wrong, begun = options.seed, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        SCRATCH = Path(scratch)
        os.environ |= {"XDG_STATE_HOME": f"{scratch}/state", "COLUMNS": "200"}
        print("case                 seconds   CPU   MiB  verdict")
        for name in options.only:
            folder, start, used = SCRATCH / name, time.monotonic(), cpu_seconds()
            folder.mkdir()
            os.chdir(folder)
            WRONGS.clear()
            PEAK[0], text = 0.0, ""
            try:
                text = CASES[name](folder)
            except Wrong as error:
                WRONGS.append(str(error))
            except Exception:
                WRONGS.append(traceback.format_exc())
            verdict = f"{len(WRONGS)} WRONG" if WRONGS else "right"
            wrong += bool(WRONGS)
            seconds = f"{time.monotonic() - start:7.0f} {cpu_seconds() - used:5.0f}"
            print(f"{name:20} {seconds} {PEAK[0]:5.0f}  {verdict}: {text}")
            for each in WRONGS:
                print(f"    {each}")
            sys.stdout.flush()
            os.chdir(scratch)
            shutil.rmtree(folder)
    print(f"{len(options.only)} cases, {wrong} wrong, {time.monotonic() - begun:.0f} s")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
