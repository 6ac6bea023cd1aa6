"""The panel on a real pseudo-terminal, whose screen is emulated."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import shutil
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from gspo_env.tracking.console import Numbers, Pace, Screen, duration
from gspo_env.tracking.parts import part, running
from gspo_env.tracking.progress import Progress

HOSTILE = "hello \x1b[2J\x1b]0;title\x07 \u202e sk-abcdefghijklmnopqrstuvwxyz"
PROGRAM = """
import logging, sys, threading, time
logging.getLogger("lib").addHandler(logging.StreamHandler())  # it holds the stderr before the panel
from gspo_env.tracking.console import Numbers
from gspo_env.tracking.progress import Progress
with Progress() as progress:
    progress.begin("start", 0, 1000, title="runs/one")
    progress.exchange("step 1", [("user", {hostile!r}), ("policy", "answer")])
    for step in range(1, 1000):
        progress.update("train", step, 1000, Numbers(success=step / 1000, tokens_per_second=1234.0))
        time.sleep(0.02)
        if step == 3:
            logging.getLogger("lib").warning("warning " + "w" * 20)
            print("printed", flush=True)
            {body}
print("over")
"""


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str], rows: int, columns: int, **env: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)  # whatever the shell of the tests ignores
            left_out = ("CI", "NO_COLOR", "COLUMNS", "LINES")  # readline sets the last two
            kept = {name: value for name, value in os.environ.items() if name not in left_out}
            os.execvpe(command[0], command, {**kept, "TERM": "xterm-256color", **env})
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw, self.open = b"", True

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def modes(self) -> tuple[bool, bool]:
        """Whether lines are edited, and whether what is typed is shown."""
        flags = termios.tcgetattr(self.fd)[3]
        return bool(flags & termios.ICANON), bool(flags & termios.ECHO)

    def until(self, seen: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < end, self.text
            self.read()

    def read(self) -> None:
        if self.open and select.select([self.fd], [], [], 0.05)[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # Linux: the last program has closed the terminal
                data = b""
            self.open = bool(data)
            self.raw += data
            self._stream.feed(data)

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())


@contextmanager
def program(
    body: str = "pass", rows: int = 24, columns: int = 80, **env: str
) -> Iterator[Terminal]:
    command = [sys.executable, "-c", PROGRAM.format(hostile=HOSTILE, body=body)]
    terminal = Terminal(command, rows, columns, **env)
    try:
        yield terminal
    finally:
        close(terminal)


def close(terminal: Terminal) -> None:
    with suppress(ProcessLookupError):
        os.kill(terminal.pid, signal.SIGKILL)
    os.waitpid(terminal.pid, 0)
    os.close(terminal.fd)


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (50, 200)])
def test_the_panel_shows_the_run_and_an_exchange_on_a_key_below_what_is_printed(
    rows: int, columns: int
) -> None:
    with program(rows=rows, columns=columns) as terminal:
        terminal.until(lambda: "1,234" in terminal.text and "printed" in terminal.text)
        terminal.until(lambda: [len(s) for s in terminal.text.splitlines()[2:8]] == [columns] * 6)
        lines = terminal.text.splitlines()
        assert lines[0] == "warning " + "w" * 20
        assert lines[1] == "printed"
        assert lines[2].startswith("╭─ runs/one ─")
        assert "of 1000" in lines[3]
        assert "v shows an exchange" in lines[7]
        assert terminal.modes == (False, False)
        terminal.type("v")
        terminal.until(lambda: "policy: answer" in terminal.text)
        assert "user: hello \\x1b[2J\\x1b]0;title\\x07 \\u202e [redacted]" in terminal.text
        terminal.type("xv")
        terminal.until(lambda: "policy: answer" not in terminal.text)
        assert lines[:2] == terminal.text.splitlines()[:2]


@pytest.mark.parametrize(
    ("leave", "body"),
    [
        ("\x03", "pass"),
        (signal.SIGTERM, "pass"),
        (signal.SIGHUP, "pass"),
        (None, "raise RuntimeError('boom')"),
        (None, "sys.exit(3)"),
    ],
)
def test_the_terminal_is_as_before_however_the_program_ends(leave: Any, body: str) -> None:
    with program(body) as terminal:
        if leave is not None:
            terminal.until(lambda: "v shows an exchange" in terminal.text)
        if isinstance(leave, str):
            terminal.type(leave)
        elif leave is not None:
            os.kill(terminal.pid, leave)
        terminal.until(lambda: not terminal.open)
        assert terminal.modes == (True, True)
        assert not terminal.screen.cursor.hidden
        if leave in (signal.SIGTERM, signal.SIGHUP):  # as without a handler
            ended = os.waitid(os.P_PID, terminal.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            assert ended.si_status == leave


@contextmanager
def suspended(folder: Path, body: str = "pass", seen: str = "printed") -> Iterator[Terminal]:
    """A program that Ctrl-Z has stopped after it printed, in a shell with job control."""
    (folder / "program.py").write_text(PROGRAM.format(hostile=HOSTILE, body=body))
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], 24, 80, PS1="$ ")
    try:
        terminal.type(f"{sys.executable} {folder}/program.py\n")
        terminal.until(lambda: "v shows" in terminal.text and f"\n{seen}" in terminal.text)
        terminal.type("\x1a")
        terminal.until(lambda: "Stopped" in terminal.text)
        yield terminal
    finally:
        terminal.type("\x03")
        close(terminal)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
@pytest.mark.parametrize(
    "body",
    [
        "live._FASTEST = 60; time.sleep(1); print('later')",
        "lock = live._panels[-1]._live._lock; lock.acquire(); print('later'); time.sleep(2);"
        "lock.release()",  # what a thread holds while it prints
    ],
    ids=["between two pictures", "while the run prints"],
)
def test_the_panel_goes_away_before_a_run_is_suspended_whatever_both_do(
    tmp_path: Path, body: str
) -> None:
    with suspended(tmp_path, f"from gspo_env.tracking import live; {body}", "later") as terminal:
        assert "v shows" not in terminal.text


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_a_suspended_run_leaves_the_terminal_and_takes_it_again(tmp_path: Path) -> None:
    with suspended(tmp_path) as terminal:
        assert "v shows" not in terminal.text
        assert not terminal.screen.cursor.hidden
        terminal.type("stty -a | grep -o '.icanon'; bg; sleep 1; echo in-$((1 + 1)) \n")
        terminal.until(lambda: "in-2" in terminal.text)
        assert "\n icanon" in terminal.text
        assert "v shows" not in terminal.text  # in the background
        terminal.type("fg\n")
        terminal.until(lambda: "v shows an exchange" in terminal.text)
        terminal.until(lambda: terminal.modes == (False, False))
        terminal.type("v")
        terminal.until(lambda: "policy: answer" in terminal.text)


@pytest.mark.parametrize(
    "body",
    [
        "print('got', repr(input('say: ')))",
        "print('say: ', flush=True); print('got', repr(sys.stdin.readline()))",
        "t = threading.Thread(target=lambda: print('got', repr(input('say: '))));"
        "t.start(); t.join()",
    ],
    ids=["input", "readline", "thread"],
)
def test_an_environment_that_reads_the_keyboard_gets_all_of_it(body: str) -> None:
    with program(body) as terminal:
        terminal.until(lambda: "say:" in terminal.text)
        terminal.until(lambda: terminal.modes == (True, True))
        terminal.type("vivid\n")
        terminal.until(lambda: b"got 'vivid" in terminal.raw)
        terminal.until(lambda: "train 9/1000" in terminal.text)  # lines from here on


@pytest.mark.parametrize("env", [{"CI": "1"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_where_a_display_is_not_wanted_a_terminal_gets_lines(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    stream = Stream()
    with Progress(stream) as progress:
        progress.begin("start", 0, 2)
        progress.update("train", 1, 2, Numbers(success=0.5))
    assert stream.getvalue() == "train 1/2  success 50.0%\n"


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 220),
    height=st.integers(1, 60),
    text=st.text(max_size=200),
    is_open=st.booleans(),
    encoding=st.sampled_from(["utf-8", "ascii", "latin-1"]),
)
def test_no_text_and_no_size_breaks_the_picture(
    width: int, height: int, text: str, is_open: bool, encoding: str
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = Console(
        file=stream, width=width, height=height, force_terminal=True, color_system=None
    )
    screen = Screen(memory=lambda: "1.2 GB", title=text, phase="train", step=3, total=9)
    screen.numbers = Numbers(success=0.5, best=0.6, best_step=2, return_=-1e9, spread=0.1, lost=3)
    screen.exchange, screen.open, screen.keys = (text, [("user", text)]), is_open, True
    screen.pace = Pace(first=1, last=3)
    lines = console.render_lines(screen, pad=False)
    assert len(lines) <= height
    for line in lines:
        assert sum(segment.cell_length for segment in line) <= width
        assert not any(ord(c) < 32 or 126 < ord(c) < 160 for s in line for c in s.text)
        for segment in line:
            segment.text.encode(encoding)


def test_the_panel_shows_which_part_of_a_step_runs_now_and_for_how_long() -> None:
    def shown(width: int) -> str:
        console = Console(file=io.StringIO(), width=width, height=24, force_terminal=True)
        with console.capture() as capture:
            console.print(Screen(memory=lambda: "1.2 GB", phase="train", step=3, total=9))
        return capture.get()

    assert "now" not in shown(80)
    with part("update"):
        with part("scoring"):
            assert "now" in shown(80)
            assert "scoring 1 s" in shown(80)
            assert "scoring 1 s" in shown(43)  # one line
        assert "update 1 s" in shown(80)
    assert running() is None


def test_times_are_short() -> None:
    shown = [duration(seconds) for seconds in (0.2, 59.5, 61, 3600, 86400)]
    assert shown == ["1 s", "1 min 00 s", "1 min 01 s", "1 h 00 min", "1 d 0 h"]
