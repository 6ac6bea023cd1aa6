"""Tasks in Harbor's format: two tasks, by their solution, by nothing and by hand."""

import json
import shutil
from pathlib import Path

import pytest
from support.containers import IMAGE, PROGRAM, require_image
from support.jails import require_isolation, run_python

from gspo_env import make_env
from gspo_env.audit import audit
from gspo_env.audit.auditor import GOLD
from gspo_env.errors import ConfigError, EnvironmentContractError, EnvironmentCrashError
from gspo_env.sandbox import find_missing_for_commands
from gspo_env.sandbox.containers import call
from gspo_env.tools.tool import format_tool_call

CONTAINER = pytest.param(PROGRAM, marks=pytest.mark.containers)
TOML = """
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 300.0
[environment]
memory_mb = 256
storage = "16M"
"""
TEST = """#!/bin/bash
[ "$(cat /app/{file})" = {value} ] && echo 1 >/logs/verifier/reward.txt || exit 1
"""


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def tasks(tmp_path):
    for name, value in (("lines", 3), ("words", 5)):
        write(
            tmp_path / name,
            {
                "task.toml": TOML,
                "instruction.md": f"Write the number of {name} of data.txt into {name}.txt.",
                "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nCOPY data.txt ./\n",
                "environment/data.txt": "a b\nc d\ne\n",
                "tests/test.sh": TEST.format(file=f"{name}.txt", value=value),
                "solution/solve.sh": f"#!/bin/bash\nwc -{name[0]} <data.txt >{name}.txt\n",
            },
        )
    return tmp_path


@pytest.fixture(params=["jail", CONTAINER])
def env(request, tasks):
    if request.param == PROGRAM:
        require_image()
    else:
        require_isolation(find_missing_for_commands())
    made = make_env("gspo/Harbor-v0", folder=tasks, sandbox=request.param, held_out=0.0)
    yield made.unwrapped
    made.close()


def play(env, *commands, seed=0):
    """The observations, and the last `info`."""
    env.reset(seed=seed, options={"row": 0})
    shown = [env.step(format_tool_call("run", {"command": text}))[0] for text in commands]
    return shown, env.step("Done.")[4]


def test_the_solution_passes_and_nothing_fails_for_each_task(env):
    for row in range(2):
        text, info = env.reset(seed=0, options={"row": row})
        assert info["task_key"] in text
        env.step(env.expert_action())
        _, _, terminated, _, info = env.step(env.expert_action())
        assert (terminated, info["success"], info["episodic_reward"]) == (True, True, 1.0)
        env.reset(seed=0, options={"row": row})
        _, _, terminated, _, info = env.step("")
        assert (terminated, info["success"], info["episodic_reward"]) == (True, False, 0.0)


def test_the_shell_keeps_its_state_and_shows_output_and_exit_code(env):
    env.output = 200
    shown, info = play(
        env,
        "cd /tmp; x=5; both() { echo $1 $x; }; export Y='two\nlines'",
        'pwd; both 4; echo "$Y"; exit 3',
        "echo 'unterminated",
        "for n in $(seq 200); do echo $n; done",
        "trap 'echo bye' EXIT; echo hi",
        "cat /app/data.txt",
    )
    assert shown[0] == "[exit code 0]"
    assert shown[1] == "/tmp\n4 5\ntwo\nlines\n[exit code 3]"
    assert "unexpected EOF" in shown[2]
    assert "\n[... 492 bytes left out ...]\n" in shown[3]
    assert shown[3].startswith("1\n2\n")
    assert shown[3].endswith("199\n200\n[exit code 0]")
    assert shown[4:] == ["hi\nbye\n[exit code 0]", "a b\nc d\ne\n[exit code 0]"]
    assert not info["success"]


def test_a_command_that_takes_the_file_of_its_output_away_spoils_no_other(env):
    take = "echo lost; rm -f /tmp/.gspo-*"
    shown, info = play(env, take, f"{take}; mkdir /tmp/.gspo-output", "echo fine")
    assert shown == ["[exit code 0]", "[exit code 0]", "fine\n[exit code 0]"]
    assert info["episodic_reward"] == 0.0


def test_a_command_has_a_time_and_shows_what_it_wrote_before(env):
    env.command_seconds = 2.0
    shown, _ = play(env, "echo before; sleep 600", "echo $((6 * 7))")
    assert shown == ["before\n[killed after 2 s]", "42\n[exit code 0]"]


def test_what_an_episode_leaves_behind_writes_no_reward(env):
    forge = "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt"
    again = f"(while :; do {forge}; sleep 0.02; done) >/dev/null 2>&1 &"
    planted = "mkdir -p /tests; echo 'echo 1 >/logs/verifier/reward.txt' >/tests/test.sh"
    assert play(env, forge, again, planted)[1]["episodic_reward"] == 0.0


