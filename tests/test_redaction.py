"""Secrets in settings, episodes and messages do not reach what a run writes."""

import json
import os
import stat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jails import run_python

from gspo_env import redaction
from gspo_env.config import Config, from_dict, to_dict, to_toml
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError
from gspo_env.redaction import MARK, find_mark, redact, redact_text, resolve, write_text
from gspo_env.tracking.base import RunInfo, Tracker
from gspo_env.tracking.multi import MultiTracker

SECRET = "hunter2-hunter2"
TOKEN = "ghp_" + "a1B2" * 9


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Forgets the values that a test made known."""
    monkeypatch.setattr(redaction, "_secrets", set())


@pytest.mark.parametrize(
    "value",
    [
        {"servers": {"w": {"command": "x", "env": {"HARMLESS": SECRET}}}},
        {"servers": {"w": {"url": "http://x", "headers": {"X-Thing": SECRET}}}},
        {"servers": {"w": {"url": f"http://me:{SECRET}@host/mcp"}}},
        {"servers": {"w": {"url": f"http://host/mcp?a=1&api_key={SECRET}&b=2"}}},
        {"servers": {"w": ["serve", "--api-key", SECRET]}},
        {"servers": {"w": ["serve", f"--token={SECRET}"]}},
        {"servers": {"w": ["env", f"GITHUB_TOKEN={SECRET}", "serve"]}},
        {"api_key": SECRET},
        {"apiKey": SECRET},
        {"a": [{"client-secret": SECRET}]},
        {"Authorization": SECRET},
        {"text": f"Authorization: Bearer {SECRET}"},
        {"text": f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----"},
        {"env": {"KEY": ["x", {"password": SECRET}]}},
        {"env": {"KEY": "${NAME} sk-" + SECRET}},
    ],
)
def test_a_secret_is_not_written(value):
    assert SECRET not in json.dumps(redact(value))
    assert MARK in json.dumps(redact(value))
    assert SECRET not in to_toml(Config(env_kwargs=value))
    assert redact(redact(value)) == redact(value)


@pytest.mark.parametrize(
    "text",
    [
        *(TOKEN, "sk-proj-" + "x" * 20, "hf_" + "x" * 30, "AKIAABCDEFGHIJKLMNOP"),
        *("xoxb-1234567890-abc", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4"),
        "glpat-" + "y" * 20,
    ],
)
def test_what_looks_like_a_key_is_redacted_in_texts(text):
    assert redact_text(f"the key is {text}, use it") == f"the key is {MARK}, use it"


@pytest.mark.parametrize(
    "value",
    [
        {"env": "gspo/SQL-v0", "max_turn_tokens": 64, "ratio": "token", "tokenizer": "some/name"},
        {"env": {"KEY": "${NAME}"}, "headers": {"Authorization": "Bearer ${NAME}"}},
        {"password": "${NAME}"},
        {"env": {"DATABASE": "postgres://reader:${PASSWORD}@host.example.com:/shop"}},
        {"command": ["python", "-m", "server", "--tokens", "12", "--key", "name"]},
        {"answer_key": "answer", "monkey": "banana", "secretary": "Ada"},
        {"url": "https://host:8000/a@b?key"},
        {"prompt": "You have a basic understanding of bearer certificates."},
        {"aggregation": "token_mean", "old_logprobs": "engine", "n": None, "flag": True},
    ],
)
def test_what_is_no_secret_stays(value):
    assert redact(value) == value


def test_a_run_in_another_process_gets_the_real_values():
    config = Config(env_kwargs={"api_key": SECRET})
    assert from_dict(to_dict(config)).env_kwargs == {"api_key": SECRET}


def test_the_value_of_a_named_variable_is_redacted_wherever_it_appears(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    monkeypatch.setenv("SOME_FOLDER", "/a/plain/folder")
    named = resolve("Bearer ${SOME_API_KEY} ${SOME_FOLDER} $5")
    assert named == f"Bearer {SECRET} /a/plain/folder $5"
    assert redact_text(f"{SECRET} in /a/plain/folder") == f"{MARK} in /a/plain/folder"
    with pytest.raises(ConfigError, match="variable NOT_SET; expected it to be set"):
        resolve("${NOT_SET}")


def test_trackers_get_neither_settings_nor_texts_with_secrets(tmp_path):
    seen: list[Any] = []

    class Choice(Tracker):
        def start(self, run):
            seen.append((run.params, run.tags))
            return self

        def text(self, name, text):
            seen.append(text)

        def finish(self, status, reason):
            raise OSError(f"http://me:{SECRET}@host does not answer")

    params = {"env_kwargs": {"servers": {"w": {"env": {"KEY": SECRET}}}}}
    info = RunInfo(name="n", folder=tmp_path, params=params, tags={"error": TOKEN})
    with MultiTracker({"own": Choice()}, info) as tracker:
        tracker.text("a.txt", f"the tool said {TOKEN}")
    assert "env_kwargs.servers.w.env.KEY" in seen[0][0]
    assert not any(secret in str(seen) for secret in (SECRET, TOKEN))
    assert SECRET not in str(tracker.problems)


def test_a_file_with_a_redacted_text_can_be_read_by_its_owner_alone(tmp_path):
    os.umask(before := os.umask(0o022))
    plain, private, old = tmp_path / "plain", tmp_path / "private", tmp_path / "old"
    old.write_text("")
    write_text(plain, "nothing")
    write_text(private, f"key {TOKEN}")
    write_text(old, f"key {TOKEN}")
    assert private.read_text() == old.read_text() == f"key {MARK}"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (plain, private, old)]
    assert modes == [0o666 & ~before, 0o600, 0o600]


def test_a_text_is_utf8_whatever_the_locale(tmp_path):
    code = (
        "import pathlib, warnings; from gspo_env.redaction import write_text\n"
        "warnings.simplefilter('error', EncodingWarning)\n"
        "write_text(pathlib.Path('a'), '\\xfc \\u2581')"
    )
    run_python("-X", "warn_default_encoding", "-c", code, cwd=tmp_path, check=True)
    assert (tmp_path / "a").read_text("utf-8") == "\xfc \u2581"


def test_a_redacted_setting_is_not_used_as_a_value():
    assert find_mark({"a": [{"b": f"x{MARK}"}]}) == "a.0.b"
    with pytest.raises(ConfigError, match=r"data\.0\.prompt was redacted when it was saved"):
        make_env("gspo/Dataset-v0", data=[{"prompt": MARK}])
    with pytest.raises(ConfigError) as error:
        make_env("gspo/Lookup-v0", api_key=SECRET)
    assert SECRET not in str(error.value)


def test_hostile_text_is_redacted_in_linear_time():
    """Would not end within the time of a test run if an expression backtracked."""
    for text in ("eyJ-", "://a", "a:", "Bearer ", "-----BEGIN ", "xoxb-", "?key=&", "sk-"):
        redact_text(text * 50_000)
        redact({"env": {"KEY": "${NAME}" + text * 50_000 + "!1"}})


@settings(max_examples=40)
@given(st.recursive(st.text() | st.integers() | st.none() | st.floats(allow_nan=False),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_redaction_keeps_the_shape_and_is_stable(value):
    once = redact(value)
    assert redact(once) == once
    json.dumps(once)


def test_log_lines_tracebacks_errors_and_the_progress_show_no_secret():
    code = (
        "import logging, sys\n"
        "from gspo_env.cli.main import main\n"
        "from gspo_env.redaction import log_to_terminal\n"
        "from gspo_env.tracking.console import Progress\n"
        "log_to_terminal()\n"
        "secret = 'sk-' + 'a1b2' * 8\n"
        "logging.warning('key %s', secret)\n"
        "try:\n    raise ValueError(secret)\n"
        "except ValueError:\n    logging.exception('failed')\n"
        "Progress().line(secret)\n"
        "main([secret])\n"
    )
    ended = run_python("-c", code)
    assert ended.returncode == 2
    assert "a1b2a1b2" not in ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr).count("[redacted]") >= 4
