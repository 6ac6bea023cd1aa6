"""Programs as environments: what they ask, how they end, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from urllib.parse import urlparse

import httpx2
import pytest

from gspo_env.check import check_env
from gspo_env.env.base import Action, attribute
from gspo_env.env.info import parse_step
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.registration import make_env
from gspo_env.env.tools import format_tool_call
from gspo_env.errors import (
    ConfigError,
    EnvironmentContractError,
    EnvironmentCrashError,
    EnvironmentHangError,
)
from gspo_env.rollout.play import play_now
from gspo_env.types import Message, StopReason, Task, ToolCall

AGENT = """
import json, urllib.error, urllib.request

def run(task, base_url, api_key):
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
    def ask(text):
        body = {"messages": [{"role": "user", "content": text}], "tools": [tool]}
        head = {"Authorization": "Bearer " + api_key}
        url = base_url + "/chat/completions"
        try:
            asked = urllib.request.Request(url, json.dumps(body).encode(), head)
            told = json.load(urllib.request.urlopen(asked))
        except urllib.error.HTTPError as error:
            return json.load(error)["error"]
        return told["choices"][0] | {"prompt": told["usage"]["prompt_tokens"]}
    first, third, second = ask("one"), ask("two"), ask("three")
    call = first["message"]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"key": [1, None]}, first
    assert first["message"]["content"] == "ä" and first["message"]["reasoning_content"] == "so"
    assert (first["prompt"], second["prompt"]) == (7, 8)
    assert second["finish_reason"] == "length"
    assert third["code"] == "context_length_exceeded" and "9 tokens" in third["message"]
    return 1.0
