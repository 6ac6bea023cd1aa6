"""Programs in the sandbox: each reaches the address of its own episode, and nothing else."""

import json
import os
import socket
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support.jails import eventually, imprisoned, require_isolation

from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentCrashError, EnvironmentHangError
from gspo_env.sandbox import PORT, find_missing_for_commands
from gspo_env.serving import Reply, address
from gspo_env.types import Message

HEAD = """
import http.client, json, os, sys
from urllib.parse import urlparse
place = urlparse(os.environ["OPENAI_BASE_URL"])
def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    line = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    line.request("POST", place.path + path, json.dumps(body), {"Authorization": "Bearer " + key})
    answer = line.getresponse()
    return answer.status, json.loads(answer.read())
def ask(text):
    return post("/chat/completions", {"messages": [{"role": "user", "content": text}]})
def say(text):
    return ask(text)[1]["choices"][0]["message"]["content"]
task = json.load(sys.stdin)
"""
DATA = [{"question": f"What is 1 + {n}?", "answer": str(n + 1)} for n in range(4)]


@pytest.fixture(scope="module", autouse=True)
def isolation():
    require_isolation(find_missing_for_commands())


@pytest.fixture
def make():
    """Makes environments of commands of Python code in the sandbox, and closes them."""
    made = []

    def one(code="", **kwargs):
        command = [sys.executable, "-S", "-c", HEAD + textwrap.dedent(code)]
        kwargs = {"command": command, "sandbox": True, "silence": 30.0, **kwargs}
        made.append(make_env("gspo/Program-v0", **{"data": DATA, "held_out": 0, **kwargs}))
        return made[-1]

    yield one
    for env in made:
        env.close()


def test_a_program_in_the_sandbox_asks_and_is_answered(make):
    env = make('print(json.dumps(say(task["question"]) == task["answer"] and say("so?") == "ä"))')
    assert env.reset(options={"row": 2})[0] == "What is 1 + 2?"
    assert env.step("3")[:4] == ("so?", 0.0, False, False)
    assert env.step("ä")[:4] == ("", 1.0, True, False)


def test_its_rewards_and_its_failures_arrive(make):
    code = """
        status, answer = ask("one")
        print(post("/reward", {"completion_id": answer["id"], "reward": 0.5})[0], file=sys.stderr)
        say("two")
        sys.exit("it broke" + "!" * 70_000 + "at the end")
    """
    env = make(code)
    env.reset(seed=0)
    assert env.step("a")[:2] == ("two", 0.5)
    with pytest.raises(EnvironmentCrashError, match=r"exit code is 1, .*at the end"):
        env.step("b")


OTHER = """
found = []
found.append(post("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, KEY)[0])
found.append(post("/reward", {"completion_id": NAME, "reward": 9}, KEY)[0])
found.append(post("/reward", {"completion_id": NAME, "reward": 9})[0])
import socket
for port in PORTS:
    try:
        socket.create_connection(("127.0.0.1", port), 5)
        found.append("reached")
    except OSError as error:
        found.append(error.errno)
print(json.dumps({"reward": 0, "found": 0}))
say(json.dumps(found))
"""


def test_it_reaches_neither_another_episode_nor_the_address_of_others(make):
    asked, rewarded = [], []

    async def answer(request):
        asked.append(request)
        return Reply(message=Message(role="assistant", content="secret"))

    other = address().open(answer, lambda name, value: rewarded.append(name))
    import httpx2

    body = {"messages": [{"role": "user", "content": "x"}]}
    head = {"Authorization": f"Bearer {other.key}"}
    outside = httpx2.post(f"{other.url}/chat/completions", json=body, headers=head)
    name = outside.raise_for_status().json()["id"]  # the key and the name are right
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = [address().port, listener.getsockname()[1]]
        names = {"KEY": other.key, "NAME": name, "PORTS": ports}
        code = "".join(f"{key} = {value!r}\n" for key, value in names.items()) + OTHER
        observation, _ = make(code).reset(seed=0)
    other.close()
    assert json.loads(observation) == [401, 401, 404, 111, 111]
    assert len(asked) == 1
    assert rewarded == []


