"""A folder from somebody else is data: nothing that its settings name is run or reached."""

import json
import os
import shlex
import shutil
import socket
import threading
from pathlib import Path

import pytest
import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st
from support.cli_errors import refused
from support.runs import sign

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main, parse
from gspo_env.config import Config, from_dict, to_toml
from gspo_env.errors import ConfigError
from gspo_env.model.save import save_model
from gspo_env.rollout.compaction import Summary
from gspo_env.saved import parse as parse_settings
from gspo_env.saved import read_saved
from gspo_env.trust import record

SHORT = [
    *("--hidden-size", "32", "--demonstrations", "64", "--imitation-steps", "4"),
    *("--steps", "1", "--tasks-per-step", "2", "--group-size", "2", "--eval-tasks", "4"),
    *("--tracker", "none", "--max-turn-tokens", "8"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def foreign(tmp_path, model, tokenizer):
    """A function that makes the folder of a stranger with the given settings."""

    def make(tree, name="theirs"):
        folder = tmp_path / name
        save_model(model, tokenizer, folder)
        text = tree if isinstance(tree, str) else tomli_w.dumps(tree)
        (folder / "gspo_env.json").write_text(json.dumps({"config": text}))
        return folder

    return make


PROOF = "open('proof', 'w').close()\n"
MCP = {"command": "/bin/sh", "args": ["-c", "touch proof"]}
ATTACKS = {
    "an environment of a file": ({"env": "theirs/helper.py:Env"}, "--env theirs/helper.py:Env"),
    "a module": ({"env": "helper:Env"}, "--env helper:Env"),
    "an environment that a plugin registers": ({"env": "plugin/Theirs-v0"}, "--env plugin/"),
    "a container": (
        {"env": "gspo/PythonTool-v0", "env_kwargs": {"sandbox": "podman:x"}},
        "--env-kwargs sandbox=podman:x",
    ),
    "an MCP server": (
        {"env": "gspo/MCP-v0", "env_kwargs": {"servers": {"x": MCP}, "data": [{"prompt": "x"}]}},
        "--env-kwargs 'servers={",
    ),
    "a data file and a reward of a file": (
        {
            "env": "gspo/Dataset-v0",
            "env_kwargs": {"data": "/etc/passwd", "rewards": "theirs/helper.py:reward"},
        },
        "--env-kwargs data=/etc/passwd --env-kwargs rewards=theirs/helper.py:reward",
    ),
    "a Gymnasium environment whose name imports a module": (
        {"env": "gspo/GymText-v0", "env_kwargs": {"env": "helper:Env-v0"}},
        "--env-kwargs env=helper:Env-v0",
    ),
    "an opponent of a file": (
        {"env": "gspo/TextArena-v0", "env_kwargs": {"opponent": "theirs/helper.py:play"}},
        "--env-kwargs opponent=",
    ),
    "a server that gets a secret": (
        {
            "env": "gspo/OpenEnv-v0",
            "env_kwargs": {"url": "http://evil.example", "headers": {"X": "${HOME}"}},
        },
        "--env-kwargs url=http://evil.example --env-kwargs 'headers=",
    ),
    "a taskset that is a module": (
        {"env": "gspo/Verifiers-v0", "env_kwargs": {"taskset": "helper"}},
        "--env-kwargs taskset=helper",
    ),
    "an engine of a file": ({"engine": {"name": "theirs/helper.py:Engine"}}, "--engine theirs/"),
    "the address of an engine": (
        {"engine": {"name": "vllm-server", "addresses": ["http://evil.example"]}},
        "--engine.addresses",
    ),
    "arguments of vLLM": (
        {"engine": {"name": "vllm", "engine_args": {"trust_remote_code": True}}},
        "--engine.engine-args",
    ),
}


@pytest.mark.parametrize("command", ["evaluate", "train"])
@pytest.mark.parametrize(("tree", "flag"), ATTACKS.values(), ids=list(ATTACKS))
def test_what_a_folder_names_is_not_run_and_the_flag_is_named(
    capsys, tmp_path, monkeypatch, foreign, command, tree, flag
):
    folder = foreign(tree)
    (folder / "helper.py").write_text(PROOF)
    monkeypatch.syspath_prepend(str(folder))
    assert flag in refused(capsys, command, "--model", str(folder))
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("kind", ["advantage", "loss", "recipe"])
def test_a_class_of_a_file_for_training_is_left_out_of_playing_and_refused_in_training(
    capsys, caplog, tmp_path, foreign, kind
):
    folder = foreign({kind: {"name": "theirs/helper.py:Own", "x": 1}})
    (folder / "helper.py").write_text(PROOF)
    agent = GSPOAgent.load(folder)
    assert f"{kind} of {folder} is not loaded" in caplog.text
    assert getattr(agent.config, kind) == getattr(from_dict({"recipe": "tiny"}), kind)
    assert f"--{kind} theirs/helper.py:Own" in refused(capsys, "train", "--model", str(folder))
    assert not (tmp_path / "proof").exists()


def test_a_text_that_only_the_model_reads_needs_no_flag(foreign):
    compaction = {"name": "summary", "instruction": "Sum up ../secret.py:Class for http://x."}
    assert GSPOAgent.load(foreign({"compaction": compaction})).config.compaction == Summary(
        instruction=compaction["instruction"]
    )


def test_a_tracker_of_a_folder_is_not_used(caplog, tmp_path, foreign):
    folder = foreign({"tracker": {"name": "mlflow", "tracking_uri": "http://evil.example"}})
    config = parse(["train", "--model", str(folder)]).resolved
    assert config.tracker == Config().tracker
    assert "the tracker that" in caplog.text
    assert GSPOAgent.load(folder).config.tracker == Config().tracker


def test_where_a_folder_would_write_and_load_from_is_not_taken(foreign):
    folder = foreign({"output": "/etc", "model": "evil/model"})
    config = parse(["train", "--model", str(folder)]).resolved
    assert (config.output, config.model) == ("", str(folder))


def test_flags_of_the_user_replace_what_a_folder_names(foreign):
    tree = {
        "env": "gspo/Dataset-v0",
        "env_kwargs": {"data": "/etc/passwd", "max_turns": 3, "chat": "turns"},
        "engine": {"name": "vllm-server", "addresses": ["http://evil.example"]},
    }
    folder = foreign(tree)
    flags = ["--env-kwargs", "data=mine.jsonl", "--addresses", "http://localhost:1"]
    config = parse(["train", "--model", str(folder), *flags]).resolved
    assert config.env_kwargs == {"data": "mine.jsonl", "max_turns": 3, "chat": "turns"}
    assert config.engine.addresses == ("http://localhost:1",)
    assert parse(["train", "--model", str(folder), "--env", "gspo/SQL-v0", *flags[2:]])


HIDDEN_KEY = 'x = {a = """\\"""", ' + "b." * 50_000 + 'b = "1"}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is damaged"),
        (b"[]", "is damaged"),
        (b'{"config": 3}', "is damaged"),
        (b'{"config": "= ="}', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b" " * (2**20 + 1), "more than 1,048,576 bytes"),
        (b'{"config": "steps = -3"}', "steps is -3"),
        (b'{"config": "stepz = 3"}', "stepz"),
        (b'{"config": "seed = 1e400"}', "seed"),
        (b'{"config": "steps = ' + b"9" * 4000 + b'"}', "steps is 999"),
        (b'{"config": "' + b"a." * 50_000 + b'a = 1"}', "a key has more than 32 parts"),
        (b'{"config": "[' + b"'$'. " * 50_000 + b'a]"}', "a key has more than 32 parts"),
        (b'{"config": "x = {' + b"a\\t ." * 50_000 + b'a = 1}"}', "more than 32 parts"),
        (json.dumps({"config": HIDDEN_KEY}).encode(), "more than 32 parts"),
        # each of these took hours: it was searched anew from each of its characters
        (json.dumps({"config": "k" * 1_000_000 + " = 1"}).encode(), "unknown field 'kkk"),
        (json.dumps({"config": '\\"""\n' * 100_000}).encode(), "is damaged"),
        (json.dumps({"config": '\\"' * 100_000}).encode(), "is damaged"),
        (json.dumps({"config": f'env = ":{"1" * 1_000_000}x"'}).encode(), "env = "),
        (json.dumps({"config": f"env = {[f'e{n}' for n in range(60_000)]}"}).encode(), "env = "),
    ],
)
def test_damaged_settings_are_one_sentence(capsys, foreign, content, words):
    folder = foreign({})
    (folder / "gspo_env.json").write_bytes(content)
    assert words in refused(capsys, "evaluate", "--model", str(folder))


