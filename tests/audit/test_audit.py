"""`gspo-env audit` finds weak rewards, calls sound ones sound, and says what it has seen."""

import json
import random
from dataclasses import replace

import pytest
from support.planted_rewards import HALF_WORK, SOUND, WEAK, Dial, Sums, planted

from gspo_env import ConfigError, tool
from gspo_env.audit import audit
from gspo_env.audit.attackers import ATTACKERS
from gspo_env.cli.main import main
from gspo_env.env.base import extract_tag


class Judge(Sums):
    def group_reward(self, group):
        def judged(episode):
            text = episode.turns[-1].text
            reward = float(bool(episode.success) or "highest score" in text)
            info = replace(episode.turns[-1].info, reward_parts={"judge": reward})
            return replace(episode, turns=(replace(episode.turns[-1], reward=reward, info=info),))

        return replace(group, episodes=tuple(map(judged, group.episodes)))


class HonestJudge(Sums):
    def group_reward(self, group):
        scored = [
            replace(e, turns=(replace(e.turns[-1], reward=float(e.success)),))
            for e in group.episodes
        ]
        return replace(group, episodes=tuple(scored))


class Escape(Sums):
    def pay(self, text, right):
        return 0.0 if extract_tag(text, "answer") is None else 1.0 if right else -1.0


class Strict(Sums):
    def pay(self, text, right):
        return 1.0 if right else -1.0


class Leak(Sums):
    says = "Problem: {} (key {}) Go."


class OneFree(Sums):
    num_tasks = 8

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.a, self.b = int(self.np_random.integers(8)), 500
        return f"{self.a} + 500 = ?", {"task_key": self.a}

    def step(self, action):
        right = self.a == 3 or extract_tag(action, "answer") == str(self.a + self.b)
        return "", float(right), True, False, {"success": right}


class ForeignJudge(Sums):
    def pay(self, text, right):
        return right or "Höchstpunktzahl" in text


class FailedCallChanges(Dial):
    def turn(self, to: int) -> str:
        self.dial = to if 0 <= to < 40 else self.goal
        if self.dial != to:
            raise ValueError("out of range")
        return f"The dial is at {to}."

    turn.__doc__ = Dial.turn.__doc__
    turn = tool(turn)


class RandomReward(Sums):
    def pay(self, text, right):
        return right * (0.5 + random.random() / 2)


FOUND = {
    ForeignJudge: ("attackers", "text for the judge"),
    FailedCallChanges: ("attackers", "a call that fails, then stop"),
    RandomReward: ("repeats", "another episode"),
    Judge: ("attackers", "text for the judge"),
    Escape: ("escape", "'empty' gets 1 more"),
    Leak: ("attackers", "copy from the prompt"),
    OneFree: ("free tasks", "1 of 8 tasks pay for no work as for gold: 3."),
}


@pytest.mark.parametrize("env", FOUND)
def test_weak_rewards_are_found(env):
    name, text = FOUND[env]
    result = audit(env)
    findings = {finding.name: finding for finding in result.findings if not finding.ok}
    assert text in findings[name].text
    assert result.is_sound is False


@pytest.mark.slow
@pytest.mark.parametrize("name", WEAK)
def test_a_weak_reward_of_every_kind_is_found(name):
    findings = audit(planted(name, WEAK), tasks=16).findings
    bad = {finding.name for finding in findings if not finding.ok}
    expected = {"attackers", "free tasks", "escape"}
    assert bad & (expected | ({"success"} if name in HALF_WORK else set()))


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_reward_is_called_sound(name):
    result = audit(planted(name, SOUND))
    assert [str(finding) for finding in result.findings if not finding.ok] == []


@pytest.mark.parametrize("env", [HonestJudge, "gspo/Lookup-v0"])
def test_a_sound_judge_and_environment_are_called_sound(env):
    result = audit(env)
    assert [str(finding) for finding in result.findings if not finding.ok] == []
    assert result.tasks == 32


def unsolved(env):
    """Returns the environment without its expert, which most users have."""

    def nothing(self, noise=0.0):
        raise NotImplementedError

    return type(f"Unsolved{env.__name__}", (env,), {"expert_action": nothing})


@pytest.mark.parametrize("name", ["sums", "desk", "rooms", "one call"])
def test_without_an_expert_a_reward_that_pays_no_attacker_is_not_called_bad(name):
    result = audit(unsolved(planted(name, SOUND)), tasks=8)
    assert [str(finding) for finding in result.findings if not finding.ok] == []
    assert any("expert_action" in finding.advice for finding in result.findings)