"""
DATA = [{"question": f"What is 1 + {n}?", "answer": str(n + 1)} for n in range(4)]
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def post(base_url, api_key, path, body, **headers):
    """Sends a request as a client of the standard library does; returns status and body."""
    url = urlparse(base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    try:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        told = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        connection.request("POST", url.path + path, sent, told | headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def ask(base_url, api_key, text, **fields):
    messages = fields.pop("messages", [{"role": "user", "content": text}])
    headers = fields.pop("headers", {})
    body = {"model": "m", "messages": messages, **fields}
    return post(base_url, api_key, "/chat/completions", body, **headers)


def one_question(task, base_url, api_key):
    _, answer = ask(base_url, api_key, task["question"])
    return answer["choices"][0]["message"]["content"] == task["answer"]


@pytest.fixture
def make():
    """Makes environments of programs and closes them."""
    made = []

    def one(program=None, **kwargs):
        kwargs = {"data": DATA, "held_out": 0, "silence": 20.0, **kwargs}
        made.append(make_env("gspo/Program-v0", program=program, **kwargs))
        return made[-1]

    yield one
    for env in made:
        env.close()


def python(code):
    """A command that runs Python code with `ask(text)`, which returns the answer."""
    head = """
        import json, os, sys, urllib.request
        def ask(text):
            request = urllib.request.Request(
                os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                json.dumps({"messages": [{"role": "user", "content": text}]}).encode(),
                {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
            )
            answer = json.load(urllib.request.urlopen(request))
            return answer["choices"][0]["message"]["content"]
        task = json.load(sys.stdin)
    """
    return [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)]


def wait_until(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def program_threads():
    return [t for t in threading.enumerate() if t.name == "program"]


def test_the_first_request_is_the_first_observation_and_the_result_the_reward(make):
    env = make(one_question)
    observation, info = env.reset(options={"row": 2})
    assert observation == "What is 1 + 2?"
    assert [m.role for m in info["messages"]] == ["user"]
    _, reward, terminated, truncated, info = env.step("3")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_the_requests_tools_limits_and_agent_reach_the_policy(make):
    def program(task, base_url, api_key):
        ask(base_url, api_key, "first")
        fields = {"tools": [LOOKUP], "max_tokens": 7, "stop": ["END"], "user": "helper"}
        ask(base_url, api_key, "second", **fields)

    env = make(program)
    _, info = env.reset(seed=0)
    assert (info["tools"], info["agent"]) == ((), None)
    observation, _, _, _, info = env.step("x")
    assert observation == "second"
    assert [tool.name for tool in info["tools"]] == ["lookup"]
    assert (info["max_tokens"], info["stop"], info["agent"]) == (7, ("END",), "helper")


def test_a_call_reaches_the_program_as_a_call_and_a_malformed_one_as_text_that_is_counted(make):
    seen = []

    def program(task, base_url, api_key):
        for _ in range(2):
            seen.append(ask(base_url, api_key, "go", tools=[LOOKUP])[1]["choices"][0]["message"])

    env = make(program)
    env.reset(seed=0)
    info = env.step(format_tool_call("lookup", {"key": "a"}))[4]
    assert info["malformed_calls"] == 0
    info = env.step('<tool_call>{"name": </tool_call>')[4]
    assert info["malformed_calls"] == 1
    assert "malformed_calls" not in info["reward_parts"]
    assert json.loads(seen[0]["tool_calls"][0]["function"]["arguments"]) == {"key": "a"}
    assert seen[1]["content"] == '<tool_call>{"name": </tool_call>'
    assert "tool_calls" not in seen[1]


def test_a_malformed_call_is_no_call_where_the_program_offers_no_tools(make):
    texts = ('<tool_call>{"name": </tool_call>', '<think>so</think>{"name": "a", "parameters": {}}')
    seen = []

    def program(task, base_url, api_key):
        for _ in texts:
            seen.append(ask(base_url, api_key, "go")[1]["choices"][0]["message"])

    env = make(program)
    env.reset(seed=0)
    assert [env.step(text)[4]["malformed_calls"] for text in texts] == [0, 0]
    assert [message["content"] for message in seen] == [texts[0], texts[1].partition("</think>")[2]]
    assert seen[1]["reasoning_content"] == "so"


def test_a_program_in_a_process_of_its_own_gets_the_same_answers(make, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    kwargs = {"program": f"{tmp_path}/agent.py:run", "data": DATA, "held_out": 0}
    here, there = make(**kwargs), IsolatedEnv("gspo/Program-v0", kwargs, timeout=60.0)
    call = (ToolCall(name="lookup", arguments={"key": [1, None]}),)
    said = Message(role="assistant", content="ä", reasoning="so", tool_calls=call)
    try:
        results = []
        for env in (here, there):
            assert env.reset(options={"row": 0})[0] == "one"
            steps = [env.step(Action("x", (1, 2), said, "stop", 7))]
            steps.append(env.step(Action("", finish_reason="context", prompt_tokens=9)))
            steps.append(env.step(Action("cut", (3,), finish_reason="length", prompt_tokens=8)))
            results.append([parse_step("test", step, 2) for step in steps])
            names = [tool.name for tool in steps[0][4]["tools"]]
            assert names == ["lookup"]
            assert attribute(env, "takes_cut_actions", False)
        for one, two in zip(*results, strict=True):
            assert one[:4] == two[:4]
            assert one[4].messages == two[4].messages
        assert results[0][2][1] == 1.0
    finally:
        there.close()


def test_rewards_are_functions_of_the_episode_with_the_programs_result(make):
    attempts = []

    def right(attempt):
        attempts.append(attempt)
        return float(attempt.result == attempt.row["answer"])

    def program(task, base_url, api_key):
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            message = ask(base_url, api_key, "", messages=messages)[1]["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "sure?"}]
        ask(base_url, api_key, "something else")
        return message["content"]

    env = make(program, rewards=[right], weights=[2.0])
    env.reset(options={"row": 0})
    env.step("7")
    env.step("1")
    _, reward, _, _, info = env.step("last")
    assert (reward, info["reward_parts"]["right"]) == (2.0, 1.0)
    (attempt,) = attempts
    assert [m["content"] for m in attempt.prompt] == ["What is 1 + 0?"]
    said = [m["content"] for m in attempt.completion]
    assert said == ["7", "sure?", "1", "something else", "last"]


@pytest.mark.parametrize(
    ("result", "reward", "success", "parts"),
    [
        (0.25, 0.25, None, {}),
        (False, 0.0, False, {}),
        (None, 0.0, None, {}),
        ("text", 0.0, None, {}),
        ({"reward": 0.5, "success": False, "speed": 2, "note": "x"}, 0.5, False, {"speed": 2.0}),
    ],
)
def test_the_result_of_a_program_is_its_reward(make, result, reward, success, parts):
    def program(task, base_url, api_key):
        ask(base_url, api_key, "x")
        return result

    env = make(program)
    env.reset(seed=0)
    _, given, terminated, _, info = env.step("y")
    assert (given, terminated, info["success"]) == (reward, True, success)
    assert info["reward_parts"] == parts


def test_a_result_that_is_not_finite_is_a_failure(make):
    def program(task, base_url, api_key):
        ask(base_url, api_key, "x")
        return float("nan")

    episode = play_now(make(program), Task(env_id="p", seed=0), lambda now: "y")
    assert episode.stop_reason is StopReason.INVALID


def test_a_posted_reward_counts_for_the_turn_of_its_answer_and_not_once_that_has_returned(make):
    statuses = []

    def program(task, base_url, api_key):
        name = ask(base_url, api_key, "one")[1]["id"]
        told = {"completion_id": name, "reward": 0.25}
        statuses.append(post(base_url, api_key, "/reward", told)[0])
        ask(base_url, api_key, "two")
        statuses.append(post(base_url, api_key, "/reward", told)[0])

    env = make(program)
    env.reset(seed=0)
    assert env.step("a")[1] == 0.25
    assert env.step("b")[1] == 0.0
    assert [status // 100 for status in statuses] == [2, 4]
    assert statuses[1] == 409


def test_a_cut_answer_and_a_prompt_that_does_not_fit_reach_the_program(make):
    seen = []

    def program(task, base_url, api_key):
        seen.append(ask(base_url, api_key, "one")[1]["choices"][0]["finish_reason"])
        status, told = ask(base_url, api_key, "two")
        seen.append((status, told["error"]["code"]))
        ask(base_url, api_key, "three")
        return 1.0

    env = make(program)
    env.reset(seed=0)
    assert env.step(Action("cut", (1, 2), finish_reason="length"))[2:4] == (False, False)
    assert env.step(Action("", finish_reason="context"))[1:4] == (0.0, False, False)
    assert env.step("y")[1:4] == (1.0, True, False)
    assert seen == ["length", (400, "context_length_exceeded")]


def test_a_program_that_fails_at_a_prompt_that_does_not_fit_is_cut_and_not_a_failure(make):
    def program(task, base_url, api_key):
        ask(base_url, api_key, "one")
        raise RuntimeError("the prompt is too long")

    env = make(program)
    env.reset(seed=0)
    assert env.step(Action("", finish_reason="context"))[1:4] == (0.0, False, True)


def test_requests_at_the_same_time_are_turns_in_the_order_of_arrival(make):
    async def program(task, base_url, api_key):
        async with httpx2.AsyncClient(base_url=base_url, timeout=30) as client:

            async def agent(name, delay):
                await asyncio.sleep(delay)
                body = {"model": "m", "messages": [{"role": "user", "content": name}]}
                headers = {"Authorization": f"Bearer {api_key}", "X-Agent": name}
                answer = await client.post("/chat/completions", json=body, headers=headers)
                return answer.json()["choices"][0]["message"]["content"]

            return (await asyncio.gather(agent("a", 0), agent("b", 0.3))) == ["to a", "to b"]

    env = make(program)
    observation, info = env.reset(seed=0)
    assert (observation, info["agent"]) == ("a", "a")
    time.sleep(0.6)
    observation, _, _, _, info = env.step("to a")
    assert (observation, info["agent"]) == ("b", "b")
    assert env.step("to b")[1] == 1.0


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_is_a_failure_before_and_after_the_first_request(make, raised):
    def program(task, base_url, api_key):
        if task["answer"] == "2":
            ask(base_url, api_key, "x")
        raise raised

    for row, turns in ((0, 0), (1, 0)):
        task = Task(env_id="p", seed=0, options={"row": row})
        episode = play_now(make(program), task, lambda now: "y")
        assert episode.failed
        assert episode.stop_reason in (StopReason.ERROR, StopReason.CRASH)
        assert len(episode.turns) == turns
    assert not program_threads()


def test_listed_errors_and_exit_codes_end_an_episode_with_a_score(make):
    class MaxTurnsExceeded(Exception):
        pass

    def program(task, base_url, api_key):
        ask(base_url, api_key, "x")
        raise MaxTurnsExceeded if task["answer"] == "1" else SystemExit(3)

    env = make(program, rewards=[lambda attempt: 0.5], ends=["MaxTurnsExceeded", 3])
    for row in (0, 1):
        env.reset(options={"row": row})
        assert env.step("y")[1:4] == (0.5, False, True)


def test_silence_and_too_much_time_are_failures_unless_they_are_listed(make):
    done = threading.Event()

    def program(task, base_url, api_key):
        if task["answer"] == "2":
            ask(base_url, api_key, "x")
        done.wait(30)

    try:
        env = make(program, silence=0.3)
        with pytest.raises(EnvironmentHangError, match="silence"):
            env.reset(options={"row": 0})
        env.reset(options={"row": 1})
        with pytest.raises(EnvironmentHangError, match="silence"):
            env.step("y")
        env = make(program, timeout=0.3)
        with pytest.raises(EnvironmentHangError, match="timeout"):
            env.reset(options={"row": 0})
        env = make(program, silence=0.3, ends=["silence"])
        env.reset(options={"row": 1})
        assert env.step("y")[1:4] == (0.0, False, True)
    finally:
        done.set()
    wait_until(lambda: not program_threads())


def test_waiting_for_the_policy_does_not_count_as_the_programs_time(make):
    env = make(one_question, timeout=0.5)
    env.reset(options={"row": 0})
    time.sleep(0.8)
    assert env.step("1")[2]


def test_a_program_that_never_asks_is_a_failure(make):
    env = make(lambda task, base_url, api_key: 1.0)
    with pytest.raises(EnvironmentContractError, match="requests"):
        env.reset(seed=0)


def test_a_program_that_keeps_asking_is_cut_and_its_next_request_is_refused(make):
    statuses = []

    def program(task, base_url, api_key):
        while not statuses or statuses[-1] == 200:
            statuses.append(ask(base_url, api_key, "more")[0])

    env = make(program, max_turns=3)
    env.reset(seed=0)
    assert [env.step("x")[3] for _ in range(3)] == [False, False, True]
    wait_until(lambda: not program_threads())
    assert statuses[-1] == 410


def test_a_task_that_the_program_changes_is_not_changed_for_others(make):
    def program(task, base_url, api_key):
        ask(base_url, api_key, task["question"])
        task.clear()

    env = make(program)
    first, _ = env.reset(options={"row": 0})
    env.step("x")
    assert env.reset(options={"row": 0})[0] == first


def test_a_request_that_the_program_gives_up_is_no_turn_unless_the_policy_had_begun(make):
    def program(task, base_url, api_key):
        url = urlparse(base_url)
        for text in ("given up", "kept"):
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            told = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
            connection.request("POST", url.path + "/chat/completions", json.dumps(body), told)
            if text == "given up":
                time.sleep(0.2)
                connection.close()
                time.sleep(0.3)
        connection.getresponse().read()
        connection.close()

    env = make(program)
    assert env.reset(seed=0)[0] == "given up"  # it had arrived
    time.sleep(0.8)
    assert env.step("into the void")[0] == "kept"
    assert env.step("x")[2]


async def ask_async(base_url, api_key, text):
    async with httpx2.AsyncClient(base_url=base_url, timeout=30) as client:
        body = {"messages": [{"role": "user", "content": text}]}
        headers = {"Authorization": f"Bearer {api_key}"}
        return (await client.post("/chat/completions", json=body, headers=headers)).status_code


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_no_exception_of_an_asynchronous_program_ends_others(make, raised):
    async def fails(task, base_url, api_key):
        await ask_async(base_url, api_key, "x")

        async def part():
            raise raised

        await asyncio.gather(part(), asyncio.sleep(60))

    async def works(task, base_url, api_key):
        await ask_async(base_url, api_key, "x")
        return 1.0

    env, other = make(fails), make(works)
    other.reset(seed=0)
    episode = play_now(env, Task(env_id="p", seed=0), lambda now: "y")
    assert episode.stop_reason in (StopReason.ERROR, StopReason.CRASH)
    assert other.step("x")[1] == 1.0


def test_the_tasks_and_requests_of_an_asynchronous_program_end_with_its_episode(make):
    ended = []

    async def part(base_url, api_key):
        try:
            await ask_async(base_url, api_key, "part")
            await asyncio.sleep(600)
        finally:
            ended.append(1)

    async def program(task, base_url, api_key):
        await ask_async(base_url, api_key, "first")
        parts = [asyncio.create_task(part(base_url, api_key)) for _ in range(3)]
        await asyncio.sleep(0)
        if task["answer"] == "2":
            await asyncio.wait(parts)

    env = make(program)
    env.reset(options={"row": 1})
    assert env.step("x")[0] == "part"
    env.close()
    wait_until(lambda: len(ended) == 3)
    env.reset(options={"row": 0})
    while not env.step("x")[2]:
        pass
    wait_until(lambda: len(ended) == 6)


def test_an_asynchronous_program_that_blocks_fails_and_later_ones_run(make, monkeypatch):
    monkeypatch.setattr("gspo_envs.program.functions._PATIENCE", 0.2)
    done = threading.Event()

    async def blocks(task, base_url, api_key):
        await ask_async(base_url, api_key, "x")
        done.wait(60)

    async def works(task, base_url, api_key):
        await ask_async(base_url, api_key, "x")
        return 1.0

    try:
        env = make(blocks, silence=0.5)
        env.reset(seed=0)
        with pytest.raises(EnvironmentHangError):
            env.step("y")
        other = make(works)
        other.reset(seed=0)
        assert other.step("y")[1] == 1.0
    finally:
        done.set()


def test_what_a_program_leaves_behind_does_not_hold_up_its_end(make):
    statuses = []

    def stray(base_url, api_key):
        statuses.append(ask(base_url, api_key, "stray")[0])

    def program(task, base_url, api_key):
        ask(base_url, api_key, "x")
        threading.Thread(target=stray, args=(base_url, api_key)).start()
        time.sleep(0.3)
        return 1.0

    env = make(program)
    env.reset(seed=0)
    observation, _, ended, _, _ = env.step("y")
    while not ended:
        assert observation == "stray"
        observation, _, ended, _, _ = env.step("y")
    wait_until(lambda: statuses)


def test_sequential_programs_pass_the_check_of_environments():
    def program(task, base_url, api_key):
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(3):
            message = ask(base_url, api_key, "", messages=messages)[1]["choices"][0]["message"]
            content = message["content"] or "(call)"
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"You said {len(content)} characters."},
            ]
        return len(content) % 2

    env = make_env("gspo/Program-v0", program=program, data=DATA, held_out=0)
    assert check_env(env).score == "turns"
    wait_until(lambda: not program_threads())


def test_a_command_gets_the_address_the_task_and_its_columns(make):
    code = """
        said = ask(sys.argv[1])
        print("noise")
        print(json.dumps({"reward": said == task["answer"], "success": True}))
    """
    env = make(command=[*python(code), "{question} {none}"])
    assert env.reset(options={"row": 1})[0] == "What is 1 + 1? {none}"
    _, reward, terminated, _, info = env.step("2")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_the_last_line_of_a_command_is_its_result_for_reward_functions(make):
    env = make(
        command=python("print('the answer is', ask('x'))"),
        rewards=[lambda attempt: float(attempt.result == "the answer is 5")],
    )
    env.reset(seed=0)
    assert env.step("5")[1] == 1.0


@pytest.mark.parametrize("code", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "raise ValueError(1)"])
def test_another_exit_code_is_a_crash_with_the_end_of_standard_error(make, code):
    env = make(command=python(f"ask('x')\nprint('why', file=sys.stderr)\n{code}"))
    env.reset(seed=0)
    with pytest.raises(EnvironmentCrashError, match="why"):
        env.step("y")


def test_a_command_that_does_not_exist_is_a_crash(make):
    with pytest.raises(EnvironmentCrashError, match="no-such-program"):
        make(command=["no-such-program"]).reset(seed=0)


def test_a_command_that_prints_without_end_keeps_its_last_line(make):
    code = """
        ask("x")
        for _ in range(100):
            sys.stdout.write("x" * 1_000_000)
            sys.stderr.write("y" * 100_000)
        print()
        print(0.5)
    """
    env = make(command=python(code))
    env.reset(seed=0)
    assert env.step("y")[1] == 0.5


FORKS = """
    import subprocess, time
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    new = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
    own = subprocess.Popen([sys.executable, "-c", sleeper])
    with open(task["pids"], "w") as file:
        file.write(f"{os.getpid()} {new.pid} {own.pid}")
    ask("x")
    ask("y")
"""


def is_alive(pid):
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def read_pids(path):
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["close", "reset", "end"])
def test_the_processes_of_a_command_end_with_its_episode(make, tmp_path, how):
    path = tmp_path / "pids"
    env = make(command=python(FORKS), data=[{"pids": str(path)}])
    env.reset(seed=0)
    pids = read_pids(path)
    assert all(map(is_alive, pids))
    if how == "close":
        env.close()
    elif how == "reset":
        env.reset(seed=0)
    else:
        env.step("a")
        env.step("b")
    wait_until(lambda: not any(map(is_alive, pids)))


TRAINER = """
import sys, time
from gspo_env.env.registration import make_env
env = make_env("gspo/Program-v0", command=sys.argv[2:], data=[{"pids": sys.argv[1]}], held_out=0)
env.reset(seed=0)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processes_of_a_command_end_with_a_trainer_that_is_killed(tmp_path):
    path = tmp_path / "pids"
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(path), *python(FORKS)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with trainer:
        assert trainer.stdout.readline() == b"ready\n"
        pids = read_pids(path)
        trainer.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_an_environment_that_is_dropped_ends_its_program(make):
    statuses = []

    def program(task, base_url, api_key):
        statuses.append(ask(base_url, api_key, "x")[0])

    env = make_env("gspo/Program-v0", program=program, data=DATA)
    env.reset(seed=0)
    del env
    wait_until(lambda: statuses)
    assert statuses == [410]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({}, "neither of program and command"),
        ({"program": one_question, "command": ["true"]}, "both of program and command"),
        ({"program": lambda task: None}, "base_url"),
        ({"command": "true"}, "expected a list"),
        ({"program": one_question, "data": None}, "data is missing"),
        ({"program": one_question, "sandbox": True}, "sandbox is True"),
        ({"program": one_question, "timeout": 0}, "timeout is 0"),
        ({"program": one_question, "ends": "timeout"}, "ends is 'timeout'"),
        ({"program": one_question, "env": {"A": "1"}}, "expected neither, because a function"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(make, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        make(**kwargs)
