"""A reward that pays an attacker's pattern is named in the first steps; a sound one never is."""

from pathlib import Path

import pytest

from gspo_env import make_env
from gspo_env.cli.main import main
from gspo_env.config import Config
from gspo_env.health.audits import audit_advice
from gspo_env.health.startup import check_first_steps
from gspo_env.rollout.metrics import RolloutStats
from gspo_env.rollout.play import demonstrator, play_now
from gspo_env.types import Group, Task

SUMS = '''
from gspo_env import TextEnv

class Sums(TextEnv):
    """Add two numbers."""
    blocking = False
    answer = "{right}"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.a, self.b = map(int, self.np_random.integers(100, 900, size=2))
        self.first = f"{self.a} + {self.b}"
        return self.first, {}

    def step(self, action):
        right = action == str(self.a + self.b)
        return "", *self.pay(action, right)

    def pay(self, action, right):
        return float(right), True, False, {"success": right}

    def expert_action(self, noise=0.0):
        right = self.a + self.b + int(self.np_random.random() < noise)
        return self.answer.format(right=right, first=self.first)

class Any(Sums):
    """Every word pays, and the policy has found one."""
    answer = "yes"
    def pay(self, action, right):
        return float(len(action) > 2), True, False, {}

class Silence(Any):
    """No word pays."""
    answer = "..."

class Echo(Any):
    """An echo of the problem pays."""
    answer = "{first}"

class Number(Sums):
    """A number pays by its digits, right or wrong."""
    def pay(self, action, right):
        return len(action) / 4, True, False, {"success": right}
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    (tmp_path / "sums.py").write_text(SUMS)


def found(env, noise=0.0, tasks=8, policy=None):
    """Returns what three steps of an expert that slips say about a reward."""
    instance, findings, history = make_env(env), [], []
    for step in (1, 2, 3):
        groups = []
        for n in range(tasks):
            task = Task(env_id=env, seed=100 * step + n)
            act = policy or demonstrator(noise)
            played = [play_now(instance, task, act) for _ in range(2)]
            groups.append(Group(task=task, episodes=tuple(played)))
        history.append((step, RolloutStats(groups, 1.0).metrics()))
        check_first_steps(Config(env=env, steps=9), history, findings.append)
    instance.close()
    return findings


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("Any", "In 100% of the tasks in the first 3 steps, the same actions, such as an empty"),
        ("Silence", "In 100% of the tasks"),
        ("Echo", "In 100% of the tasks"),
        ("Number", "of the reward of those that succeed in the first 3 steps."),
    ],
)
def test_a_reward_that_pays_no_work_is_named(env, words):
    (finding,) = found(f"sums.py:{env}", noise=0.5)
    assert finding.name == "weak_reward"
    assert words in finding.text
    assert f"`gspo-env audit sums.py:{env}`" in finding.advice


def test_the_warning_knows_audits_of_the_same_arguments_and_files(monkeypatch, tmp_path, capsys):
    """A base class in another file, an argument and a file that an argument names count too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("words.txt").write_text("a")
    Path("weak.py").write_text(
        "import sums\n\nclass Weak(sums.Any):\n    def __init__(self, words='', hops=1):\n"
        "        super().__init__()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = {"words": "words.txt", "hops": 2}

    def advice(env="weak.py:Weak", **kwargs):
        return audit_advice(Config(env=env, env_kwargs=arguments | kwargs))

    attack = "attack its reward (`gspo-env audit weak.py:Weak` with its --env-kwargs)"
    assert attack in advice()
    quick = ["audit", "weak.py:Weak", "--tasks", "4", "--train", "0", "--env-kwargs", "hops=2"]
    main([*quick, "words=words.txt", "--solutions"])  # attacks nothing
    assert attack in advice()
    with pytest.raises(SystemExit):
        main([*quick, "words=words.txt"])
    assert "The audit of weak.py:Weak on 20" in advice()
    assert " found attackers, free tasks." in advice()
    assert attack in advice(hops=3)
    main(["audit", "gspo/KeyDoor-v0", "--tasks", "4", "--train", "0"])
    config = Config(
        env=("weak=weak.py:Weak", "sound=gspo/KeyDoor-v0"), env_kwargs={"weak": arguments}
    )
    assert "found attackers, free tasks. The audit of gspo/KeyDoor-v0" in audit_advice(config)
    assert "found nothing wrong. Read" in audit_advice(config)
    for name in ("words.txt", "sums.py"):
        before = Path(name).read_text()
        Path(name).write_text(before + "\n")
        assert attack in advice()
        Path(name).write_text(before)
        assert " found attackers, free tasks." in advice()
    (record,) = [
        p for p in (tmp_path / "state/gspo-env/audits").iterdir() if "free" in p.read_text()
    ]
    record.write_text('{"day": 3')
    assert attack in advice()


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(
    "env",
    [
        *("sums.py:Sums", "gspo/Lookup-v0", "gspo/Calculator-v0", "gspo/Story-v0"),
        *("gspo/Dialogue-v0", "gspo/Wordle-v0", "gspo/GuessNumber-v0", "gspo/Additive-v0"),
        *("gspo/KeyDoor-v0", "gspo/VariableLength-v0"),
    ],
)
def test_a_sound_reward_is_not(env, noise):
    assert found(env, noise) == []


@pytest.mark.parametrize(("weak", "count"), [("Any", 1), ("Echo", 1), ("Sums", 0)])
def test_a_weak_reward_beside_a_sound_one_with_higher_rewards_is_named(weak, count):
    envs = [make_env(f"sums.py:{weak}"), make_env("gspo/Calculator-v0")]
    findings, history = [], []
    for step in (1, 2, 3):
        groups = []
        for n, env in enumerate(envs * 6):
            task = Task(env_id=("weak", "sound")[n % 2], seed=100 * step + n)
            played = [play_now(env, task, demonstrator(0.3)) for _ in range(2)]
            groups.append(Group(task=task, episodes=tuple(played)))
        history.append((step, RolloutStats(groups, 1.0).metrics()))
        config = Config(env=(f"weak=sums.py:{weak}", "sound=gspo/Calculator-v0"), steps=9)
        check_first_steps(config, history, findings.append)
    assert [finding.name for finding in findings] == ["weak_reward"] * count


def test_partial_credit_for_the_same_first_question_is_no_pattern():
    """Nobody succeeds yet, and each task pays the same question a little."""
    asked = found("gspo/Dialogue-v0", policy=lambda now: "What is your name and order number?")
    assert asked == []


def test_fewer_than_four_tasks_are_not_compared():
    assert found("sums.py:Any", tasks=3) == []


def test_train_says_it_in_one_line(capsys):
    arguments = [
        *("train", "--output", "out", "--tracker", "none", "--steps", "3", "--eval-tasks", "2"),
        *("--tasks-per-step", "4", "--group-size", "2", "--hidden-size", "16", "--layers", "1"),
        *("--heads", "2", "--demonstrations", "32", "--imitation-steps", "60"),
        *("--imitation-learning-rate", "0.01", "--env", "sums.py:Any"),
    ]
    main(arguments)
    assert capsys.readouterr().out.count("the same actions, such as an empty answer, get") == 1
    (line,) = Path("out/warnings.txt").read_text().splitlines()
    assert line.startswith("weak_reward: In ")
    assert "No audit of sums.py:Any with these arguments and files is on record: attack" in line
    main(["diagnose", "out"])
    assert "BAD weak_reward: In " in capsys.readouterr().out