@pytest.mark.parametrize("name", ["keyword", "any box", "verdict", "any call", "quitting wins"])
def test_without_an_expert_weak_rewards_are_found_too(name):
    result = audit(unsolved(planted(name, WEAK)), tasks=8)
    bad = {finding.name for finding in result.findings if not finding.ok}
    assert bad & {"attackers", "free tasks"}
    assert result.facts["the search found"]


@pytest.mark.parametrize(
    ("env", "wrong"),
    [
        ("gspo/Calculator-v0", []),
        ("gspo/Story-v0", []),
        ("gspo/Dialogue-v0", []),
        ("gspo/Wordle-v0", []),
        ("gspo/GuessNumber-v0", []),
        ("examples/backwards.py:Backwards", []),
        ("gspo/KeyDoor-v0", []),
        ("gspo/Additive-v0", ["attackers"]),  # each right word pays, and one of four is right
        ("gspo/VariableLength-v0", ["attackers", "free tasks"]),  # a near miss pays
    ],
)
def test_what_the_audit_says_of_the_built_in_environments(env, wrong):
    result = audit(env, tasks=16)
    assert [finding.name for finding in result.findings if not finding.ok] == wrong


def test_reward_and_success_that_disagree_are_shown_and_the_page_has_no_markup_of_theirs(
    tmp_path, monkeypatch, capsys, quick_store
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weak.py").write_text(
        "from gspo_env import TextEnv\n\n"
        "class Weak(TextEnv):\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return '<b>Say</b> ' + str(self.np_random.integers(1000)), {}\n\n"
        "    def step(self, action):\n"
        "        return '', float(len(action) > 3), True, False, {'success': action == 'no'}\n"
    )
    arguments = ["audit", "weak.py:Weak", "--tasks", "4", "--output", "seen"]
    store = f"sqlite:///{tmp_path}/store.db"
    with pytest.raises(SystemExit, match="1"):
        main([*arguments, "--json", "--tracking-uri", store])
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "seen/audit.json").read_text())
    assert printed["sound"] is False
    assert printed["facts"]["expert"].startswith("no")
    assert len(printed["shown"]) == 3
    assert "1. no success, with 100%" in next(iter(printed["shown"]))
    rows = {row["name"]: row["share"] for row in printed["rows"]}
    assert rows["empty"] == 0
    assert rows["echo"] == 1
    assert rows["trained on the reward"] == 1  # which has learned to be paid
    page = (tmp_path / "seen/audit.html").read_text()
    assert "&lt;b&gt;Say" in page
    assert "<b>Say" not in page
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    run = client.search_runs([client.get_experiment_by_name("gspo_env").experiment_id])[0]
    assert run.data.metrics["audit/echo"] == 1
    assert [f.path for f in client.list_artifacts(run.info.run_id, "audit")] == [
        "audit/audit.html",
        "audit/audit.json",
    ]


class Raises(Sums):
    """Fails on long actions."""

    def step(self, action):
        if len(action) > 60:
            raise RuntimeError("not understood")
        return super().step(action)


def test_an_attacker_that_only_makes_the_environment_fail_has_no_share_and_an_open_interval():
    assert audit(Raises, tasks=4, train=1).rows[-1].name == "found by a search"
    result = audit(Raises, tasks=4, train=0)
    rows = {row.name: row for row in result.rows}
    assert (rows["long text"].share, rows["long text"].low, rows["long text"].high) == (0, 0, 1)
    assert rows["expert (gold)"].share == 1
    assert not result.free
    failures, of, _ = result.facts["failed episodes"].partition(" of ")
    assert of
    assert int(failures) >= 4


def test_the_same_audit_twice_is_the_same_and_one_more_is_allowed():
    weak = planted("format", WEAK)
    first, again = audit(weak, tasks=4), audit(weak, tasks=4)
    assert (first.rows, first.findings) == (again.rows, again.findings)
    assert {row.name for row in first.rows} > set(ATTACKERS)
    allowed = {f.name: f.ok for f in audit(weak, tasks=4, allow=1.0).findings}
    assert allowed["attackers"]
    assert not allowed["success"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "env is ''; expected one, such as `gspo-env audit gspo/Lookup-v0`"),
        (["gspo/Lookup-v0", "--tracking-uri", "x"], "tracking_uri needs --output"),
        (["gspo/Lookup-v0", "--tasks", "0"], "tasks"),
        (["gspo/Looup-v0"], "did you mean gspo/Lookup-v0"),
        (["gspo/Lookup-v0", "--output", "/proc/x"], "cannot write to '/proc/x': "),
        (["gspo/Lookup-v0", "--output", "/proc"], "cannot make '/proc/"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["audit", *arguments])
    assert text in capsys.readouterr().err


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="tasks is 0, max_turns 16 and gold 1; expected"):
        audit("gspo/Lookup-v0", tasks=0)
