"""Hostile MCP servers: what they may cost; every failure is an observation or one clear error."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.jails import eventually, is_alive, serving

from gspo_env.env.registration import make_env
from gspo_env.errors import ToolServerError
from gspo_env.tools.tool import format_tool_call

pytest.importorskip("mcp")
pytestmark = pytest.mark.adapters

SERVER = str(Path(__file__).parents[1] / "support" / "mcp_hostile.py")


@pytest.fixture
def play():
    """Make environments and close them."""
    with contextlib.ExitStack() as stack:

        def start(kind, url=None, **kwargs):
            server = url or [sys.executable, SERVER, kind]
            given = {"data": [{"prompt": "x"}], "timeout": 20.0, **kwargs}
            env = make_env("gspo/MCP-v0", servers={"w": server}, **given)
            stack.callback(env.close)
            env.reset(seed=0)
            return env

        yield start


def call(env, **arguments):
    observation, _, terminated, truncated, info = env.step(format_tool_call("t", arguments))
    assert not terminated
    assert not truncated
    assert len(observation) < 9000
    return observation, info.get("tool_errors", 0)


@pytest.mark.parametrize("kind", ["pattern", "names", "structured"])
def test_no_regular_expression_of_a_server_runs_here(play, kind):
    env = play(kind)
    evil = "a" * 40 + "!"
    shown, faults = call(env, **({evil: 1} if kind == "names" else {"a": evil}))
    assert (shown.partition("\n")[0], faults) == ("ok", 0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("type", "'nonsense' is not valid"),
        ("list", "valid dictionary|is not of type 'object'"),
        ("nowhere", "nowhere"),
        ("remote", "it refers to 'http://127.0.0.1:9/schema', expected a part of itself"),
        ("number", "'x' is not of type 'integer'"),
        ("zero", "multipleOf|minimum"),
        ("wide", "more than 3000 parts"),
        ("long", "more than 65536 characters"),
        ("deep", "deeper than 100 levels"),
        ("name", "its name is not"),
        ("description", "more than 20000 characters"),
        ("together", "more than 10000 objects together"),
        ("many", "lists more than 500 tools"),
        ("pages", "50 pages"),
        ("exits", "it does not start"),
    ],
)
def test_a_listing_that_cannot_be_used_is_one_clear_error(play, kind, words):
    with pytest.raises(ToolServerError, match=words) as error:
        play(kind)
    assert len(str(error.value)) < 1200


@pytest.mark.parametrize("kind", ["loop", "doubling"])
def test_a_schema_that_never_ends_is_an_observation(play, kind):
    observation, errors = call(play(kind), a="x")
    assert "the tool's schema cannot be applied" in observation
    assert errors == 1


@pytest.mark.parametrize("kind", ["unique", "choices", "alternatives", "passes"])
def test_the_work_of_a_check_is_bounded(play, kind):
    env = play(kind)
    assert call(env, a=[{}, {"b": 1}]) == ("ok", 0)
    observation, errors = call(env, a=[{"b": 1}] * 5000)
    assert "too much work" in observation
    assert errors == 1


@pytest.mark.parametrize(("kind", "value"), [("choice", "apple"), ("broken pattern", "x")])
def test_a_pattern_is_left_to_the_server(play, kind, value):
    assert call(play(kind), a=value) == ("ok", 0)


@pytest.mark.parametrize(
    ("kind", "words", "errors"),
    [
        ("big error", "(cut, 800000 characters)", 1),
        ("big refusal", "(cut, ", 1),
        ("big result", "the connection to MCP server 'w' was lost", 1),
        ("values", "the connection to MCP server 'w' was lost", 1),
        ("endless", "the connection to MCP server 'w' was lost", 1),
        ("blocks", "[19900 more blocks left out]", 0),
        ("not a result", "MCP server 'w' sent an invalid answer", 1),
        ("bytes", "th\ufffd", 0),
        ("surrogates", "th\ufffd \U0001f600 \\ud800", 0),
        ("nested", "MCP server 'w' refused: ValidationError", 1),
        ("stderr", "ok", 0),
        ("flood", "ok", 0),
    ],
)
def test_what_a_server_sends_is_bounded(play, kind, words, errors):
    env = play(kind)
    for _ in range(2):
        observation, faults = call(env, a="x")
        assert words in observation
        assert faults == errors


@pytest.mark.parametrize("kind", ["no messages", "strange notes"])
def test_lines_that_are_no_messages_are_logged_once(play, kind, caplog):
    env = play(kind)
    for _ in range(2):
        assert call(env, a="x") == ("ok", 0)
    lines = [line for line in caplog.text.splitlines() if "not a message" in line]
    assert len(lines) == (kind == "no messages")
    assert len(caplog.text) < 1000


def test_an_empty_text_of_a_server_is_an_empty_observation(play):
    assert call(play("empty"), a="x") == ("", 0)


@pytest.mark.parametrize("kind", ["compressed", "endless", "events", "event", "values"])
def test_the_body_of_a_response_is_bounded(play, kind):
    with serving("mcp_hostile.py", kind) as (port, _):
        env = play(kind, f"http://127.0.0.1:{port}/mcp", timeout=120.0)  # on a busy machine, too
        observation, errors = call(env, a="x")
    assert observation.startswith("Error: t failed: ToolServerError: ")
    assert "no answer in" not in observation
    assert errors == 1


def test_standard_error_takes_little_space(play, monkeypatch):
    files = []
    real = tempfile.TemporaryFile

    def keep(*args, **kwargs):
        files.append(real(*args, **kwargs))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", keep)
    env = play("stderr")
    for _ in range(3):
        call(env, a="x")
    assert 0 < os.fstat(files[-1].fileno()).st_size <= 1 << 16


OWNER = """
import signal, sys, time
from gspo_env.env.registration import make_env
from gspo_env.tools.tool import format_tool_call
env = make_env("gspo/MCP-v0", data=[{"prompt": ""}], servers={"w": sys.argv[1:]})
env.reset(seed=0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` ignores it
print(env.step(format_tool_call("t", {}))[0], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [9, 15, 1])
def test_a_server_and_what_it_started_die_with_the_trainer(number):
    command = [sys.executable, "-c", OWNER, sys.executable, SERVER, "pids"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        pids = owner.stdout.readline().split()
        before = list(map(is_alive, pids))
        owner.send_signal(number)
    assert before == [True, True, True]
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_closing_ends_what_a_server_started_in_a_session_of_its_own(play):
    env = play("pids")
    pids = call(env, a="x")[0].split()
    env.close()
    assert len(pids) == 3
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_closing_ends_a_stubborn_server(play):
    env = play("stubborn")
    call(env, a="x")
    env.close()
    assert subprocess.run(["pgrep", "-f", f"{SERVER} stubborn"], capture_output=True).stdout == b""
