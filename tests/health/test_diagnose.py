"""`gspo-env diagnose`: every rule on both sides of its threshold, and real runs that fail."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gspo_env
from gspo_env.cli.main import main
from gspo_env.config import Config, override, to_toml
from gspo_env.health.diagnose import diagnose, lines
from gspo_env.health.run_rules import RULES
from gspo_env.runs import Run
from gspo_env.runs.names import METRICS
from gspo_env.training.checkpoints import Checkpoints
from gspo_env.types import StopReason
from stress import faults

GOOD = {
    **dict.fromkeys(
        [
            *("rollout/malformed_calls", "rollout/lost_episodes", "rollout/env_errors"),
            *("rollout/env_timeouts", "rollout/staleness_mean", "rollout/dropped_groups"),
            *("rollout/stop/max_turn_tokens", "rollout/stop/max_context"),
            *("rollout/stop/max_turns", "rollout/stop/timeout", "train/skipped_steps"),
            *("train/length_biased_groups", "rollout/paid_alike", "rollout/repeated_marks"),
            "train/control_token_probability",
        ],
        0.0,
    ),
    **{"rollout/return_std": 0.4, "rollout/turns": 3.0, "rollout/tokens": 768.0},
    **{"rollout/stop/terminated": 1.0, "eval/return_std": 0.4},
    **{"time/learner_idle": 0.4, "time/rollout_idle": 0.7},
    **{"train/logprob_diff_mean": 1e-7, "train/ratio_min": 0.9, "train/ratio_max": 1.1},
    **{"rollout/success": (0.1, 0.8), "rollout/return": (0.2, 0.9)},
    **{"eval/success": (0.1, 0.8), "eval/return": (0.2, 0.9)},
    **{"rollout/zero_variance_groups": (0.1, 0.3), "train/clipped_fraction": (0.05, 0.1)},
    **{"train/entropy": (0.5, 0.2), "train/grad_norm": (0.3, 0.2)},
    **{"train/advantage_rms": (0.5, 0.4), "train/advantage_share_min": (1.0, 0.2)},
}
"""A sound run: each metric, or its values at the beginning and at the end."""
STUCK = dict.fromkeys(("rollout/success", "rollout/return", "eval/success", "eval/return"), 0.3)
"""Changes to it: nothing rises."""


def write(folder, changes=None, *, steps=20, settings=None):
    """Writes a run whose metrics go straight from their beginning to their end."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {"steps": steps, "tasks_per_step": 8, "model_dtype": "float32", "eval_tasks": 256}
    config = override(Config.from_recipe(), {**base, **(settings or {})})
    (folder / "config.toml").write_text(to_toml(config))
    metrics, rows = {**GOOD, **(changes or {})}, []
    for step in range(steps + 1):
        at = step / steps
        own = {
            name: float(np.interp(at, (0, 1), np.broadcast_to(ends, 2)))
            for name, ends in metrics.items()
            if (step % 5 == 0 if name.startswith("eval/") else step > 0)
        }
        rows.append({"step": step, "time": 0, "metrics": own})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def findings(folder):
    return [finding.name for finding in diagnose(Run.open(folder)).findings]


def test_nothing_is_found_in_a_run_that_learns(tmp_path):
    diagnosis = diagnose(Run.open(write(tmp_path)))
    assert diagnosis.findings == ()
    assert diagnosis.not_judged == ()
    assert f"Nothing wrong was found by {len(RULES)} rules." in lines(diagnosis)


