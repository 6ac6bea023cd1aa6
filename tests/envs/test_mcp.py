"""Tools of real MCP servers: a fault of a server is an observation, never an exception."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gspo_env.check.environment import check_env
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.registration import make_env
from gspo_env.env.tool_env import ToolEnv
from gspo_env.env.tools import format_tool_call, tool
from gspo_env.errors import ConfigError, ToolServerError
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import Task
from gspo_envs.tools.mcp import session as mcp_session
from gspo_envs.tools.mcp.env import MCPServer, MCPTools
from gspo_envs.tools.mcp.session import MCPSession

pytest.importorskip("mcp")
pytestmark = pytest.mark.adapters

SERVER = str(Path(__file__).parents[1] / "mcp_server.py")
STDIO = [sys.executable, SERVER]
DATA = [{"prompt": "What is 2 + 3?", "answer": "5"}]


def right(attempt):
    return float(attempt.text == attempt.row["answer"])


@contextlib.contextmanager
def http_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*STDIO, str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def http():
    with http_server() as (url, _):
        yield url


@pytest.fixture(params=["stdio", "http"])
def server(request):
    """One server for each transport; tests that kill a server start another one."""
    return STDIO if request.param == "stdio" else request.getfixturevalue("http")


def make(server, **kwargs):
    given = {"data": DATA, "rewards": right, "servers": {"workshop": server}} | kwargs
    return make_env("gspo/MCP-v0", **given)


@pytest.fixture
def play():
    """Make environments and close them."""
    with contextlib.ExitStack() as stack:

        def start(server, **kwargs):
            env = make(server, **kwargs)
            stack.callback(env.close)
            env.reset(seed=0)
            return env

        yield start


def call(env, tool_name, /, **arguments):
    return env.step(format_tool_call(tool_name, arguments))


def alive(pid):
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


def test_a_servers_tools_are_announced_called_and_lead_to_a_reward(server, play):
    env = play(server)
    tools = {one.name: one for one in env.get_wrapper_attr("tools")}
    assert list(tools)[:3] == ["add", "remember", "divide"]
    assert tools["add"].description == "Add two numbers."
    assert tools["add"].parameters["properties"]["a"]["type"] == "integer"
    observation, reward, terminated, truncated, info = call(env, "add", a=2, b=3)
    assert (observation, reward, terminated, truncated) == ("5", 0.0, False, False)
    assert info == {"observation_role": "tool"}
    assert env.step("5")[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("divide", {"a": 1, "b": 0}, "Error: divide failed: ToolServerError: "),
        ("add", {"a": 1}, "Error: wrong arguments for add: arguments: Value error, 'b' is a req"),
        ("add", {"a": "x", "b": 1}, "a: 'x' is not of type 'integer'"),
        ("subtract", {}, "Error: unknown tool 'subtract'"),
    ],
)
def test_what_a_server_refuses_is_an_observation(server, play, name, arguments, message):
    env = play(server)
    observation, _, terminated, truncated, info = call(env, name, **arguments)
    assert message in observation
    assert (terminated, truncated, info["tool_errors"]) == (False, False, 1)
    assert call(env, "add", a=1, b=1)[0] == "2"


def test_a_server_that_hangs_costs_the_turn_and_is_started_anew(play):
    env = play(STDIO, timeout=8.0)
    before = int(call(env, "pid")[0])
    assert "no answer in 8 seconds" in call(env, "hang")[0]
    after = int(call(env, "pid")[0])
    assert after != before
    env.close()
    assert not alive(after)
    assert not alive(before)


def test_a_slow_call_does_not_end_a_server_that_answers_others(http):
    one, two = (make(http, session="process", timeout=2.0) for _ in range(2))
    for env in (one, two):
        env.reset(seed=0)
    call(one, "remember", word="kept")
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(call, one, "slow", seconds=60)
        while not late.done():
            assert "kept" in call(two, "remember", word="x")[0]
            two.reset(seed=0)
            time.sleep(0.1)
    assert "no answer in 2 seconds" in late.result()[0]
    assert call(two, "add", a=1, b=1)[0] == "2"


def test_a_server_that_dies_costs_the_turn_and_is_started_anew(play):
    env = play(STDIO)
    before = call(env, "pid")[0]
    observation, _, terminated, truncated, info = call(env, "die")
    assert (
        observation == "Error: die failed: ToolServerError: the connection to the server was lost"
    )
    assert (terminated, truncated, info["tool_errors"]) == (False, False, 1)
    assert call(env, "pid")[0] != before


def test_an_http_server_that_is_gone_is_an_observation_until_it_is_back():
    with http_server() as (url, process):
        env = make(url, timeout=5.0)
        env.reset(seed=0)
        assert call(env, "add", a=1, b=1)[0] == "2"
        process.kill()
        process.wait()
        for _ in range(2):
            observation, _, terminated, _, _ = call(env, "add", a=1, b=1)
            assert observation.startswith("Error: add failed: ToolServerError: ")
            assert not terminated
        again = make(url, timeout=5.0)  # the tools have been listed
        again.reset(seed=0)
        assert call(again, "add", a=1, b=1)[0].startswith("Error: add failed")
        revived = subprocess.Popen(
            [*STDIO, url.split(":")[2].removesuffix("/mcp")], stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 60
            while call(env, "add", a=1, b=1)[0] != "2":
                env.reset(seed=0)
                assert time.monotonic() < deadline
        finally:
            env.close()
            again.close()
            revived.kill()
            revived.wait()


def test_a_server_that_never_was_is_one_clear_error():
    for server, words in (
        (["/no/such/program"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit('bad key')"], "bad key"),
        ("http://127.0.0.1:9/mcp", "cannot be used"),
    ):
        with pytest.raises(ToolServerError, match=f"MCP server 'workshop'.*{words}"):
            make(server).reset(seed=0)


@pytest.mark.parametrize("session", ["episode", "env", "process"])
def test_a_server_lives_as_long_as_its_session_says(play, session):
    one, two = play(STDIO, session=session), play(STDIO, session=session)
    assert call(one, "remember", word="a")[0] == "a"
    one.reset(seed=0)
    again = call(one, "remember", word="b")[0]
    other = call(two, "remember", word="c")[0]
    expected = {"episode": ("b", "c"), "env": ("a b", "c"), "process": ("a b", "a b c")}
    assert (again, other) == expected[session]


def test_closing_ends_the_server_and_a_reset_starts_one(play):
    env = play(STDIO)
    first = int(call(env, "pid")[0])
    env.close()
    assert not alive(first)
    env.reset(seed=0)
    assert int(call(env, "pid")[0]) != first


def test_the_end_of_the_program_ends_a_hanging_server():
    code = (
        "import sys; from gspo_env.env.registration import make_env\n"
        "from gspo_env.env.tools import format_tool_call as call\n"
        f"env = make_env('gspo/MCP-v0', data=[{{'prompt': ''}}], servers={{'w': {STDIO!r}}},"
        " timeout=8.0)\n"
        "env.reset(seed=0); print(env.step(call('pid', {}))[0]); env.step(call('hang', {}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not alive(int(done.stdout))


def test_a_long_result_is_cut(play):
    env = play(STDIO)
    observation = call(env, "flood", count=10**6)[0]
    assert observation.endswith("... (cut, 1000000 characters)")
    assert len(observation) < 8300


def test_a_started_server_gets_its_own_variables_and_none_of_ours(play, monkeypatch):
    monkeypatch.setenv("SECRET_OF_OURS", "no")
    env = play({"command": sys.executable, "args": [SERVER], "env": {"KEY": "yes"}})
    assert call(env, "variable", name="KEY")[0] == "yes"
    assert call(env, "variable", name="SECRET_OF_OURS")[0] == "none"


def test_headers_reach_an_http_server(play, http):
    env = play({"url": http, "headers": {"X-Key": "open sesame"}})
    assert call(env, "header", name="x-key")[0] == "open sesame"


def test_many_environments_call_at_once_and_each_gets_its_own_answer(http):
    envs = [make(http, session="process" if n % 2 else "env") for n in range(16)]

    def play_one(n):
        envs[n].reset(seed=0)
        return [call(envs[n], "add", a=n, b=k)[0] for k in range(7)]

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(play_one, range(16)))
    assert answers == [[str(n + k) for k in range(7)] for n in range(16)]
    for env in envs:
        env.close()


class WorkbenchEnv(MCPTools):
    """An environment with one tool, plus the tools of a server."""

    mcp_servers = {"workshop": STDIO}  # noqa: RUF012
    mcp_only = ("add",)

    @tool
    def look(self) -> str:
        """Look around."""
        return "a bench"

    def on_final(self, text):
        return "done", 1.0, True


def test_the_mix_in_adds_to_the_tools_of_an_environment():
    env = WorkbenchEnv()
    env.reset(seed=0)
    assert [one.name for one in env.tools] == ["look", "add"]
    assert call(env, "look")[0] == "a bench"
    assert call(env, "add", a=2, b=2)[0] == "4"
    assert env.step("bye")[:3] == ("done", 1.0, True)
    env.close()
    assert issubclass(MCPTools, ToolEnv)


def test_wrong_settings_are_refused(http):
    for spec in ([], {}, {"url": "ftp://x"}, {"command": "a", "url": "http://b"}, {"port": 3}, 7):
        with pytest.raises(ConfigError, match="MCP server 'w' is"):
            MCPServer.parse("w", spec)
    with pytest.raises(ConfigError, match="session is 'turn'"):
        make(http, session="turn")
    with pytest.raises(ConfigError, match="no server has a tool 'subtract'"):
        make(http, only=["subtract"]).reset(seed=0)
    with pytest.raises(ConfigError, match="two tools 'add'"):
        make(http, servers={"a": http, "b": http}).reset(seed=0)


def test_it_keeps_the_contract(http):
    check_env(make(http, only=["add", "divide"], timeout=10.0))


class DoomedEnv(MCPTools):
    """An environment whose server dies at every action."""

    mcp_servers = {"workshop": STDIO}  # noqa: RUF012
    mcp_only = ("die",)

    def step(self, action):
        return super().step(format_tool_call("die", {}))


def test_a_rollout_goes_on_when_every_server_dies(player):
    settings = RolloutConfig(max_turns=2, concurrency=2, max_context=2048)
    engine = TransformersEngine(player.model, max_slots=2, max_context=settings.max_context)
    pool = EnvPool(DoomedEnv)
    collector = Collector(engine, player.chat, pool, settings)
    tasks = [Task(env_id="test", seed=seed) for seed in range(2)]
    groups = asyncio.run(collector.collect(tasks, seed=0, group_size=2))
    pool.close()
    turns = [turn for group in groups for e in group.episodes for turn in e.turns]
    assert not any(e.faults for g in groups for e in g.episodes)
    assert sum(turn.info.extra.get("tool_errors", 0) for turn in turns) > 0


def test_secrets_are_named_by_their_variables(play, http, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "open sesame")
    stdio = {"command": sys.executable, "args": [SERVER]}
    for env in (["OUR_KEY"], {"OUR_KEY": "${OUR_KEY}"}):
        assert call(play({**stdio, "env": env}), "variable", name="OUR_KEY")[0] == "open sesame"
    remote = {"url": http, "headers": {"X-Key": "say ${OUR_KEY}"}}
    assert call(play(remote), "header", name="x-key")[0] == "say open sesame"
    for spec in ({**stdio, "env": ["NOT_SET"]}, {"url": http, "headers": {"X": "${NOT_SET}"}}):
        with pytest.raises(ConfigError, match="the environment variable NOT_SET"):
            MCPServer.parse("w", spec)
    with pytest.raises(ConfigError) as error:
        MCPServer.parse("w", {"env": {"KEY": "open sesame"}})
    assert "open sesame" not in str(error.value)


def test_at_our_exit_all_connections_are_closed_at_the_same_time(monkeypatch):
    """A server that ignores the end of its input takes seconds."""
    together = asyncio.Barrier(3)

    async def finish(session):
        await asyncio.wait_for(together.wait(), 5)

    sessions = [MCPSession(MCPServer(name=str(n))) for n in range(3)]
    monkeypatch.setattr(MCPSession, "_finish", finish)
    monkeypatch.setattr(mcp_session, "_ALIVE", sessions)
    for session in sessions:
        monkeypatch.setattr(session, "_ending", {"a task"})
    mcp_session._close_all()
