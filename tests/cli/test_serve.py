"""`gspo-env serve` with real parts."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from support.cli_errors import refused
from support.runs import tiny
from support.talks import TALK, TOOL, write

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.serve import KEY, Serve, policy_config
from gspo_env.errors import ConfigError


def imitated(path, **shape):
    """A run's folder with a tiny model that imitated a conversation."""
    lines = write(path / "talks.jsonl", {"messages": TALK, "tools": [TOOL]})
    recipe = {"conversations": lines, "imitation_steps": 60, **shape}
    limits = {"max_turn_tokens": 16, "max_context": 128, "group_size": 2}
    agent = GSPOAgent(config=tiny(recipe=recipe, rollout=limits))
    agent.warm_up()
    agent.save(path / "saved")
    return path / "saved"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return imitated(tmp_path_factory.mktemp("run"))


@contextlib.contextmanager
def serving(folder, *flags):
    """Yields the program, its address for chats, and what asks with its key."""
    command = [sys.executable, "-m", "gspo_env", "serve", str(folder), "--port", "0", *flags]
    with (folder.parent / "serve.err").open("w") as errors:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, KEY: "open sesame"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # maybe ignored here
        )
    exported = dict(
        child.stdout.readline().strip().removeprefix("export ").split("=") for _ in "12"
    )
    url, headers = f"{exported['OPENAI_BASE_URL']}/chat/completions", "Bearer open sesame"
    try:
        with httpx.Client(headers={"authorization": headers}, timeout=120) as client:
            yield child, url, lambda body: client.post(url, json=body)
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        child.stdout.close()


@pytest.mark.slow
def test_the_model_that_imitated_a_program_answers_it_behind_the_port(folder):
    with serving(folder) as (child, url, post):
        ask = {"model": "m", "temperature": 0, "messages": TALK[:2], "tools": [TOOL]}
        assert httpx.post(url, json=ask, timeout=60).status_code == 401
        got = post(ask).json()
        (call,) = got["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"key": "amber"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "river"}
        ask["messages"] = [*TALK[:2], got["choices"][0]["message"], result]
        assert post(ask).json()["choices"][0]["message"]["content"] == "It is river."
        errors = (folder.parent / "serve.err").read_text()
        assert "Loading weights" not in errors  # the progress bar
        assert '"POST /v1/chat/completions HTTP/1.1" 401' in errors
        assert child.stdout.readline().startswith('curl "$OPENAI_BASE_URL/chat/completions"')
        assert re.fullmatch(r"Ready on http://\S+, Ctrl-C stops\n", child.stdout.readline())


@pytest.mark.vllm
def test_vllm_can_answer_behind_the_port(tmp_path):
    """Its heads are as wide as vLLM needs; answers do not depend on the requests beside them."""
    saved = imitated(tmp_path, hidden_size=64, heads=2)
    with serving(saved, "--engine", "vllm") as (_, _, post):

        def ask(**fields):
            return post({"model": "m", "messages": TALK[:2], "tools": [TOOL], **fields})

        (call,) = ask(temperature=0).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"key": "amber"}
        with ThreadPoolExecutor(8) as pool:
            responses = list(pool.map(lambda n: ask(seed=n % 2, temperature=1.5), range(8)))
        messages = [r.json()["choices"][0]["message"] for r in responses]
        for message in messages:
            for one in message.get("tool_calls", ()):
                del one["id"]
        assert messages[0::2] == messages[:1] * 4
        assert messages[1::2] == messages[1:2] * 4
        assert ask(messages=[{"role": "user", "content": "amber " * 500}]).status_code == 400


def test_a_port_in_use_is_refused_before_the_model_loads(capsys):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        said = refused(capsys, "serve", "./no-model", "--port", str(busy.getsockname()[1]))
    assert "cannot listen on 127.0.0.1" in said


def test_a_folder_is_data_and_its_environment_is_not_needed(folder, tmp_path):
    settled = policy_config(Serve(model=str(folder), max_tokens=5, temperature=0))
    assert settled.rollout.max_turn_tokens == 5
    assert 0 < settled.rollout.temperature < 1e-6  # greedy
    assert settled.rollout.max_context == 128
    text = json.loads((folder / "gspo_env.json").read_text())["config"]
    evil = text.replace('env = "gspo/Lookup-v0"', 'env = "evil.py:Env"')
    evil = evil.replace("[engine]", '[engine]\nextra = "run me"')
    (tmp_path / "gspo_env.json").write_text(json.dumps({"config": text}))
    assert policy_config(Serve(model=str(tmp_path))).rollout.max_context == 128
    engine = 'name = "transformers"'
    assert engine in text
    evil = text.replace(engine, 'name = "evil.py:Engine"')
    (tmp_path / "gspo_env.json").write_text(json.dumps({"config": evil}))
    with pytest.raises(ConfigError, match="--engine"):
        policy_config(Serve(model=str(tmp_path)))
    assert policy_config(Serve(model=str(tmp_path), engine="transformers")).engine is not None