CASES = [
    ("environment", {"rollout/lost_episodes": 4.0}, {"rollout/lost_episodes": 3.0}),
    ("engine", {"train/logprob_diff_mean": 2e-3}, {"train/logprob_diff_mean": 5e-4}),
    (
        "late_turns",
        {"train/logprob_diff_turn_1": 1e-6, "train/logprob_diff_turn_4": 2e-3},
        {"train/logprob_diff_turn_1": 1e-6, "train/logprob_diff_turn_4": 5e-4},
    ),
    (
        "stale",
        {"rollout/staleness_mean": 3.0, "train/ratio_outside_clip": 0.6},
        {"rollout/staleness_mean": 3.0, "train/ratio_outside_clip": 0.4},
    ),
    (
        "collapse",
        dict.fromkeys(("eval/success", "eval/return", "rollout/success"), (0.9, 0.1)),
        dict.fromkeys(("eval/success", "eval/return", "rollout/success"), (0.9, 0.88)),
    ),
    (
        "control_tokens",
        {"rollout/repeated_marks": (0.0, 0.1), "rollout/malformed_calls": (0.0, 2.0)},
        {"rollout/repeated_marks": (0.0, 0.04)},
    ),
    (
        "control_tokens",
        {"train/control_token_probability": (0.001, 0.1), "rollout/malformed_calls": (0.0, 2.0)},
        {"train/control_token_probability": (0.03, 0.06)},
    ),
    ("truncated", {"rollout/turns": 0.0}, {"rollout/turns": 1.0}),
    ("truncated", {"rollout/stop/max_turn_tokens": 0.3}, {"rollout/stop/max_turn_tokens": 0.2}),
    ("truncated", {"rollout/stop/max_context": 0.12}, {"rollout/stop/max_context": 0.08}),
    ("truncated", {"rollout/stop/max_turns": 0.3}, {"rollout/stop/max_turns": 0.2}),
    ("truncated", {"rollout/stop/timeout": 0.1}, {"rollout/stop/timeout": 0.01}),
    (
        "tool_calls",
        {"rollout/malformed_calls": (0.1, 0.6)},
        {"rollout/malformed_calls": (0.0, 0.2)},
    ),
    (
        "hacking",
        dict.fromkeys(("eval/success", "rollout/success"), (0.6, 0.2))
        | dict.fromkeys(("eval/return", "rollout/return"), (0.2, 0.9)),
        {"eval/success": (0.6, 0.55), "eval/return": (0.2, 0.9)},
    ),
    ("weak_reward", {"rollout/paid_alike": 0.95}, {"rollout/paid_alike": 0.8}),
    ("weak_reward", {"rollout/failure_pay": 0.95}, {"rollout/failure_pay": 0.8}),
    (
        "length_bias",
        {"train/length_biased_groups": 0.2},
        {"train/length_biased_groups": 0.05},
    ),
    (
        "clipped",
        {"train/clipped_fraction": 0.4},  # of at most 3/4 with 4 minibatches
        {"train/clipped_fraction": 0.3},
    ),
    (
        "no_variance",
        {**STUCK, "rollout/zero_variance_groups": 0.95},
        {
            "rollout/zero_variance_groups": 0.95,
            "rollout/success": (0.1, 1),
            "eval/success": (0.1, 1),
        },
    ),
    (
        "no_variance",
        {**STUCK, "train/advantage_share_min": 0, "rollout/zero_variance_groups": 1},
        {"train/advantage_share_min": 0.2},
    ),
    ("gradient", {"train/skipped_steps": 0.1}, {"train/skipped_steps": 0.03}),
    ("gradient", {"train/grad_norm": 0.0}, {"train/grad_norm": 1e-9}),
    ("no_progress", STUCK, {"rollout/success": 0.3}),
]


@pytest.mark.parametrize(("name", "bad", "good"), CASES)
def test_a_rule_names_its_cause_beyond_the_threshold_and_is_silent_below(tmp_path, name, bad, good):
    assert findings(write(tmp_path / "bad", bad))[:1] == [name]
    assert name not in findings(write(tmp_path / "good", good))


class Asked(dict):
    """The series of a run; notes which are asked for."""

    def __init__(self, series):
        super().__init__(series)
        self.names = set()

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


def test_rules_ask_only_for_metrics_of_the_one_list_and_each_of_these_is_logged(tmp_path):
    asked = {name for rule in RULES for name in rule.needs}
    for n, (_, *runs) in enumerate(CASES):
        for m, changes in enumerate(runs):
            run = Run.open(write(tmp_path / f"{n}-{m}", changes))
            series = Asked(run.series)
            diagnose(replace(run, series=series))
            asked |= series.names
    assert asked <= METRICS
    root = Path(gspo_env.__file__).parent
    rooms = ("rollout", "training", "learner", "credit", "tracking", "model")
    logging = "".join(path.read_text() for room in rooms for path in (root / room).rglob("*.py"))
    parts = {f"rollout/stop/{reason}" for reason in StopReason}
    for name in METRICS - parts:
        assert f'"{name}"' in logging or f"}}/{name.partition('/')[2]}" in logging, name