def test_a_device_or_a_pipe_as_settings_is_refused(capsys, foreign):
    folder = foreign({})
    (folder / "gspo_env.json").unlink()
    (folder / "gspo_env.json").symlink_to("/dev/zero")
    assert "is not a regular file" in refused(capsys, "evaluate", "--model", str(folder))
    (folder / "gspo_env.json").unlink()
    os.mkfifo(folder / "gspo_env.json")
    assert "is not a regular file" in refused(capsys, "evaluate", "--model", str(folder))


def test_a_link_to_other_settings_is_read_as_data_too(capsys, tmp_path, foreign):
    (tmp_path / "elsewhere.json").write_text(json.dumps({"config": 'env = "helper:Env"'}))
    folder = foreign({})
    (folder / "gspo_env.json").unlink()
    (folder / "gspo_env.json").symlink_to(tmp_path / "elsewhere.json")
    assert "--env helper:Env" in refused(capsys, "evaluate", "--model", str(folder))


def test_control_characters_of_a_folder_do_not_reach_the_terminal(capsys, foreign):
    folder = foreign({"env": "\x1b]0;owned\x07\x1b[2J\u202eevil:Env"})
    said = refused(capsys, "evaluate", "--model", str(folder))
    assert "\\x1b]0;owned" in said
    assert not {"\x1b", "\x07", "\u202e"} & set(said)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["env", "env_kwargs", "rollout", "engine", "advantage", "learner", "tracker", "recipe", "seed"]
)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
@example({"env": "\n"})
def test_any_settings_are_read_or_refused_in_one_sentence(tmp_path_factory, tree):
    from pydantic_core import to_jsonable_python

    folder = tmp_path_factory.mktemp("any")
    without_null = {k: v for k, v in tree.items() if v is not None}
    try:
        text = tomli_w.dumps(to_jsonable_python(without_null))
    except (TypeError, ValueError):
        return
    (folder / "config.toml").write_text(text, errors="ignore")
    said = ""
    try:
        saved = read_saved(folder)
        from_dict(saved.settings(playing=True))
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (["--advantage", "group_gae", "--lam", "0.9"], "advantage.lam", 0.9),
        (["--tracker", "mlflow", "--experiment", "mine"], "tracker.experiment", "mine"),
        (["--tracker", "mlflow", "--tracking-uri", "sqlite:///a.db"], "tracker.tracking_uri", None),
        (["--curriculum", "ladder", "--values", "1", "2"], "curriculum.values", (1, 2)),
    ],
)
def test_a_flag_may_set_what_only_the_class_named_beside_it_has(foreign, flags, path, value):
    foreign({"env": "gspo/Lookup-v0", "advantage": "outcome", "tracker": "none", "seed": 7})
    config = parse(["train", "--model", "theirs", *flags]).resolved
    section, _, name = path.partition(".")
    assert getattr(getattr(config, section), name) == (value or "sqlite:///a.db")
    assert config.seed == 7


