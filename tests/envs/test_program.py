"""Programs as environments: what they ask, how they end, and what is left of them."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import httpx2
import pytest
from support.jails import eventually, is_alive
from support.rollouts import collector, play
from support.serving_policy import hang_up

from gspo_env.check import check_env
from gspo_env.env.base import Action
from gspo_env.env.info import parse_step
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import (
    ConfigError,
    EnvironmentContractError,
    EnvironmentCrashError,
    EnvironmentHangError,
)
from gspo_env.rollout.play import play_now
from gspo_env.serving import address
from gspo_env.tools.tool import format_tool_call
from gspo_env.types import Message, StopReason, Task, ToolCall
from gspo_envs.program.commands import start_command
from gspo_envs.program.runs import Inbox

DATA = [{"question": f"What is 1 + {n}?", "answer": str(n + 1)} for n in range(4)]
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
HTTP = httpx2.Client(timeout=30)


def post(base_url, api_key, path, body, **more):
    headers = {"Authorization": f"Bearer {api_key}"}
    answer = HTTP.post(base_url + path, json=body, headers=headers, **more)
    return answer.status_code, answer.json()


def ask(base_url, api_key, text, **fields):
    """The status and the body of the answer to a request."""
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return post(base_url, api_key, "/chat/completions", body)


def say(base_url, api_key, text, **fields):
    """The message of an answer."""
    return ask(base_url, api_key, text, **fields)[1]["choices"][0]["message"]


async def ask_async(base_url, api_key, text, agent=""):
    async with httpx2.AsyncClient(base_url=base_url, timeout=30) as client:
        body = {"messages": [{"role": "user", "content": text}]}
        headers = {"Authorization": f"Bearer {api_key}", "X-Agent": agent}
        answer = await client.post("/chat/completions", json=body, headers=headers)
        return answer.json()["choices"][0]["message"]["content"]


def one_question(task, base_url, api_key):
    return say(base_url, api_key, task["question"])["content"] == task["answer"]


def agent(task, base_url, api_key):
    """Checks what it is answered."""
    texts = ("one", "two", "three")
    first, error, cut = (ask(base_url, api_key, text, tools=[LOOKUP])[1] for text in texts)
    message = first["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"key": [1, None]}
    assert (message["content"], message["reasoning_content"]) == ("ä", "so")
    assert error["error"]["code"] == "context_length_exceeded"
    assert error["error"]["message"] == "9 in the prompt"
    assert cut["choices"][0]["finish_reason"] == "length"
    assert [answer["usage"]["prompt_tokens"] for answer in (first, cut)] == [7, 8]
    return 1.0


@pytest.fixture
def make():
    """Makes environments of programs and closes them."""
    with contextlib.ExitStack() as stack:

        def one(program=None, **kwargs):
            kwargs = {"data": DATA, "held_out": 0, "silence": 20.0, **kwargs}
            env = make_env("gspo/Program-v0", program=program, **kwargs)
            stack.callback(env.close)
            return env

        yield one


@pytest.fixture
def replies(monkeypatch):
    """The futures of the answers to all requests that arrive."""
    arrived, ask_inbox = [], Inbox.ask

    def asked(inbox, request):
        arrived.append(ask_inbox(inbox, request))
        return arrived[-1]

    monkeypatch.setattr(Inbox, "ask", asked)
    return arrived


@pytest.fixture
def begin(make):
    """Makes environments of programs and begins the first task."""

    def one(program=None, **kwargs):
        env = make(program, **kwargs)
        env.reset(options={"row": 0})
        return env

    return one


def counting(counts):
    """A program that asks three times in one conversation, and what it was told."""
    told, used = [], []

    def program(task, base_url, api_key):
        def count():
            if counts:
                asked = post(base_url, api_key, "/messages/count_tokens", {"messages": messages})
                told.append(asked[1].get("input_tokens", asked))

        messages = [{"role": "user", "content": "look up one"}]
        for n in range(3):
            count()
            body = {"messages": messages, "max_tokens": 8}
            answer = post(base_url, api_key, "/messages", body)[1]
            used.append(answer["usage"]["input_tokens"])
            messages.append({"role": "assistant", "content": answer["content"]})
            messages.append({"role": "user", "content": f"look up {n}"})
        count()
        return 1.0

    return program, told, used


def test_a_program_that_counts_tokens_plays_the_same_episode(player, make):
    def episode(program):
        env = make(program)
        (group,) = play(collector(player, lambda: env), tasks=1, size=1)
        return [(t.prompt_ids, t.action_ids, t.reward) for t in group.episodes[0].turns]

    program, told, used = counting(True)
    assert episode(program) == episode(counting(False)[0])
    assert told[:3] == used
    assert len(used) == 3
    assert told[3] > used[2]


def test_without_a_rollout_a_count_is_refused(begin):
    program, told, _ = counting(True)
    begin(program).step("so")
    for status, body in told[:2]:
        assert (status, body["type"]) == (400, "error")
        assert "nothing counts tokens here" in body["error"]["message"]


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


def program_threads():
    return [t for t in threading.enumerate() if t.name == "program"]


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


BROKEN = '<tool_call>{"name": </tool_call>'


@pytest.mark.parametrize(
    ("tools", "action", "malformed", "message"),
    [
        ([LOOKUP], format_tool_call("lookup", {"key": "a"}), 0, {}),
        ([LOOKUP], BROKEN, 1, {"content": BROKEN}),
        ([], BROKEN, 0, {"content": BROKEN}),
        ([], "<think>so</think>{}", 0, {"content": "{}", "reasoning_content": "so"}),
    ],
)
def test_a_call_reaches_the_program_as_a_call_and_a_malformed_one_as_text_that_is_counted(
    begin, tools, action, malformed, message
):
    seen = []
    env = begin(
        lambda task, base_url, api_key: seen.append(say(base_url, api_key, "", tools=tools))
    )
    info = env.step(action)[4]
    assert info["malformed_calls"] == malformed
    assert "malformed_calls" not in info["reward_parts"]
    calls = [json.loads(call["function"]["arguments"]) for call in seen[0].get("tool_calls", ())]
    assert calls == ([] if message else [{"key": "a"}])
    assert message.items() <= seen[0].items()


def test_a_program_in_a_process_of_its_own_gets_the_same_answers(make):
    kwargs = {"program": f"{__file__}:agent", "data": DATA, "held_out": 0}
    call = (ToolCall(name="lookup", arguments={"key": [1, None]}),)
    answer = Message(role="assistant", content="ä", reasoning="so", tool_calls=call)
    results = []
    with contextlib.closing(IsolatedEnv("gspo/Program-v0", kwargs, timeout=60.0)) as isolated:
        for env in (make(**kwargs), isolated):
            assert env.reset(options={"row": 0})[0] == "one"
            steps = [env.step(Action("x", (1, 2), answer, "stop", 7))]
            steps.append(env.step(Action("9 in the prompt", finish_reason="context")))
            steps.append(env.step(Action("cut", (3,), finish_reason="length", prompt_tokens=8)))
            results.append([parse_step("test", step, 2) for step in steps])
            assert [tool.name for tool in steps[0][4]["tools"]] == ["lookup"]
    assert [step[1:4] for step in results[0]] == [(0, False, False)] * 2 + [(1, True, False)]
    for one, two in zip(*results, strict=True):
        assert (*one[:4], one[4].messages) == (*two[:4], two[4].messages)


def test_rewards_are_functions_of_the_episode_with_the_programs_result(begin):
    attempts = []

    def right(attempt):
        attempts.append(attempt)
        return float(attempt.result == attempt.row["answer"])

    def program(task, base_url, api_key):
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            message = say(base_url, api_key, "", messages=messages)
            messages += [message, {"role": "user", "content": "sure?"}]
        ask(base_url, api_key, "something else")
        return message["content"]

    env = begin(program, rewards=[right], weights=[2.0])
    _, reward, _, _, info = [env.step(text) for text in ("7", "1", "last")][-1]
    assert (reward, info["reward_parts"]["right"]) == (2.0, 1.0)
    (attempt,) = attempts
    assert [m["content"] for m in attempt.prompt] == ["What is 1 + 0?"]
    texts = [m["content"] for m in attempt.completion]
    assert texts == ["7", "sure?", "1", "something else", "last"]


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
def test_the_result_of_a_program_is_its_reward(begin, result, reward, success, parts):
    def program(task, base_url, api_key):
        ask(base_url, api_key, "x")
        return result

    _, total, terminated, _, info = begin(program).step("y")
    assert (total, terminated, info["success"]) == (reward, True, success)
    assert info["reward_parts"] == parts
    assert info["scored"] == (result not in (None, "text"))


def test_a_posted_reward_counts_for_the_turn_of_its_answer_and_not_once_that_has_returned(begin):
    statuses = []

    def program(task, base_url, api_key):
        body = {"completion_id": ask(base_url, api_key, "one")[1]["id"], "reward": 0.25}
        statuses.append(post(base_url, api_key, "/reward", body)[0])
        ask(base_url, api_key, "two")
        statuses.append(post(base_url, api_key, "/reward", body)[0])

    env = begin(program)
    assert [env.step(text)[1] for text in "ab"] == [0.25, 0.0]
    assert statuses == [200, 409]


def test_requests_at_the_same_time_are_turns_in_the_order_of_arrival(make, replies):
    async def program(task, base_url, api_key):
        async def part(name, before):
            while len(replies) < before:
                await asyncio.sleep(0.01)
            return await ask_async(base_url, api_key, name, agent=name)

        return await asyncio.gather(part("b", 1), part("a", 0)) == ["to b", "to a"]

    env = make(program)
    observation, info = env.reset(seed=0)
    assert (observation, info["agent"]) == ("a", "a")
    assert eventually(lambda: len(replies) == 2)
    observation, _, _, _, info = env.step("to a")
    assert (observation, info["agent"]) == ("b", "b")
    assert env.step("to b")[1] == 1.0


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("requests", [0, 1])
def test_an_exception_is_a_failure_before_and_after_the_first_request(make, raised, requests):
    def program(task, base_url, api_key):
        for _ in range(requests):
            ask(base_url, api_key, "x")
        raise raised

    episode = play_now(make(program), Task(env_id="p", seed=0), lambda now: "y")
    assert episode.stop_reason in (StopReason.ERROR, StopReason.CRASH)
    assert episode.failed
    assert not program_threads()


class MaxTurnsExceeded(Exception):
    """Named like the error of an SDK."""


@pytest.mark.parametrize("raised", [MaxTurnsExceeded(), SystemExit(3)])
def test_listed_errors_and_exit_codes_end_an_episode_with_a_score(begin, raised):
    def program(task, base_url, api_key):
        ask(base_url, api_key, "x")
        raise raised

    env = begin(program, rewards=[lambda attempt: 0.5], ends=["MaxTurnsExceeded", 3])
    assert env.step("y")[1:4] == (0.5, False, True)


def test_a_program_that_fails_at_a_prompt_that_does_not_fit_is_cut_and_not_a_failure(begin):
    def program(task, base_url, api_key):
        ask(base_url, api_key, "one")
        raise RuntimeError("the prompt is too long")

    assert begin(program).step(Action("", finish_reason="context"))[1:4] == (0.0, False, True)


def test_silence_and_too_much_time_are_failures_unless_they_are_listed(make):
    done = threading.Event()

    def program(task, base_url, api_key):
        if task["answer"] == "2":
            ask(base_url, api_key, "x")
        done.wait(30)

    try:
        for limit in ("silence", "timeout"):
            env = make(program, **{limit: 0.3})
            with pytest.raises(EnvironmentHangError, match=limit):
                env.reset(options={"row": 0})
        for ends in ((), ("silence",)):
            env = make(program, ends=ends)
            env.reset(options={"row": 1})
            env.unwrapped.silence = 0.3
            with contextlib.nullcontext() if ends else pytest.raises(EnvironmentHangError):
                assert env.step("y")[1:4] == (0.0, False, True)
    finally:
        done.set()
    assert eventually(lambda: not program_threads())


def test_waiting_for_the_policy_does_not_count_as_the_programs_time(begin, monkeypatch):
    env = begin(one_question, timeout=20.0)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 100.0)
    assert env.step("1")[2]


def test_a_program_that_never_asks_or_has_an_infinite_result_is_a_failure(make):
    with pytest.raises(EnvironmentContractError, match="requests"):
        make(lambda task, base_url, api_key: 1.0).reset(seed=0)

    def program(task, base_url, api_key):
        ask(base_url, api_key, "x")
        return float("nan")

    episode = play_now(make(program), Task(env_id="p", seed=0), lambda now: "y")
    assert episode.stop_reason is StopReason.INVALID


def test_a_program_that_keeps_asking_is_cut_and_its_next_request_is_refused(begin):
    statuses = []

    def program(task, base_url, api_key):
        while not statuses or statuses[-1] == 200:
            statuses.append(ask(base_url, api_key, "more")[0])

    env = begin(program, max_turns=3)
    assert [env.step("x")[3] for _ in range(3)] == [False, False, True]
    assert eventually(lambda: not program_threads())
    assert statuses[-1] == 410


def test_a_task_that_the_program_changes_is_not_changed_for_others(begin):
    def program(task, base_url, api_key):
        ask(base_url, api_key, task["question"])
        task.clear()

    env = begin(program)
    env.step("x")
    assert env.reset(options={"row": 0})[0] == "What is 1 + 0?"


def test_a_request_that_the_program_gives_up_is_no_turn_unless_the_policy_had_begun(make, replies):
    begun = threading.Event()

    def program(task, base_url, api_key):
        hang_up(base_url, api_key, "given up", begun.is_set)
        hang_up(base_url, api_key, "given up too", lambda: len(replies) == 2)
        ask(base_url, api_key, "kept")

    env = make(program)
    assert env.reset(seed=0)[0] == "given up"
    begun.set()
    assert eventually(lambda: [reply.cancelled() for reply in replies] == [True, True, False])
    assert env.step("into the void")[0] == "kept"
    assert env.step("x")[2]


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_no_exception_of_an_asynchronous_program_ends_others(make, begin, raised):
    async def fails(task, base_url, api_key):
        await ask_async(base_url, api_key, "x")

        async def part():
            raise raised

        await asyncio.gather(part(), asyncio.sleep(60))

    async def works(task, base_url, api_key):
        await ask_async(base_url, api_key, "x")
        return 1.0

    other = begin(works)
    episode = play_now(make(fails), Task(env_id="p", seed=0), lambda now: "y")
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
    assert eventually(lambda: len(ended) == 3)
    env.reset(options={"row": 0})
    while not env.step("x")[2]:
        pass
    assert eventually(lambda: len(ended) == 6)


def test_sequential_programs_pass_the_check_of_environments(make):
    def program(task, base_url, api_key):
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(3):
            content = say(base_url, api_key, "", messages=messages)["content"] or "(call)"
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"You said {len(content)} characters."},
            ]
        return len(content) % 2

    assert check_env(make(program)).score == "turns"
    assert eventually(lambda: not program_threads())


def test_a_command_gets_the_address_the_task_and_its_columns(make):
    code = """
        answer = ask(sys.argv[1])
        sys.stderr.write("y" * 100_000)
        print("noise" * 1_000_000)
        print(json.dumps({"reward": answer == task["answer"], "success": True}))
    """
    env = make(command=[*python(code), "{question} {none}"])
    assert env.reset(options={"row": 1})[0] == "What is 1 + 1? {none}"
    _, reward, terminated, _, info = env.step("2")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_the_last_line_of_a_command_is_its_result_for_reward_functions(begin):
    env = begin(
        command=python("print('the answer is', ask('x'))"),
        rewards=[lambda attempt: float(attempt.result == "the answer is 5")],
    )
    assert env.step("5")[1] == 1.0


@pytest.mark.parametrize("code", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "raise ValueError(1)"])
def test_another_exit_code_is_a_crash_with_the_end_of_standard_error(begin, code):
    env = begin(command=python(f"ask('x')\nprint('why', file=sys.stderr)\n{code}"))
    with pytest.raises(EnvironmentCrashError, match="why"):
        env.step("y")


def test_a_command_that_does_not_exist_is_a_crash(begin):
    with pytest.raises(EnvironmentCrashError, match="no-such-program"):
        begin(command=["no-such-program"])


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["close", "reset", "end"])
def test_the_processes_of_a_command_end_with_its_episode(begin, tmp_path, how):
    path = tmp_path / "pids"
    env = begin(command=python(FORKS), data=[{"pids": str(path)}])
    pids = path.read_text().split()
    assert all(map(is_alive, pids))
    ends = {
        "close": env.close,
        "reset": env.reset,
        "end": lambda: [env.step(text) for text in "ab"],
    }
    ends[how]()
    assert eventually(lambda: not any(map(is_alive, pids)))


TRAINER = """
import sys, time
from gspo_env.env.registration import make_env
env = make_env("gspo/Program-v0", command=sys.argv[2:], data=[{"pids": sys.argv[1]}], held_out=0)
env.reset(seed=0)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processes_of_a_command_end_with_a_trainer_that_is_killed(tmp_path):
    path = tmp_path / "pids"
    command = [sys.executable, "-c", TRAINER, str(path), *python(FORKS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout.readline() == b"ready\n"
        pids = path.read_text().split()
        trainer.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_an_environment_that_is_dropped_ends_its_program():
    statuses = []
    program = lambda task, **address: statuses.append(ask(text="x", **address)[0])  # noqa: E731
    env = make_env("gspo/Program-v0", program=program, data=DATA)
    env.reset(seed=0)
    del env
    assert eventually(lambda: statuses == [410])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({}, "neither of program and command"),
        ({"program": one_question, "command": ["true"]}, "both of program and command"),
        ({"program": lambda task: None}, r"add these parameters.*OpenAI\(base_url=base_url"),
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


def test_an_unexpected_error_of_a_start_ends_the_program_at_once():
    class Broken:
        def start(self, *arguments, **keywords):
            raise ValueError("a defect")

    inbox = Inbox()
    session = address().open(inbox.ask, lambda name, value: None)
    start_command(["true"], Broken(), {}, session=session, inbox=inbox, variables={})
    end = inbox.next(10.0)
    session.close()
    assert repr(end.error) == "ValueError('a defect')"
