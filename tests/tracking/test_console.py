import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from gspo_env.tracking import Progress

PROGRAM = """
import logging, os, signal, sys
from gspo_env.redaction import log_to_terminal
from gspo_env.tracking import Progress
log_to_terminal()
signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a background job
with Progress() as progress:
    progress.begin("start", 0, 10)
    progress.update("train", 3, 10, success=0.25)
    print("printed")
    logging.getLogger("lib").warning("a warning")
    progress.update("evaluate", 3, 10, success=0.5)
    {end}
"""


def run_in_terminal(end):
    """What a program writes to a terminal, and its exit code."""
    main, child = pty.openpty()
    env = {n: v for n, v in os.environ.items() if n not in ("CI", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        **{"stdin": child, "stdout": child, "stderr": child},
        env=env | {"TERM": "xterm-256color", "COLUMNS": "120"},
    )
    os.close(child)
    raw, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline and select.select([main], [], [], 30)[0]:
        try:
            raw += os.read(main, 65536)
        except OSError:  # Linux: the last program has closed the terminal
            break
    os.close(main)
    return raw.decode(), process.wait()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("signal.raise_signal(signal.SIGINT)", 1),
        ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_terminal_has_a_live_line_and_its_cursor_however_the_program_ends(end, code):
    shown, exit_code = run_in_terminal(end)
    assert exit_code in (code, -signal.SIGINT if code == 1 else code)
    lines = [line.strip() for line in shown.splitlines()]
    assert any(line.endswith("printed") for line in lines)
    assert any("WARNING a warning" in line for line in lines)
    assert any("evaluate 3/10  success 50.0%" in line for line in lines)
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor is visible


@pytest.mark.parametrize("env", [{"CI": "1"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_where_a_live_line_is_not_wanted_there_is_a_plain_line_for_each_update(env, monkeypatch):
    class Stream(io.StringIO):
        flushed = 0

        def isatty(self):
            return bool(env)

        def flush(self):
            self.flushed += 1

    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    stream = Stream()
    with Progress(stream) as progress:
        progress.begin("start", 0, 4)
        progress.update("imitation", 1, 4, loss=0.5, lost=None)
        progress.update("train", 2, 10, success=0.5, mean_return=0.25, return_std=0.125)
        progress.update("train", 2, 10, best=0.75, clipped=0.031, tokens_per_second=1234.4, lost=2)
        progress.line("[bold]not markup[/bold] " + "x" * 300)
    assert stream.getvalue().splitlines() == [
        "imitation 1/4  loss 0.5000",
        "train 2/10  success 50.0%  return 0.250  std 0.125",
        "train 2/10  best 75.0%  clipped 3.1%  1,234 tokens/s  2 lost",
        "[bold]not markup[/bold] " + "x" * 300,
    ]
    assert stream.flushed >= 4


def test_time_left_follows_the_pace_and_a_phase_can_begin_anew(monkeypatch):
    now = 0.0
    monkeypatch.setattr("gspo_env.tracking.console.time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress(stream)
    progress.update("train", 5, 9)  # a resumed run: steps 1 to 5 do not count for the speed
    now += 20.0
    progress.update("train", 6, 9)
    now += 3600.0
    for step in (1, 2, 1):
        progress.update("evaluate", step, 2)
    progress.update("train", 8, 9)
    assert stream.getvalue().splitlines() == [
        "train 5/9",
        "train 6/9  0:01:00 left",
        *("evaluate 1/2", "evaluate 2/2", "evaluate 1/2"),
        "train 8/9  0:20:07 left",
    ]


def test_what_takes_long_is_shown_every_few_seconds_and_nothing_else(monkeypatch):
    now = 100.0
    monkeypatch.setattr("gspo_env.tracking.console.time.monotonic", lambda: now)
    stream = io.StringIO()
    show = Progress(stream).when_slow()
    for step in range(1, 10):
        now += 0.5
        show("demonstrations", step, 9)
    assert stream.getvalue().splitlines()[0] == "demonstrations 4/9"
    assert len(stream.getvalue().splitlines()) == 2


def test_a_terminal_without_unicode_gets_a_line_that_it_can_show():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(stream).line("a folder: \N{GREEK SMALL LETTER ALPHA}")
    stream.seek(0)
    assert stream.read() == "a folder: ?\n"