def test_a_run_names_the_file_of_the_settings_that_it_takes_from_a_folder(capsys, foreign):
    foreign({"env": "gspo/Lookup-v0", "recipe": "tiny", "tracker": "none"})
    flags = ["--tracker", "mlflow", "--tracking-uri", "nokind://x"]
    with pytest.raises(SystemExit):
        main(["train", "--model", "theirs", *flags])
    shown = capsys.readouterr().out
    assert "settings of theirs/gspo_env.json apply, unless a flag says otherwise" in shown


MINE = """
from gspo_env import TextEnv
class Mine(TextEnv):
    system_prompt = "say yes"
    def __init__(self, words=2):
        self.words = words
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "yes or no", {}
    def step(self, action):
        return "", float("yes" in action), True, False, {"success": "yes" in action}
    def expert_action(self, slip):
        return "yes"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A place where the user trained on an environment in a file, and a copy beside it."""
    place = tmp_path_factory.mktemp("trained") / "place"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_STATE_HOME", str(place / "state"))
        Path("mine.py").write_text(MINE)
        flags = ["--env", "mine.py:Mine", "--env-kwargs", "words=3", "--output", "run"]
        main(["train", *SHORT, *flags, "--seed", "7"])
    shutil.copytree(place, place.with_name("copy"), symlinks=True)
    return place


