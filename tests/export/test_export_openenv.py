"""Exported environments on OpenEnv's server: the same texts, rewards and ends as here."""

import contextlib
import importlib
import json
import subprocess
import sys
import threading
import time

import pytest
from support.exports import ENVS, install, talks

from gspo_env.env.registration import make_env
from gspo_env.export import write_package

pytestmark = pytest.mark.openenv


@contextlib.contextmanager
def serving(app):
    """The address of a server."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def app_of(spec, **kwargs):
    from gspo_env.export.openenv import environment_class, make_app

    return make_app(environment_class(spec, **kwargs), "exported")


@pytest.mark.parametrize("name", ENVS)
def test_texts_rewards_and_ends_are_equal_in_openenv(name):
    from gspo_env.export.openenv import TextAction, TextEnvClient

    spec, kwargs = ENVS[name]
    with (
        serving(app_of(spec, **kwargs)) as url,
        TextEnvClient(base_url=url).sync() as client,
    ):
        for talk in talks(name):
            result = client.reset(seed=talk.seed)
            shown, rewards = [result.observation.text], []
            first = talk.episode.prompt.first_messages(talk.observations[0])
            assert result.metadata["messages"][-1]["content"] == first[-1].content
            assert len(result.metadata["messages"]) == len(first)
            tools = [tool.schema for tool in talk.episode.prompt.tools]
            assert result.metadata["tools"] == tools
            for action in talk.actions:
                assert not result.done
                result = client.step(TextAction(message=action))
                shown.append(result.observation.text)
                rewards.append(result.reward)
                assert "secret" not in json.dumps(result.metadata)
            assert result.done
            assert (shown, rewards) == (talk.observations, talk.episode.rewards.tolist())
            record = result.metadata["episode"]
            assert record["outcome"] == talk.episode.outcome
            assert record["truncated"] == talk.episode.truncated
            assert client.state().step_count == len(talk.actions)


def test_two_sessions_do_not_share_an_episode():
    from gspo_env.export.openenv import TextAction, TextEnvClient

    one, two = talks("Story")[:2]
    with (
        serving(app_of("gspo/Story-v0")) as url,
        TextEnvClient(base_url=url).sync() as first,
        TextEnvClient(base_url=url).sync() as second,
    ):
        first.reset(seed=one.seed)
        second.reset(seed=two.seed)
        for mine, theirs in zip(one.actions, two.actions, strict=True):
            left = first.step(TextAction(message=mine))
            right = second.step(TextAction(message=theirs))
        assert (left.reward, right.reward) == (1.0, 1.0)


def test_our_client_plays_the_exported_server():
    talk = talks("Story")[0]
    with serving(app_of("gspo/Story-v0")) as url:
        env = make_env("gspo/OpenEnv-v0", url=url, observation="text")
        env.reset(seed=0)
        shown, _, terminated, *_ = env.step(talk.actions[0])
        assert (shown, terminated) == (talk.observations[1], False)
        env.close()


def test_the_wheel_serves_and_openenv_validates_it(tmp_path, monkeypatch):
    from openenv.cli._validation import validate_running_environment

    spec, kwargs = ENVS["file"]
    folder = tmp_path / "package"
    write_package(spec, "openenv", folder, **kwargs)
    command = [sys.executable, "-m", "openenv.cli", "validate", str(folder), "--skip-build"]
    checked = subprocess.run([*command, "--level", "static"], capture_output=True, text=True)
    assert (checked.returncode, "Verdict: PASS" in checked.stdout) == (0, True), checked.stdout
    monkeypatch.syspath_prepend(install(folder, tmp_path / "site"))
    package = importlib.import_module("gspo_shop")
    assert package.__all__ == ["ShopClient", "TextAction", "TextObservation"]
    with serving(importlib.import_module("gspo_shop.server.app").app) as url:
        report = validate_running_environment(url)
        assert report["passed"], report
        with package.ShopClient(base_url=url).sync() as client:
            assert client.reset(seed=3).observation.text == talks("file")[0].observations[0]