def test_what_an_episode_leaves_in_its_home_is_not_run_by_python_of_the_tests(env, tasks):
    for task in ("lines", "words"):
        (tasks / task / "tests/test.sh").write_text("python3 -c 'import sys' && exit 1")
    forge = "open('/logs/verifier/reward.txt', 'w').write('1')"
    find = "import site; print(site.getusersitepackages())"
    plant = f"""d="$(python3 -c '{find}')"; mkdir -p "$d"
cat >"$d/usercustomize.py" <<'END'
{forge}
END
cp "$d/usercustomize.py" "$d/planted.py"; echo 'import planted' >"$d/planted.pth"
python3 -c 'import usercustomize'"""
    texts, info = play(env, plant, 'echo "$HOME"')
    assert "No module" not in texts[0]
    assert "/tests" not in texts[1]
    assert info["episodic_reward"] == 0.0


def test_tests_that_print_much_are_scored_by_their_reward(env, tasks):
    for task in ("lines", "words"):
        flood = "head -c 9000000 /dev/zero; sleep 1; echo 1 >/logs/verifier/reward.txt"
        (tasks / task / "tests/test.sh").write_text(flood)
    assert play(env)[1]["episodic_reward"] == 1.0


@pytest.mark.containers
def test_a_container_that_is_killed_is_a_lost_episode(tasks):
    require_image()
    env = make_env("gspo/Harbor-v0", folder=tasks, sandbox=PROGRAM, held_out=0.0).unwrapped
    env.reset(seed=0)
    call(PROGRAM, "kill", env._session._name)
    with pytest.raises(EnvironmentCrashError, match="ended from outside"):
        env.step(format_tool_call("run", {"command": "ls"}))
    env.reset(seed=1)
    assert env.step(env.expert_action())[0] == "[exit code 0]"
    env.close()


@pytest.mark.containers
def test_a_command_that_exceeds_the_memory_says_so_and_the_episode_goes_on(tasks):
    require_image()
    env = make_env("gspo/Harbor-v0", folder=tasks, sandbox=PROGRAM, held_out=0.0).unwrapped
    env.reset(seed=0)
    greedy = "printf before; python3 -c 'x = bytearray(2 << 30); x[::4096] = b\"x\" * (2 << 18)'"
    shown = env.step(format_tool_call("run", {"command": greedy}))[0]
    assert shown.startswith("before")
    assert shown.endswith("[killed: out of memory, the limit is 256 MiB]")
    env._commands = ()
    env.step(env.expert_action())
    assert env.step("Done.")[4]["success"]
    env.close()


JSON = "echo '{}' >/logs/verifier/reward.json"


@pytest.mark.parametrize(
    ("test", "reward", "parts"),
    [
        (JSON.format('{"reward": 0.25, "style": 1}'), 0.25, {"style": 1.0}),
        (JSON.format('{"a": 1, "b": 0}'), 0.5, {"a": 1.0, "b": 0.0}),
        ("exit 1", 0.0, None),
        ("echo 1.0 >/logs/verifier/reward.txt", 1.0, None),
        ("echo nan >/logs/verifier/reward.txt", "finite", None),
        (JSON.format("[1]"), "reward of 'lines'", None),
        (JSON.format('{"reward": "much"}'), "reward of 'lines'", None),
    ],
)
def test_what_the_tests_write_is_the_outcome(test, reward, parts, tasks):
    require_isolation(find_missing_for_commands())
    (tasks / "lines/tests/test.sh").write_text(test)
    env = make_env("gspo/Harbor-v0", folder=tasks / "lines", sandbox="jail").unwrapped
    if isinstance(reward, str):
        with pytest.raises(EnvironmentContractError, match=reward):
            play(env)
        return
    _, info = play(env)
    assert (info["episodic_reward"], info.get("reward_parts")) == (reward, parts)
    assert info["success"] == (reward >= 1)