@pytest.fixture
def mine(trained, monkeypatch, capsys):
    """A folder that the user trained, as it was then, in the working folder."""
    shutil.rmtree(trained)
    shutil.copytree(trained.with_name("copy"), trained, symlinks=True)
    monkeypatch.chdir(trained)
    monkeypatch.setenv("XDG_STATE_HOME", str(trained / "state"))
    capsys.readouterr()
    return trained / "run"


def test_a_folder_that_the_user_trained_is_evaluated_and_resumes_without_flags(capsys, mine):
    main(["evaluate", "--model", "run", "--tasks", "2"])
    assert "success" in capsys.readouterr().out
    config = parse(["train", "--model", "run"]).resolved
    assert config.env == "mine.py:Mine"
    assert config.env_kwargs == {"words": 3}
    assert config.learner.learning_rate == 4e-4
    assert config.seed == 7
    assert config.model == "run"
    assert config.output == ""
    assert parse(["train", "--model", "run", "--seed", "9"]).resolved.seed == 9
    main(["train", "--model", "run", "--output", "next"])
    main(["evaluate", "--model", "next", "--tasks", "2"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda run: Path("mine.py").write_text(MINE + "# other\n"), "the files changed since"),
        (lambda run: run.rename("moved"), "no record says that you"),
        (lambda run: Path("state/gspo-env/trained").rename("gone"), "no record says that you"),
        (lambda run: os.chdir(Path("state")), "mine.py cannot be found from here, and you trained"),
        (
            lambda run: [
                path.write_text(path.read_text().replace("words = 3", 'words = \\"x\\"'))
                for path in (run / "model").glob("gspo_env.json")
            ],
            "the settings changed since",
        ),
    ],
    ids=["file", "folder", "record", "place", "settings"],
)
def test_where_anything_differs_from_the_record_the_flag_is_needed_and_says_why(
    capsys, mine, change, why
):
    file = Path("mine.py").resolve()
    change(mine)
    folder = str(mine) if mine.exists() else "moved"
    said = refused(capsys, "evaluate", "--model", folder)
    assert why in said
    flag = "mine.py:Mine" if Path("mine.py").exists() else f"{file}:Mine"
    assert said.split("trust it, add ")[1].startswith(f"--env {shlex.quote(flag)}")
    if folder != "moved":
        flags = ["--env", flag, "--env-kwargs", "words=3"]
        main(["evaluate", "--model", folder, "--tasks", "2", *flags])


def test_a_run_resumes_from_another_working_folder_with_the_flag_that_its_error_names(
    capsys, mine, monkeypatch
):
    monkeypatch.chdir(mine.parent / "state")
    said = refused(capsys, "train", "--resume", str(mine), "--steps", "2")
    flag = shlex.split(said.split("trust it, add ")[1])
    assert flag == ["--env", f"{mine.parent}/mine.py:Mine"]
    other = ["--env", "gspo/Lookup-v0"]
    assert "mine.py:Mine" in refused(capsys, "train", "--resume", str(mine), *other)
    main(["train", "--resume", str(mine), "--steps", "2", *flag])
    main(["train", "--resume", str(mine), "--steps", "3"])
    assert "changed" not in capsys.readouterr().out


def test_a_resumed_run_says_that_the_file_of_its_environment_has_changed(capsys, mine):
    Path("mine.py").write_text(MINE + "# other\n")
    assert "the files changed" in refused(capsys, "train", "--resume", "run", "--steps", "2")
    main(["train", "--resume", "run", "--steps", "2", "--env", "mine.py:Mine"])
    said = "mine.py has changed since this run was last trained"
    assert f"WARNING {said}" in capsys.readouterr().out
    assert said in Path("run/warnings.txt").read_text()
    main(["train", "--resume", "run", "--steps", "3"])
    assert said not in capsys.readouterr().out