def test_a_cause_comes_before_its_consequences():
    order = [rule.name for rule in RULES]
    for place, rule in enumerate(RULES):
        assert all(order.index(name) > place for name in rule.explains), rule.name


def test_every_advice_names_settings_that_exist(tmp_path):
    from gspo_env.config import resolve

    flags = set()
    for n, (_, bad, _) in enumerate(CASES):
        for finding in diagnose(Run.open(write(tmp_path / str(n), bad))).findings:
            flags |= set(re.findall(r"--([a-z][\w.-]+)", finding.advice))
    flags -= {"check", "resume"}  # of gspo-env envs and train
    owners = {"aggregation": "loss", "correction": "loss", "gamma": "advantage"}
    for flag in flags:
        plain = flag.replace("-", "_")
        last = plain.rpartition(".")[2]
        resolve(Config(), plain if last not in owners else f"{owners[last]}.{last}")


def test_a_default_run_that_wobbles_in_its_middle_is_not_blamed(tmp_path):
    folder = write(tmp_path, steps=40)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[18:22]:
        row["metrics"] |= {"rollout/stop/max_turn_tokens": 0.7, "rollout/success": 0.1}
        row["metrics"] |= {"train/clipped_fraction": 0.6, "rollout/zero_variance_groups": 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert findings(folder) == []


FELL = (
    *(18, 24, 26, 53, 76, 87, 91, 90, 91, 94, 95, 93, 93, 45, 61),
    *(79, 60, 66, 62, 59, 73, 71, 55, 69, 66, 52, 66, 72, 75, 63),
)
"""Success of the training steps of a default run that lost one of its three lengths, in percent."""


def test_a_fall_in_the_middle_of_a_run_with_few_evaluations_is_named(tmp_path):
    evaluated = {0: 0.16, 10: 0.94, 20: 0.64, 30: 0.64}
    rows = []
    for step, percent in enumerate([0, *FELL]):
        names = {"rollout": percent / 100} if step else {}
        names |= {"eval": evaluated[step]} if step in evaluated else {}
        metrics = {
            f"{name}/{what}": value
            for name, p in names.items()
            for what, value in (("success", p), ("return", 1.6 * p), ("return_std", 0.6))
        }
        rows.append({"step": step, "time": 0, "metrics": metrics})
    folder = write(tmp_path, steps=30, settings={"tasks_per_step": 32})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert findings(folder) == ["collapse"]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_a_run_of_few_steps_is_judged_without_an_error(tmp_path, steps):
    folder = write(tmp_path, STUCK)
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[: steps + 1]))
    diagnosis = diagnose(Run.open(folder))
    assert [finding.name for finding in diagnosis.findings] == []
    assert f"{steps} of 20 steps, stopped early or still running" in lines(diagnosis)[0]


def test_a_killed_run_with_half_a_line_damage_and_numbers_that_are_none_is_read(tmp_path):
    folder = write(tmp_path)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "metrics": {"rollout/return": NaN, "train/loss": Infinity}}\n')
        file.write(b'{"step": 22, "metrics": {"rollout/return": null}}\n\xff\xfe\n[3]\n')
        file.write(b'{"step": 1e400, "metrics": {"rollout/return": 1}}\n')
        file.write(b'{"step": 99999999999999999999, "metrics": {"rollout/return": 1}}\n')
        file.write(b'{"step": 23, "metrics": {"rollout/re')
    (folder / "config.toml").write_text("steps = = 3")
    diagnosis = diagnose(Run.open(folder))
    assert diagnosis.findings == ()
    assert "settings are unknown" in " ".join(diagnosis.notes)


def test_a_run_of_an_older_version_says_what_cannot_be_judged(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 0, "metrics": {"train/return": 0.5, "loss": 1.0}}\n'
    )
    diagnosis = diagnose(Run.open(tmp_path))
    assert diagnosis.findings == ()
    judged = {rule.name for rule in RULES} - set(diagnosis.not_judged)
    assert judged == {"failed"}  # no need of a metric that all runs have
    assert any("no training step" in note for note in diagnosis.notes)