def test_the_share_of_passed_tests_is_partial_credit(tasks):
    require_isolation(find_missing_for_commands())
    report = json.dumps({"results": {"summary": {"tests": 4, "passed": 3}}})
    text = f"echo '{report}' >/logs/verifier/ctrf.json; echo 0 >/logs/verifier/reward.txt"
    (tasks / "lines/tests/test.sh").write_text(text)
    for partial, reward in ((True, 0.75), (False, 0.0)):
        spec = {"folder": tasks / "lines", "sandbox": "jail", "partial": partial}
        _, info = play(make_env("gspo/Harbor-v0", **spec).unwrapped)
        assert (info["episodic_reward"], info["success"]) == (reward, False)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"environment/Dockerfile": "FROM x\nRUN apt-get update"}, "RUN apt-get update"),
        ({"environment/Dockerfile": "FROM x\nCOPY ../secret /app/"}, "COPY ../secret"),
        ({"environment/Dockerfile": "FROM x\nCOPY data.txt /etc/"}, "COPY data.txt /etc/"),
        ({"task.toml": "[verifier.env]\nKEY = '${KEY}'"}, "never passed"),
        ({"task.toml": "[environment]\nmemory = 'much'"}, "memory is 'much'"),
        ({"task.toml": "[agent]\ntimeout_sec = nan"}, "timeout_sec is nan"),
        ({"task.toml": "[verifier]\ntimeout_sec = -1"}, "timeout_sec is -1.0"),
        ({"task.toml": "["}, "task.toml of 'lines'"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_in_one_sentence(files, message, tasks):
    write(tasks / "lines", files)
    with pytest.raises(ConfigError, match=message.replace("$", "\\$")):
        make_env("gspo/Harbor-v0", folder=tasks, sandbox="jail")
    made = make_env("gspo/Harbor-v0", folder=tasks, sandbox="jail", exclude=["lines"])
    assert made.unwrapped.num_tasks == 1


@pytest.mark.parametrize(
    "name", ["task.toml", "instruction.md", "solution/solve.sh", "tests/test.sh"]
)
def test_a_task_that_links_to_a_file_of_this_machine_is_refused(name, tasks, tmp_path_factory):
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text("[agent]")
    (tasks / "words" / name).unlink()
    (tasks / "words" / name).symlink_to(secret)
    with pytest.raises(ConfigError, match=f"{name} of 'words' links to a file outside"):
        make_env("gspo/Harbor-v0", folder=tasks, sandbox="jail")


def test_a_folder_of_tests_that_links_outside_of_its_task_is_refused(tasks):
    shutil.rmtree(tasks / "words/tests")
    (tasks / "words/tests").symlink_to(tasks / "lines/tests")
    with pytest.raises(ConfigError, match=r"tests/test\.sh of 'words' links to a file outside"):
        make_env("gspo/Harbor-v0", folder=tasks, sandbox="jail")


def test_a_task_whose_folder_has_spaces_and_letters_beyond_ascii_is_played(tasks):
    require_isolation(find_missing_for_commands())
    (tasks / "lines").rename(tasks / "zählé lines")
    env = make_env("gspo/Harbor-v0", folder=tasks / "zählé lines", sandbox="jail").unwrapped
    env.reset(seed=0)
    env.step(env.expert_action())
    assert env.step("Done.")[4]["success"]
    env.close()


def test_an_empty_solution_is_an_empty_command(tasks):
    require_isolation(find_missing_for_commands())
    (tasks / "lines/solution/solve.sh").write_text("")
    env = make_env("gspo/Harbor-v0", folder=tasks / "lines", sandbox="jail").unwrapped
    env.reset(seed=0)
    assert '"command": ""' in env.expert_action()
    env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folder": "/nowhere"}, "expected one with tasks"),
        ({"sandbox": "lxc"}, "expected podman, docker, jail"),
        ({"output": 1}, "output 1"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, message, tasks):
    with pytest.raises(ConfigError, match=message):
        make_env("gspo/Harbor-v0", **{"folder": tasks, "sandbox": "jail", **arguments})


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The 40 tasks of `examples/shell_tasks.py`."""
    folder = tmp_path_factory.mktemp("tasks")
    file = Path(__file__).parents[2] / "examples/shell_tasks.py"
    run_python(str(file), str(folder), "--base", IMAGE, check=True)
    return folder


def audited(folder, sandbox, left_out=(), tasks=40):
    names = [path.name for path in folder.iterdir() if path.name.startswith(left_out or "-")]
    kwargs = {"folder": folder, "held_out": 0.0, "sandbox": sandbox, "exclude": names}
    return audit("gspo/Harbor-v0", tasks=tasks, solutions=True, env_kwargs=kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "eval"])
def test_each_task_of_the_example_passes_by_its_solution_and_fails_by_nothing(split, examples):
    require_isolation(find_missing_for_commands())
    # an `.import` needs the program, which a machine may lack
    left_out = () if shutil.which("sqlite3") else ("move-rows",)
    result = audited(examples / split, "jail", left_out)
    assert result.is_sound, result.findings
    total = {"train": 30, "eval": 10}[split]
    assert result.tasks == total - total // 5 * bool(left_out)
    assert [(row.name, row.success) for row in result.rows] == [(GOLD, 1.0), ("empty", 0.0)]


def test_the_audit_names_a_task_whose_solution_fails_and_one_that_pays_for_nothing(tasks):
    require_isolation(find_missing_for_commands())
    (tasks / "lines/solution/solve.sh").write_text("true")
    (tasks / "words/tests/test.sh").write_text("echo 1 >/logs/verifier/reward.txt")
    result = audited(tasks, "jail", tasks=6)
    texts = {finding.name: finding.text for finding in result.findings}
    assert texts["gold"] == "The expert succeeds in 1 of 2 tasks. Not in lines."
    assert "1 of 2 tasks pay for no work as for gold: words" in texts["free tasks"]
    assert not result.is_sound