def test_a_run_of_somebody_else_resumes_only_with_the_flag(capsys, mine):
    main(["train", "--resume", "run", "--steps", "2"])
    Path("state/gspo-env/trained").rename("gone")
    said = refused(capsys, "train", "--resume", "run", "--steps", "3")
    assert "--env mine.py:Mine" in said
    Path("mine.py").write_text(MINE.replace("words=2", "words=3"))
    with pytest.raises(ConfigError, match=r"--env mine.py:Mine"):
        GSPOAgent.resume("run")
    main(["train", "--resume", "run", "--steps", "3", "--env", "mine.py:Mine"])
    assert read_saved("run").settings()["steps"] == 3


def test_a_run_that_begins_with_a_model_elsewhere_resumes_only_with_the_flag(capsys, foreign):
    base = str(foreign({"env": "gspo/Additive-v0"}))
    main(["train", *SHORT, "--model", base, "--output", "run"])
    main(["train", "--resume", "run", "--steps", "2"])
    Path("state/gspo-env/trained").rename("gone")
    assert f"add --model {shlex.quote(base)}" in refused(
        capsys, "train", "--resume", "run", "--steps", "3"
    )
    with pytest.raises(ConfigError, match="begins with the model"):
        GSPOAgent.resume("run")
    main(["train", "--resume", "run", "--steps", "3", "--model", base])


def test_damaged_settings_of_a_checkpoint_are_one_sentence(capsys, mine):
    path = max((mine / "checkpoints").glob("step-*")) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": "x"}))
    sign(path)
    assert "are damaged" in refused(capsys, "train", "--resume", str(mine))


def test_an_environment_that_was_moved_keeps_the_numbers_of_its_folder(mine):
    Path("other.py").write_text(MINE)
    agent = GSPOAgent.load(mine, "other.py:Mine")
    assert agent.config.env_kwargs == {"words": 3}
    assert agent.config.env == "other.py:Mine"
    assert GSPOAgent.load(mine, "gspo/Lookup-v0").config.env_kwargs == {}


def test_a_command_is_trusted_only_in_the_folder_where_it_was_used(tmp_path, monkeypatch):
    servers = {"x": {"command": "python", "args": ["server.py"]}}
    kwargs = {"servers": servers, "data": "rows.jsonl"}
    config = from_dict({"env": "gspo/MCP-v0", "env_kwargs": kwargs})
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rows.jsonl").write_text("{}")
        (tmp_path / place / "server.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    Path("run").mkdir()
    Path("run/config.toml").write_text(to_toml(config))
    record(Path("run"), config)
    assert not read_saved("run").untrusted
    monkeypatch.chdir(tmp_path / "there")
    assert read_saved(tmp_path / "here" / "run").untrusted.keys() >= {"env_kwargs.servers"}


def test_files_that_a_folder_names_are_looked_for_a_few_times_at_most(tmp_path):
    names = {"env": "mine.py:Mine", "env_kwargs": {"x": "a:" * 2**18}}
    record(tmp_path, Config(env="mine.py:Mine"))  # so there is something to compare with
    settings = parse_settings(tmp_path / "config.toml", to_toml(Config(**names)))
    assert "the settings changed since" in settings.problem.reason


def test_settings_that_need_no_flag_leave_no_record(tmp_path):
    record(tmp_path, Config.from_recipe("tiny"))
    assert not (tmp_path / "state").exists()


def test_a_state_directory_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "state").write_text("in the way")
    record(tmp_path, from_dict({"env": "mine.py:Mine"}))
    assert "cannot note" in caplog.text


def test_a_user_without_a_home_gets_a_warning_and_needs_the_flags(
    tmp_path, monkeypatch, caplog, foreign
):
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)  # no user has this number
    with pytest.raises(RuntimeError):
        Path.home()
    config = from_dict({"env": f"{tmp_path}/mine.py:Mine"})
    record(tmp_path / "run", config)
    assert "cannot note what" in caplog.text
    assert read_saved(foreign({"env": config.env})).untrusted


def test_loading_a_folder_opens_no_connection(monkeypatch, foreign):
    def connect(*arguments):
        raise AssertionError(f"connects to {arguments}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    before = threading.active_count()
    assert GSPOAgent.load(foreign({"seed": 3})).config.seed == 3
    assert threading.active_count() <= before + 2