def test_it_sees_its_files_and_no_others(make, tmp_path):
    tmp_path.chmod(0o755)
    for name in ("agent.py", "helper.py", "secret.py"):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "helper.py").write_text("y = 2\n")
    code = HEAD + "sys.path.append(sys.argv[2])\nimport helper\n"
    code += "print(os.listdir(sys.path[0]))\n"
    code += "say(json.dumps([sorted(os.listdir(os.path.dirname(__file__))), helper.y,"
    code += "*map(os.path.exists, sys.argv[1:])]))"
    (tmp_path / "agent.py").write_text(code)
    for path in tmp_path.rglob("*"):
        path.chmod(0o755)
    paths = [str(tmp_path / "more"), str(tmp_path / "secret.py")]
    command = [sys.executable, "-S", str(tmp_path / "agent.py"), "{file}", *paths[:1]]
    # the task names a file, which makes no file readable
    data = [{"question": "?", "file": str(tmp_path / "secret.py")}]
    env = make(command=command, data=data, sandbox={"readable": paths[:1]})
    assert json.loads(env.reset(seed=0)[0]) == [["agent.py", "more"], 2, False, True]


def test_its_variables_are_the_address_and_those_that_are_given(make, monkeypatch):
    monkeypatch.setenv("SANDBOX_TEST_TOKEN", "opensesame")
    env = make("say(json.dumps(dict(os.environ)))", env={"MODE": "fast"})
    found = json.loads(env.reset(seed=0)[0])
    assert found["MODE"] == "fast"
    assert found["OPENAI_BASE_URL"] == f"http://127.0.0.1:{PORT}/v1"
    assert "opensesame" not in str(found)
    keys = {name for name in found if name.startswith(("OPENAI", "ANTHROPIC"))}
    places = {"OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL"}
    assert keys == {*places, "OPENAI_API_KEY", "ANTHROPIC_API_KEY"}


def test_connections_of_one_program_are_limited_and_others_are_still_served(make):
    code = """
        import socket
        lines = []
        for _ in range(200):
            lines.append(socket.create_connection(("127.0.0.1", place.port)))
        say("done")
        say("again")
    """
    before = len(address()._server.server_state.connections)
    env, other = make(code), make('say("hello")')
    assert env.reset(seed=0)[0] == "done"
    assert len(address()._server.server_state.connections) - before <= 64
    assert other.reset(seed=0)[0] == "hello"
    assert env.step("")[0] == "again"


def test_an_episode_that_ends_leaves_nothing(make):
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    code = """
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        say("one")
        time.sleep(600)
    """
    env = make(f"import time\n{textwrap.dedent(code)}", silence=1.0)
    env.reset(seed=0)
    assert imprisoned() != []
    with pytest.raises(EnvironmentHangError):
        env.step("a")
    assert eventually(lambda: imprisoned() == [])
    env = make('import time\nsay("one")\ntime.sleep(600)')
    env.reset(seed=0)
    env.reset(seed=1)
    env.close()
    assert eventually(lambda: imprisoned() == [])
    assert eventually(lambda: threading.active_count() <= threads)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"command": (), "program": lambda task, base_url, api_key: 1.0}, "function"),
        ({"sandbox": {"seconds": 5}}, "expected true, false or limits: cpu_seconds"),
        ({"sandbox": {"allow_unsafe": True}}, "expected true, false or limits"),
        ({"sandbox": "yes"}, "expected true, false or limits"),
        ({"sandbox": {"memory_mib": 1}}, "memory_mib is 1"),
        ({"sandbox": {"readable": ["/nowhere"]}}, "/nowhere"),
        ({"command": ["none-of-this-name"]}, "none-of-this-name"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(make, kwargs, told):
    with pytest.raises(ConfigError, match=told):
        make(**kwargs)


def test_the_examples_of_agents_run_in_it(make):
    import shutil

    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    agent = Path(__file__).parents[2] / "examples" / "agents" / "lookup.js"
    data = [{"prompt": "p", "question": "q", "links": {"a": "b"}}]
    env = make(
        command=["node", str(agent)], data=data, env={"NODE_OPTIONS": "--disable-wasm-trap-handler"}
    )
    assert env.reset(seed=0)[0] == "q"
    call = '<tool_call>{"name": "lookup", "arguments": {"key": "a"}}</tool_call>'
    assert env.step(call)[0] == "b"
    assert env.step("b")[2] is True
