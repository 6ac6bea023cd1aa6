"""Tools of real MCP servers: a fault of a server is an observation, never an exception."""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.jails import eventually, is_alive, run_python, serving

from gspo_env.check.environment import check_env
from gspo_env.env.registration import make_env
from gspo_env.env.tool_env import ToolEnv
from gspo_env.errors import ConfigError, ToolServerError
from gspo_env.tools.tool import format_tool_call, tool
from gspo_envs.tools.mcp.env import MCPServer, MCPTools

pytest.importorskip("mcp")
pytestmark = pytest.mark.adapters

SERVER = str(Path(__file__).parents[1] / "support" / "mcp_server.py")
STDIO = [sys.executable, SERVER]
DATA = [{"prompt": "What is 2 + 3?", "answer": "5"}]


def right(attempt):
    return float(attempt.text == attempt.row["answer"])


@pytest.fixture(scope="module")
def http():
    with serving("mcp_server.py") as (port, _):
        yield f"http://127.0.0.1:{port}/mcp"


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


@pytest.mark.parametrize(
    ("name", "words"), [("hang", "no answer in 8 seconds"), ("die", "the connection to MCP server")]
)
def test_a_server_that_hangs_or_dies_costs_the_turn_and_is_started_anew(play, name, words):
    env = play(STDIO, timeout=8.0)
    before = call(env, "pid")[0]
    observation, _, terminated, truncated, info = call(env, name)
    assert words in observation
    assert (terminated, truncated, info["tool_errors"]) == (False, False, 1)
    assert call(env, "pid")[0] != before
    assert eventually(lambda: not is_alive(before))


def test_an_http_server_that_is_gone_is_an_observation_until_it_is_back(play):
    with serving("mcp_server.py") as (port, _):
        env = play(f"http://127.0.0.1:{port}/mcp", timeout=5.0)
        assert call(env, "add", a=1, b=1)[0] == "2"
    for _ in range(2):
        observation, _, terminated, _, _ = call(env, "add", a=1, b=1)
        assert observation.startswith("Error: add failed: ToolServerError: ")
        assert not terminated
    play(f"http://127.0.0.1:{port}/mcp")  # the tools have been listed
    with serving("mcp_server.py", port=port):
        assert eventually(lambda: env.reset(seed=0) and call(env, "add", a=1, b=1)[0] == "2")


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


def test_the_end_of_the_program_ends_a_hanging_server():
    code = (
        "import sys; from gspo_env.env.registration import make_env\n"
        "from gspo_env.tools.tool import format_tool_call as call\n"
        f"env = make_env('gspo/MCP-v0', data=[{{'prompt': ''}}], servers={{'w': {STDIO!r}}},"
        " timeout=8.0)\n"
        "env.reset(seed=0); print(env.step(call('pid', {}))[0]); env.step(call('hang', {}))\n"
    )
    done = run_python("-c", code, check=True)
    assert not is_alive(done.stdout.strip())


def test_a_long_result_is_cut(play):
    env = play(STDIO)
    observation = call(env, "remember", word="x" * 10**6)[0]
    assert observation.endswith("... (cut, 1000000 characters)")
    assert len(observation) < 8300


TEA = '{"item": "t\u00e9", "n": 3}'


@pytest.mark.parametrize(
    ("texts", "structure", "observation"),
    [
        (["Found it."], TEA, f"Found it.\n{TEA}"),
        ([""], TEA, TEA),
        ([], TEA, TEA),
        (["done", "ok"], '{"result": [1, 2]}', 'done\nok\n{"result": [1, 2]}'),
        (["15 apples"], '{"result": 5}', '15 apples\n{"result": 5}'),
        (["1"], '{"result": true}', '1\n{"result": true}'),
        (["x"], "{}", "x"),
        (["x"], "null", "x"),
        ([TEA], TEA, TEA),
        (['{\n  "n": 3,\n  "item": "t\\u00e9"\n}'], TEA, '{\n  "n": 3,\n  "item": "t\\u00e9"\n}'),
        (["{'item': 't\u00e9', 'n': 3}"], TEA, "{'item': 't\u00e9', 'n': 3}"),
        ([f"```json\n{TEA}\n```"], TEA, f"```json\n{TEA}\n```"),
        (["Found it.", TEA], TEA, f"Found it.\n{TEA}"),
        (["5"], '{"result": 5}', "5"),
        (["5"], '{"result": "5"}', "5"),
        (["5"], '{"count": 5}', '5\n{"count": 5}'),
        (["a", "5"], '{"result": ["a", "5"]}', "a\n5"),
        (["1", '{"n": 2}'], '{"result": [1, {"n": 2}]}', '1\n{"n": 2}'),
        (["[" * 9999], TEA, "[" * 8192 + "... (cut, 10022 characters)"),
    ],
)
def test_the_policy_reads_text_and_structure_once(http, texts, structure, observation):
    with contextlib.closing(make(http, session="process")) as env:
        env.reset(seed=0)
        assert call(env, "result", texts=texts, structure=structure)[0] == observation
        shown = call(env, "result", texts=[], structure=structure, image=True)[0]
        assert shown.split("\n") == ["[image left out]", structure][: 1 + (structure != "null")]


def test_what_has_no_text_is_named(server, play):
    shown = call(play(server), "result", texts=["x"], structure="null", uri="file:///a.bin")[0]
    links = ["[resource_link left out: notes, file:///a.bin]", "[resource left out: file:///a.bin]"]
    assert shown.split("\n") == ["x", *links]


def test_what_a_server_makes_of_a_list_is_read_once(server, play):
    shown = call(play(server), "stock", items=["tea", "jam"])[0]
    assert [shown.count(word) for word in ("tea", "jam", "item", "result")] == [1, 1, 2, 0]


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


def test_secrets_are_named_by_their_variables(play, http, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "open sesame")
    stdio = {"command": sys.executable, "args": [SERVER]}
    for env, value in (
        *((["OUR_KEY"], "open sesame"), ({"OUR_KEY": "${OUR_KEY}"}, "open sesame")),
        *(({"OUR_KEY": "yes"}, "yes"), ({}, "none")),  # ours are not inherited
    ):
        assert call(play({**stdio, "env": env}), "variable", name="OUR_KEY")[0] == value
    remote = {"url": http, "headers": {"X-Key": "say ${OUR_KEY}"}}
    assert call(play(remote), "header", name="x-key")[0] == "say open sesame"
    for spec in ({**stdio, "env": ["NOT_SET"]}, {"url": http, "headers": {"X": "${NOT_SET}"}}):
        with pytest.raises(ConfigError, match="the environment variable NOT_SET"):
            MCPServer.parse("w", spec)
    with pytest.raises(ConfigError) as error:
        MCPServer.parse("w", {"env": {"KEY": "open sesame"}})
    assert "open sesame" not in str(error.value)
