"""Exported environments in verifiers' own loop: the same texts, rewards and ends as here."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.exports import ENVS, install, load_package, talks
from support.pretend_http import serve

from gspo_env.chat.messages import write_call
from gspo_env.export import write_package
from gspo_env.tools.calls import parse_message

pytestmark = pytest.mark.adapters


def answering(state):
    """A method of a handler that answers with the scripted actions."""

    def do_POST(self):
        body = json.loads(self.body())
        state["bodies"].append(body)
        turn = sum(message["role"] == "assistant" for message in body["messages"]) - state["before"]
        message = {"role": "assistant", "content": state["actions"][turn]}
        if state["native"]:
            parsed, _ = parse_message(state["actions"][turn], state["tools"])
            calls = [
                write_call(call) | {"id": f"call-{turn}-{n}"}
                for n, call in enumerate(parsed.tool_calls)
            ]
            message = {"role": "assistant", "content": parsed.content or None}
            message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "x", "object": "chat.completion", "created": int(time.time())}
        self.answer({**head, "model": body["model"], "choices": [choice]})

    return do_POST


def play(package, played, native):
    """Plays episodes in verifiers' loop; yields each with its trace and the last request."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import EvalClientConfig

    state = {"bodies": [], "native": native}

    async def run(url):
        taskset = {"id": package.__name__, "num_tasks": 5}
        env = vf.load_environment(vf.resolve_env_config({"taskset": taskset}))
        client = EvalClientConfig(base_url=f"{url}/v1")
        context = vf.ModelContext(client=client, model="scripted", sampling=vf.SamplingConfig())
        tasks = list(env.taskset)
        async with env.serving():
            for talk in played:
                first = talk.episode.prompt.first_messages(talk.observations[0])
                before = sum(message.role == "assistant" for message in first)
                tools = talk.episode.prompt.tools
                state.update(bodies=[], actions=talk.actions, tools=tools, before=before)
                episode = await env.run_episode(tasks[talk.seed], context)
                assert episode.ok, [*episode.errors, *episode.traces[0].errors]
                yield talk, episode.traces[0], state["bodies"][-1]

    async def collect(url):
        return [item async for item in run(url)]

    with serve(do_POST=answering(state)) as url:
        return asyncio.run(collect(url))


@pytest.mark.parametrize("name", ENVS)
def test_texts_rewards_and_ends_are_equal_in_verifiers(name, tmp_path, monkeypatch):
    package = load_package(name, "verifiers", tmp_path / "package", monkeypatch)
    native = name in ("SQL", "Dialogue", "file")
    for talk, trace, body in play(package, talks(name), native):
        count = len(talk.actions)
        shown = [m["content"] for m in body["messages"] if m["role"] in ("user", "tool")][-count:]
        assert shown == talk.observations[:-1]
        assert trace.reward == talk.episode.outcome
        record = trace.info["gspo_env"]
        assert record["turn_rewards"] == talk.episode.rewards.tolist()
        assert record["stop_reason"] == talk.episode.stop_reason
        assert trace.metrics["success"] == talk.episode.success
        tools = [tool.schema for tool in talk.episode.prompt.tools]
        assert body.get("tools", []) == tools
        assert len(trace.assistant_messages) >= count
    if native:
        roles = [message["role"] for message in body["messages"]]
        assert ("tool" in roles) == any("tool_calls" in m for m in body["messages"][:-1])


def test_a_limit_of_verifiers_cuts_the_episode(tmp_path, monkeypatch):
    import verifiers.v1 as vf

    package = load_package("Story", "verifiers", tmp_path / "package", monkeypatch)
    limited = vf.AgentConfig(runtime={"type": "subprocess"}, max_turns=1)
    real = vf.resolve_env_config
    monkeypatch.setattr(vf, "resolve_env_config", lambda c: real({**c, "agent": limited}))
    _, trace, _ = play(package, talks("Story")[:1], False)[0]
    assert trace.info["gspo_env"]["stop_reason"] == "max_turns"
    assert trace.info["gspo_env"]["turn_rewards"] == [0.2]
    assert (trace.reward, trace.metrics["success"]) == (0.0, 0.0)


@pytest.mark.parametrize(("name", "valid"), [("file", 4), ("Dataset", 0)])
def test_the_wheel_installs_and_verifiers_validates_it(name, valid, tmp_path):
    spec, kwargs = ENVS[name]
    write_package(spec, "verifiers", tmp_path / "package", **kwargs)
    site = install(tmp_path / "package", tmp_path / "site")
    taskset = next(site.glob("gspo_*/__init__.py")).parent.name
    command = [Path(sys.executable).with_name("vf-validate"), taskset, "--taskset.num-tasks", "4"]
    rest = ["--no-rich", "--runtime.type", "subprocess", "-o", tmp_path / "out"]
    paths = ":".join([str(site), *sys.path])
    subprocess.run(
        [*command, *rest], check=True, env={"PYTHONPATH": paths, "HOME": str(tmp_path)}, cwd="/"
    )
    summary = json.loads(next((tmp_path / "out").rglob("summary.json")).read_text())
    reasons = {True: "valid", False: "unchecked"}
    assert summary["outcomes"][reasons[valid > 0]] == 4
    assert summary["checks"]["noop"]["valid"] == 4