@pytest.mark.parametrize(
    ("settings", "saved", "names"),
    [
        ({"model_dtype": "auto"}, "", []),  # not known: the bound of half precision
        ({"model_dtype": "auto"}, '{"dtype": "float32"}', ["engine"]),
        ({"model_dtype": "auto"}, '{"torch_dtype": "bfloat16"}', []),
        ({"model_dtype": "bfloat16"}, '{"dtype": "float32"}', []),
    ],
)
def test_the_difference_of_engine_and_trainer_is_judged_by_the_dtype(
    tmp_path, settings, saved, names
):
    folder = write(tmp_path, {"train/logprob_diff_mean": 0.05}, settings=settings)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(saved)
    assert findings(folder) == names


AGE = {"train/logprob_diff_mean": 0.05}


@pytest.mark.parametrize(
    ("staleness", "metrics", "names"),
    [
        (2, {**AGE, "train/sync_logprob_diff": 1e-6}, []),
        (2, {**AGE, "train/sync_logprob_diff": 0.05}, ["engine"]),
    ],
)
def test_a_run_that_plays_ahead_is_judged_by_its_own_bounds(tmp_path, staleness, metrics, names):
    folder = write(tmp_path, metrics, settings={"supply": {"max_staleness": staleness}})
    assert findings(folder) == names


def test_the_command_prints_sentences_or_json_and_hides_what_acts_on_a_terminal(tmp_path, capsys):
    folder = write(tmp_path / "run", {"rollout/lost_episodes": 10.0})
    evil = "step('\x1b]0;title\x07') raised \u202eOSError <script>alert(1)</script>"
    (folder / "first-environment-error.txt").write_text(f"{evil}\n\nTraceback")
    (folder / "warnings.txt").write_text("no_turn: \x1b[31mred\n")
    main(["diagnose", str(folder)])
    shown = capsys.readouterr().out
    assert "BAD environment: The environment fails: 16% of the episodes are lost in the" in shown
    assert "    Try: Fix the environment" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    main(["diagnose", str(folder), "--json"])
    tree = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in tree["findings"]] == ["environment"]
    assert tree["not_judged"] == []


def test_a_run_that_warned_is_not_called_faultless(tmp_path, capsys):
    folder = write(tmp_path / "run", {})
    main(["diagnose", str(folder)])
    assert re.search(r"Nothing wrong was found by \d+ rules\.", capsys.readouterr().out)
    (folder / "warnings.txt").write_text("collapse: return fell to 0.1\n")
    main(["diagnose", str(folder)])
    shown = capsys.readouterr().out
    assert "rules, but the run warned while it trained." in shown
    assert "Note: The run warned: return fell to 0.1" in shown


def test_the_error_that_ended_a_run_is_kept_until_it_goes_on(tmp_path):
    folder = write(tmp_path)
    with (
        Checkpoints(folder, Config().checkpoints) as checkpoints,
        pytest.raises(ValueError, match="key"),
        checkpoints.report_failure(),
    ):
        raise ValueError("the key sk-" + "a" * 40 + " is \ud800 wrong")
    assert "sk-aaaa" not in (folder / "failure.txt").read_text()
    run = Run.open(folder)
    assert findings(folder) == ["failed"]
    assert "An error ended the run after step 20: ValueError: the key [redacted] is" in (
        diagnose(run).findings[0].text
    )
    with (
        Checkpoints(folder, Config().checkpoints) as checkpoints,
        pytest.raises(KeyboardInterrupt),
        checkpoints.report_failure(),
    ):
        raise KeyboardInterrupt
    assert findings(folder) == []


FAST = ("groups without variance", "loss is not a number", "small, outcome")
"""Real runs that are part of the main tests."""
REPEATED = ("impossible tasks", "too few turns", "loss without gradient", "no room for an answer")
REPEATED += ("small, GRPO", "small, late reward")
"""Runs of `stress/faults.py` whose rule another run has."""


def case_of(case):
    return pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)


@pytest.mark.parametrize(
    "case",
    [
        case_of(c)
        for c in (*faults.FAILING, *faults.GOOD)
        if not c.varies and c.name not in REPEATED
    ],
)
def test_a_real_run_that_fails_is_named_by_its_cause_and_a_good_one_is_not_blamed(tmp_path, case):
    run = faults.play(case.name, case.tree, tmp_path, stops=case.stops)
    assert findings(run)[:1] == ([case.expected] if case.expected else [])
    warned = [name for name in Run.open(run).warnings if name.startswith("control_tokens:")]
    assert len(warned) == (case.expected == "control_tokens")
