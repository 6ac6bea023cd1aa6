"""Comparisons: runs differ only in the arm, a stopped comparison continues, no run is dropped."""

import dataclasses
import importlib
import math
import os
import re
import shutil
from itertools import combinations, product
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import nct, t
from support.runs import tiny

import gspo_env
from gspo_env.cli.main import main
from gspo_env.compare import Arm, Comparison, Result, compare, grid, parse, planned, read, stats
from gspo_env.compare.plan import check_metric, check_table
from gspo_env.compare.processes import in_processes
from gspo_env.compare.runner import _claim, mixed_scores
from gspo_env.config import from_dict, override, to_toml
from gspo_env.errors import ConfigError, ModelError, OutputError, UnknownEnvironmentError
from gspo_env.report.comparison import (
    METHODS,
    conclusion,
    is_decided,
    limits,
    summarise,
    table,
    write_report,
)
from gspo_env.runs import Run
from gspo_env.runs.evaluations import success_interval
from gspo_env.tracking.base import NoTracker
from gspo_env.tracking.mlflow import MLflow
from studies.coverage import DISTRIBUTIONS, coverage, success_coverage


def small(**changes):
    tree = {
        **{"env": "gspo/Additive-v0", "env_kwargs": {"turns": 1}, "tasks_per_step": 2},
        "rollout": {"max_turn_tokens": 4},
        "recipe": {
            **{"hidden_size": 16, "layers": 1, "heads": 2, "demonstrations": 32},
            **{"imitation_batch": 16, "imitation_learning_rate": 0.02},
        },
        "learner": {"learning_rate": 3e-3, "warmup_steps": 0},
    }
    return tiny(**(tree | changes))


def arms_of(**changes):
    return tuple(Arm(name=name, changes=change) for name, change in changes.items())


def two(first="a", second="b", changes=None, **settings):
    """A comparison of two arms, by default of another gamma."""
    arms = arms_of(**{first: {}, second: {"gamma": 0.5} if changes is None else changes})
    return Comparison(**{"problems": {"one": small()}, "arms": arms, "seeds": 1, **settings})


def results_of(comparison, folder, history):
    """Results of all runs, with a function that gives the history of each."""
    return [result_of(run, history(run)) for run in planned(comparison, folder)]


def result_of(run, history=(), error=""):
    return Result(run=run, recorded=Run.in_progress(run.config, history), error=error)


def run(comparison, folder, tracking=None):
    lines: list[str] = []
    return compare(comparison, folder, tracking or NoTracker(), lines.append), lines


def histories(results):
    """The metrics without times and rates."""
    timed = ("time/", "_per_second", "system/")
    return {
        (r.run.arm.name, r.run.seed): {
            name: (s.steps.tolist(), s.values.tolist())
            for name, s in r.recorded.series.items()
            if not any(t in name for t in timed)
        }
        for r in results
    }


@pytest.mark.slow
def test_a_comparison_goes_on_where_it_stopped_and_tracks_nested_runs(tmp_path):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    arms = grid({"advantage": ["outcome", "returns_to_go"]})
    comparison = Comparison(
        problems={"one": small()}, arms=arms, seeds=1, workers=1, metric="rollout/return"
    )
    tracking = MLflow(tracking_uri=uri)
    wrong = dataclasses.replace(comparison, metric="rollout/rewards")
    with pytest.raises(ConfigError, match=r"rollout/rewards.*expected one of.*rollout/return"):
        run(wrong, tmp_path / "out", tracking)
    first, said = run(comparison, tmp_path / "out", tracking)
    assert "runs have a result already" in said[1]
    marked = first[0].run.folder / "warnings.txt"
    marked.write_text("kept: it was not played again\n")
    (first[1].run.folder / "model").rmdir()
    again, said = run(comparison, tmp_path / "out", tracking)
    assert again[0].recorded.warnings == ("kept: it was not played again",)
    assert "1 of 2 runs have a result already" in said
    assert histories(again) == histories(first)
    more = dataclasses.replace(comparison, seeds=2, sequential=True)
    assert more.looks == (1, 2)
    decided = [run.folder for run in planned(comparison, tmp_path / "out")]
    ended = compare(more, tmp_path / "out", tracking, print, is_decided=lambda results: True)
    assert [result.run.folder for result in ended] == decided  # the second seed is not played
    report, text, *_ = write_report(more, ended, tmp_path)
    assert "A run takes " in text.read_text()
    assert "Episodes of one, side by side" in report.read_text()
    names = re.findall("<figcaption>(.*?)</figcaption>", report.read_text())
    assert names == ["outcome", "returns_to_go"] * 3
    compare(more, tmp_path / "out", tracking, print, lambda results: [marked])
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("gspo_env")
    runs = client.search_runs([experiment.experiment_id])
    children = [r for r in runs if "mlflow.parentRunId" in r.data.tags]
    parents = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    assert len(parents) == 1
    assert [f.path for f in client.list_artifacts(parents[0].info.run_id)] == ["warnings.txt"]
    first = [read(r) for r in planned(more, tmp_path / "out")]
    names = [r.info.run_name for r in children]  # the one that was played again has two
    assert sorted(names) == sorted([*(r.run.name for r in first), again[1].run.name])
    assert all(r.data.tags["mlflow.parentRunId"] == parents[0].info.run_id for r in children)
    assert all("rollout/return" in r.data.metrics for r in children)
    for name in first[0].recorded.series:
        if not name.startswith("system/"):  # they say nothing about an arm
            check_metric(name)
    with pytest.raises(OutputError, match="holds another comparison"):
        run(Comparison(problems={"one": small(steps=3)}, arms=arms), tmp_path / "out")


DIES = """
import os
from dataclasses import dataclass
from pathlib import Path
from gspo_env.credit import Outcome

@dataclass(frozen=True)
class Dies(Outcome):
    def advantages(self, group):
        if not Path("mended").exists():
            os.kill(os.getpid(), 9)
        return super().advantages(group)
"""


@pytest.mark.slow
def test_a_death_belongs_to_its_run_which_the_next_start_plays_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(DIES)
    arms = grid({"advantage": ["outcome", "mine.py:Dies"]})
    comparison = Comparison(problems={"one": small()}, arms=arms, seeds=2, workers=1)
    first, _ = run(comparison, tmp_path / "out")
    assert [(r.run.arm.name, bool(r.error)) for r in first] == [
        *(("outcome", False), ("mine.py:Dies", True)) * 2
    ]
    assert "exit code -9: it was killed, as where memory runs out; lower --w" in first[1].error
    (tmp_path / "mended").touch()
    again, said = run(comparison, tmp_path / "out")
    assert "2 of 4 runs have a result already" in said
    assert [r.error for r in again] == [""] * 4
    assert {r.episodes for r in again} == {16.0}
    assert again[0].curve("eval/success")[0] == [0.0, 16.0]


@pytest.mark.slow
def test_another_tracker_resumes_the_same_comparison(tmp_path):
    comparison = two(workers=1)
    run(comparison, tmp_path / "out")
    tracking = MLflow(tracking_uri=f"sqlite:///{tmp_path / 'runs.db'}")
    problems = {"one": dataclasses.replace(small(), tracker=tracking)}
    _, said = run(dataclasses.replace(comparison, problems=problems), tmp_path / "out", tracking)
    assert "2 of 2 runs have a result already" in said


def test_two_processes_do_not_play_one_comparison(tmp_path):
    with _claim(two(), tmp_path):
        (tmp_path / f".x.{os.getppid()}.part").touch()
        (tmp_path / "starts/.x.9999999.part").mkdir(parents=True)
        with pytest.raises(OutputError, match=f"still running, in process {os.getpid()};"):
            compare(two(), tmp_path, NoTracker())
    _claim(two(), tmp_path).close()
    assert [path.name for path in tmp_path.rglob(".*")] == [f".x.{os.getppid()}.part"]


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "1", "null"])
def test_a_damaged_file_of_a_comparison_is_one_sentence(tmp_path, content):
    for run_ in planned(two(), tmp_path):
        (run_.folder / "model").mkdir(parents=True)
        (run_.folder / "metrics.jsonl").write_text(f"{content}\n")
    assert not read(run_).recorded.series  # its metrics are left out
    note = tmp_path / "other/comparison.json"
    _claim(two(), note.parent).close()
    size = note.stat().st_size
    for data, length in ((b"", 1 << 40), (b"\xff" * size, size)):
        note.write_bytes(data)
        os.truncate(note, length)
        with pytest.raises(OutputError, match="holds another comparison"):
            compare(two(), note.parent, NoTracker())


@pytest.mark.slow
def test_a_users_estimator_takes_part_and_a_failing_one_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import numpy as np\n"
        "from gspo_env.credit import Estimator\n"
        "@dataclass(frozen=True)\n"
        "class Half(Estimator):\n"
        "    def advantages(self, group):\n"
        "        r = np.array([e.rewards.sum() for e in group.episodes])\n"
        "        v = (r - r.mean()) / 2\n"
        "        return [np.full(len(e.turns), x) for e, x in zip(group.episodes, v)]\n"
        "@dataclass(frozen=True)\n"
        "class Broken(Estimator):\n"
        "    def advantages(self, group):\n"
        "        return []\n"
    )
    table_ = '[compare]\nseeds = 1\npilot = true\nmetric = "rollout/return"\n'
    (tmp_path / "c.toml").write_text(to_toml(small()) + table_)
    flags = ["--config", "c.toml", "--arm", "advantage=outcome,mine.py:Half,mine.py:Broken"]
    main(["compare", *flags, "--output", "out", "--tracker", "none", "--workers", "1"])
    shown = capsys.readouterr().out
    assert "mine.py:Half" in shown
    broken = next(line for line in shown.splitlines() if line.startswith("| mine.py:Broken"))
    assert "1/1" in broken
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Failed runs" in page
    assert "returned 0 arrays" in page
    assert page.count("data:image/png;base64,") == 1


def test_an_unknown_environment_or_estimator_is_refused_before_anything_is_written(tmp_path):
    known = grid({"gamma": [0.0, 1.0]})
    lost = Comparison(problems={"one": small(env="gspo/Nope-v0")}, arms=known)
    with pytest.raises(UnknownEnvironmentError, match="gspo/Nope-v0"):
        run(lost, tmp_path / "out")
    for wrong in ({"advantage": ["outcome", "nope"]}, {"lam": [0.5, 1.0]}):
        with pytest.raises(ConfigError, match=r"expected|no setting"):
            run(Comparison(problems={"one": small()}, arms=grid(wrong)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["nowhere/model", "nowhere.gguf"])
def test_a_missing_model_is_refused_before_anything_is_written(tmp_path, missing):
    missing = str(tmp_path / missing)
    arms = grid({"model": ["smollm2", missing]})
    with pytest.raises(ModelError, match=re.escape(missing)):
        run(Comparison(problems={"one": small()}, arms=arms), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("env", ["gspo/Additive-v0", "gspo/KeyDoor-v0"]),
        ("env_kwargs", [{"turns": 1}, {"turns": 2}]),
        ("eval_tasks", [4, 8]),
        ("seed", [0, 1]),
        ("output", ["", "mine"]),
    ],
)
def test_arms_that_do_not_play_the_same_tasks_are_refused(name, values):
    with pytest.raises(ConfigError, match=rf"changes {name} to .*expected the same in all arms"):
        Comparison(problems={"one": small()}, arms=grid({name: values}))


def test_fewer_seeds_than_the_tests_need_are_refused_except_for_a_pilot():
    axes = ["gamma=0.5,1.0"]
    for tables, least in (({}, 6), ({"problems": {name: {} for name in "abcd"}}, 8)):
        assert parse(tables, axes, small()).seeds == 8
        assert parse(tables, axes, small(), seeds=least).fewest == least
        with pytest.raises(
            ConfigError, match=rf"seeds is {least - 1}, .*expected at least {least}"
        ):
            parse(tables, axes, small(), seeds=least - 1)
        assert parse(tables, axes, small(), seeds=None, pilot=True).seeds == 2
    many = {"grid": {"gamma": [n / 20 for n in range(20)]}}
    assert parse(many, [], small()).seeds == 10  # 19 tests
    pilot = parse(many, [], small(), seeds=3, pilot=True)
    assert (pilot.seeds, pilot.tests) == (3, 19)


@pytest.mark.parametrize(("difference", "spread"), [(0.05, 0.02), (0.05, 0.1), (0.2, 0.1)])
def test_as_many_seeds_are_named_as_show_a_difference(difference, spread):
    pairs = stats.pairs_needed(spread, difference, alpha=0.01)
    assert stats.power(difference / spread, pairs, alpha=0.01) >= 0.8
    few = pairs - 1
    assert few < stats.fewest_pairs(0.01) or stats.power(difference / spread, few, alpha=0.01) < 0.8


@pytest.mark.parametrize("pilot", [True, False])
def test_a_pilot_says_how_many_seeds_are_needed(tmp_path, pilot):
    ends, comparison = {"a": (0.1, 0.3), "b": (0.2, 0.5)}, two(seeds=2, pilot=pilot)

    def history(run):
        end = ends[run.arm.name][run.seed]
        return [(step, {"eval/success": end * (step > 0)}) for step in (0, run.config.steps)]

    write_report(comparison, results_of(comparison, tmp_path, history), tmp_path, "")
    text = (tmp_path / "report.md").read_text()
    # areas are half of the ends, so b is better by 0.05 and 0.1
    assert ("differ by 0.035 (standard deviation over 2 seeds)" in text) == pilot
    assert ("7 seeds show a difference of 0.05 (power 0.8)" in text) == pilot


def test_looks_of_a_sequential_test_are_worked_by_hand():
    looks = (4, 6, 8)
    same = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    # all of one sign: 2 of 16, 2 of 64 and 2 of 256 exchanges are as extreme
    assert stats.sequential_test(same[:4], looks, 0.05) == (2 / 16, 4)
    assert stats.sequential_test(same[:6], looks, 0.05) == (2 / 64, 6)
    assert stats.sequential_test(same, looks, 0.05) == (2 / 64, 6)  # it was decided there
    # one pair with the other sign, the smallest: 2 exchanges of 64 decided before, and of the 256,
    # those with both or one or none of the first two pairs turned are as extreme; 2 are not new
    late = [-0.1, *same[1:]]
    p_value, look = stats.sequential_test(late, looks, 0.05)
    assert look == 8
    extreme = [s for s in product((-1, 1), repeat=8) if abs(np.dot(s, same)) >= 3.4 - 1e-9]
    new = [s for s in extreme if abs(sum(s[:6])) < 6]
    assert p_value == pytest.approx(2 / 64 + len(new) / 256)
    assert stats.sequential_test([0.0] * 8, looks, 0.05) == (1.0, 8)
    assert stats.sequential_test(same, (8,), 0.05)[0] == stats.paired_permutation_test(
        same, [0] * 8
    )


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.floats(0.01, 1e6), min_size=8, max_size=8))
def test_a_sequential_test_decides_in_at_most_its_level_of_all_exchanges(sizes):
    looks, wrong = (4, 6, 8), 0
    for signs in product((-1.0, 1.0), repeat=8):
        differences = np.array(signs) * sizes
        for look in looks:
            p_value, at = stats.sequential_test(differences[:look], looks, 0.05)
            if p_value <= 0.05 * at / 8:
                wrong += 1
                break
    assert wrong <= 0.05 * 2**8


def test_a_sequential_comparison_ends_where_every_arm_is_decided_or_equal(tmp_path):
    arms = arms_of(a={}, b={"gamma": 0.5}, same={"gamma": 1.0})
    comparison = Comparison(problems={"one": small()}, arms=arms, seeds=16, sequential=True)
    rng = np.random.default_rng(0)

    def history(run):
        noise = 0.01 * np.random.default_rng(run.seed).random()
        better = 0.5 * (run.arm.name == "b") * (1 + 0.1 * rng.random())
        return [(step, {"eval/success": 0.2 + noise + better}) for step in (0, run.config.steps)]

    results = results_of(comparison, tmp_path, history)
    assert comparison.looks == (8, 12, 16)
    first = [result for result in results if result.run.seed < 8]
    assert is_decided(comparison, first)
    report = write_report(comparison, first, tmp_path)[1].read_text()
    assert "b: better than a" in report
    assert "looks after 8, 12, 16 seeds" in report
    assert "interquartile mean over 8 seeds" in report
    few = [result for result in results if result.run.seed < 3]
    assert not is_decided(comparison, few)


def test_two_arms_need_different_names():
    with pytest.raises(ConfigError, match="at least two with different names"):
        Comparison(problems={"one": small()}, arms=grid({"gamma": [1.0]}))


def test_the_table_of_a_file_and_the_command_line_meet():
    plain = {"gamma": 0.5, "rollout": {"group_size": 3}}  # a setting, and a table of some
    table_ = {"grid": {"gamma": [0.0, 1.0]}, "arms": {"plain": plain}}
    base = small(credit={"rms": 1.0})
    made = parse(check_table(table_), ["ratio_level=turn,token"], base, seeds=9)
    assert made.seeds == 9
    assert [arm.name for arm in made.arms] == [
        "0.0 · turn", "0.0 · token", "1.0 · turn", "1.0 · token", "plain"
    ]  # fmt: skip
    first, last = (made.config("Additive-v0", made.arms[n], 1) for n in (0, -1))
    assert first.credit.rms == 1.0
    assert (last.rollout.group_size, last.rollout.max_turns) == (3, first.rollout.max_turns)
    with pytest.raises(ConfigError, match=r"unknown field compare\.'sedes'; expected one of"):
        check_table({"sedes": 1})
    for wrong in ({"seeds": "5"}, {"target": True}, {"grid": {"gamma": 1.0}}, {"problems": 3}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"compare.{name}.* is .*; expected"):
            check_table(wrong)
    with pytest.raises(ConfigError, match="expected name=value"):
        parse({}, ["gamma"], small())


def test_the_interquartile_mean_and_its_interval():
    assert stats.interquartile_mean(np.array([0.0, 1, 2, 3, 4, 5, 6, 100])) == pytest.approx(3.5)
    low, high = stats.interquartile_interval([0.4, 0.5, 0.6, 0.1, 0.2, 0.3])
    assert 0.1 <= low < 0.35 < high <= 0.6
    same_low, same_high = stats.interquartile_interval([0.7])
    assert same_low == same_high == 0.7


def test_the_interval_of_an_arm_contains_the_true_value_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for runs in (6, 7, 9):
        assert stats.interval_name(runs) == "95 % interval"
        for name in ("exponential", "two kinds"):
            assert 0.93 < coverage(DISTRIBUTIONS[name], runs, 1000) < 0.97, (runs, name)
    for runs in (1, 2, 3, 4, 5):
        assert stats.interval_name(runs) == "range"
        values = rng.standard_normal((10, runs))
        np.testing.assert_array_equal(
            stats.interquartile_interval(values), [values.min(axis=1), values.max(axis=1)]
        )


def test_worked_examples_of_the_tests_between_arms():
    # boys' shoes data: Box, Hunter and Hunter, Statistics for Experimenters, table 4.2; 14 in 1024
    a = [13.2, 8.2, 10.9, 14.3, 10.7, 6.6, 9.5, 10.8, 8.8, 13.3]
    b = [14.0, 8.8, 11.2, 14.2, 11.8, 6.4, 9.8, 11.3, 9.3, 13.6]
    assert stats.paired_permutation_test(a, b) == pytest.approx(14 / 1024)
    assert stats.paired_permutation_test([1.0, 2, 3], [1.0, 2, 3]) == 1.0
    assert stats.paired_permutation_test([1.0, 2, 3, 4, 5], [0.0] * 5) == pytest.approx(2 / 32)
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.probability_of_improvement([1, 2, 3], [0, 2, 2]) == pytest.approx((1 + 2 + 3) / 9)


def test_the_area_the_target_and_the_pairs_are_read_off_the_curves(tmp_path):
    comparison = two("low", "high", seeds=2, metric="rollout/return", target=0.5)
    values = {"low": [0.0, 0.2], "high": [0.4, 0.8]}

    def history(run):
        row = enumerate(values[run.arm.name], 1)
        return tuple((n, {"rollout/return": v + 0.01 * run.seed}) for n, v in row)

    results = results_of(comparison, tmp_path, history)
    low, high = summarise(comparison, results)["one"]
    np.testing.assert_allclose(high.areas, [0.6, 0.61])
    np.testing.assert_allclose(low.finals, [0.2, 0.21])
    assert high.to_target == (16.0, 16.0)  # the second step of 2 tasks x 4 episodes
    assert high.episodes == (8.0, 16.0)
    assert low.to_target == (np.inf, np.inf)
    assert high.improvement == 1.0
    lines = table(comparison, [low, high])
    assert lines[1][-1] == "not reached"
    assert lines[2][-1] == "16"


def learning(comparison, folder, curve, metric="eval/success", broken=()):
    """Results whose metric is a function of the episodes played, of the seed and of the arm."""
    results = []
    for run in planned(comparison, folder):
        size = run.config.tasks_per_step * run.config.rollout.group_size
        every = [
            (step, {metric: curve(step * size, run.seed), "eval/episodes_before": step * size})
            for step in range(run.config.steps + 1)
        ]
        failed = (run.arm.name, run.seed) in broken
        error = "it broke" if failed else ""
        results.append(result_of(run, () if failed else every, error))
    return results


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.integers(1, 24),
    coarser=st.integers(1, 6),
    longer=st.integers(1, 3),
    speed=st.floats(1.0, 500.0),
    sign=st.sampled_from([1.0, -1.0]),
)
def test_identical_learning_in_other_steps_groups_and_lengths_is_no_improvement(
    tmp_path, steps, coarser, longer, speed, sign
):
    fine = {"steps": steps * coarser, "rollout.group_size": 2}
    coarse = {"steps": steps * longer, "rollout.group_size": 2 * coarser}
    arms = arms_of(fine=fine, coarse=coarse)
    comparison = two(arms=arms, seeds=3, metric="eval/success", target=0.4 * sign)

    def curve(played, seed):
        return sign * (1 - np.exp(-played / speed)) + 0.01 * seed

    one, other = summarise(comparison, learning(comparison, tmp_path, curve))["one"]
    assert other.improvement == 0.5
    assert other.p_value == 1.0
    assert one.to_target == other.to_target
    np.testing.assert_array_equal(one.curves, other.curves)
    assert one.episodes[-1] == 2 * 2 * steps * coarser  # the shorter of the two


def test_arms_of_different_lengths_say_what_is_compared(tmp_path):
    comparison = two("short", "long", {"steps": 8}, seeds=2)
    results = learning(comparison, tmp_path, lambda played, seed: played / 100 + seed / 10)
    results[-1].recorded.series["eval/episodes_before"].values[-1] += 3.0  # of branches
    write_report(comparison, results, tmp_path, "gspo-env compare --arm 'loss=<b>'")
    text = (tmp_path / "report.md").read_text()
    assert "short: 16 episodes and 8 updates; long: 66 episodes and 32 updates" in text
    assert "compared from episode 0 to 16" in text
    page = (tmp_path / "report.html").read_text()
    assert "compared from episode 0 to 16" in page
    assert f"gspo_env {gspo_env.__version__}, 20" in page
    assert "by gspo-env compare --arm &#39;loss=&lt;b&gt;&#39;" in page
    assert "<li>long: {&#34;steps&#34;: 8}</li>" in page
    assert "tasks_per_step = 2" in page


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    level=st.floats(-1e4, 1e4),
    slope=st.floats(-1.0, 1.0),
    target=st.sampled_from([-1e5, -1.0, 1.0]),
    lost=st.sets(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3)), min_size=1),
)
def test_a_failed_run_ranks_below_the_worst_run_in_every_statistic(
    tmp_path, level, slope, target, lost
):
    comparison = two(problems={"one": small(steps=4)}, seeds=4, target=target, metric="m")

    def curve(played, seed):
        return level + slope * played + seed

    results = learning(comparison, tmp_path, curve, metric="m", broken=lost)
    rows = summarise(comparison, results)["one"]
    table(comparison, rows)
    whole = [(row, s) for row in rows for s in range(4) if (row.arm.name, s) not in lost]
    broken = [(row, s) for row in rows for s in range(4) if (row.arm.name, s) in lost]
    for bad, s in broken:
        assert bad.to_target[s] == np.inf
        for good, g in whole:
            assert bad.areas[s] < good.areas[g]
            assert bad.finals[s] < good.finals[g]
            assert bad.curves[s].max() < good.curves[g].min()
    if {s for _, s in lost} and {arm for arm, _ in lost} == {"b"}:
        assert rows[1].improvement < 0.5
    if len(lost) == 8:
        assert rows[1].improvement == 0.5
        assert table(comparison, rows)[1][2] == "all runs failed"
        assert conclusion("m", rows) == "All runs failed."
        assert limits(rows, 1) == ""
        write_report(comparison, results, tmp_path)
        report = (tmp_path / "report.md").read_text()
        assert "--eval-every" not in report
        assert "two points" not in report
        assert "0 episodes" not in report


@pytest.mark.parametrize(
    ("seeds", "gain", "broken", "words"),
    [
        (3, 0.3, (), "3 seeds cannot show a difference. 6 seeds can."),
        (8, 0.3, (), "token: better than sequence."),
        (2, None, (), "begin at 0.25 to 0.26. token: equal to sequence in every value, so"),
        (8, 0.0, (), "No difference is shown; more than 8 seeds can show a smaller one."),
        (3, 0.3, (0, 1, 2), "at 0.25 to 0.27. 3 seeds cannot show a difference. 6"),
    ],
)
def test_a_report_begins_with_where_the_arms_end_and_folds_its_methods(
    tmp_path, seeds, gain, broken, words
):
    comparison = two("sequence", "token", seeds=seeds)
    lost = {("token", seed) for seed in broken}
    results = learning(comparison, tmp_path, lambda played, seed: 0.25 + seed / 100, broken=lost)
    steps = (0, comparison.problems["one"].steps)
    for n, result in enumerate(results):
        if result.run.arm.name == "token" and not result.error:
            if gain is None:
                continue
            value = 0.25 + gain + result.run.seed / 100 + 0.001 * (-1) ** result.run.seed
            history = [(step, {"eval/success": value}) for step in steps]
            results[n] = result_of(result.run, history)
    write_report(comparison, results, tmp_path)
    lead, _, rest = (tmp_path / "report.md").read_text().partition(f"## {METHODS}")
    assert f"eval/success ends at 0.25 to 0.{24 + seeds + (seeds == 1)} with sequence, at " in lead
    assert words in lead
    assert ("at nothing with token, whose runs all failed. It rises" in lead) == bool(broken)
    assert ("| equal |" in lead) == (gain is None)
    assert lead.index("sequence: ") < lead.index("ends at")
    assert "It rises with no arm: the runs begin at 0.25 to " in lead
    assert "Holm" not in lead
    assert "Holm" in rest
    if not broken and gain is not None:
        assert "The curves have no more than two points" in lead
        assert "--eval-every 1 gives more." in lead
    page = (tmp_path / "report.html").read_text()
    assert page.index(words) < page.index("<table>") < page.index("<details><summary><strong>")


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((0.25, 0.22), "It rises with no arm: the runs begin at 0.28."),
        ((0.25, 0.30), None),
        ((0.28, 0.28), "It rises with no arm: the runs begin at 0.28. b: equal to a in every"),
    ],
)
def test_a_conclusion_says_whether_any_arm_learns(tmp_path, ends, words):
    comparison, end = two("a", "b", seeds=2), dict(zip("ab", ends, strict=True))
    results = results_of(
        comparison,
        tmp_path,
        lambda run: [(0, {"eval/success": 0.28}), (1, {"eval/success": end[run.arm.name]})],
    )
    text = conclusion("eval/success", summarise(comparison, results)["one"])
    assert text.startswith(f"eval/success ends at {ends[0]:.2f} with a, at {ends[1]:.2f} with b.")
    assert words in text if words else "It rises" not in text
    assert ("2 seeds cannot show a difference. 6 seeds can." in text) == (ends[0] != ends[1])


def test_a_metric_that_covers_only_trained_groups_is_named(tmp_path):
    base = override(small(), {"supply": {"max_resamples": 2}})
    for metric, words in (
        ("rollout/success", "covers only the groups that are trained on"),
        ("rollout/success_played", ""),
        ("eval/success", ""),
    ):
        comparison = two(problems={"one": base}, metric=metric, seeds=1)
        assert words in comparison.left_out
        assert bool(words) == bool(comparison.left_out)
        results = results_of(comparison, tmp_path, lambda run, m=metric: [(1, {m: 0.5})])
        write_report(comparison, results, tmp_path)
        assert words in (tmp_path / "report.md").read_text()
    assert not two(metric="rollout/success").left_out


def test_all_statistics_begin_with_the_differences_that_the_seeds_can_show(tmp_path):
    arms = arms_of(first={}, better={}, alike={})
    comparison = Comparison(problems={"one": small()}, arms=arms, seeds=8, metric="m")
    rng = np.random.default_rng(0)
    gains = {"first": 0.0, "better": 0.5, "alike": 0.0}

    def history(run):
        return [(1, {"m": gains[run.arm.name] + 0.05 * rng.standard_normal()})]

    results = results_of(comparison, tmp_path, history)
    rows = summarise(comparison, results)["one"]
    shown = r"8 seeds cannot show a difference below 0\.\d+ \(power 0\.8\)\. More seeds can\."
    assert re.fullmatch(shown, limits(rows, 2))
    few = dataclasses.replace(comparison, seeds=3)
    rows = summarise(few, [r for r in results if r.run.seed < 3])["one"]
    text = limits(rows, 2)
    assert re.fullmatch(
        r"3 seeds cannot show a difference: the smallest p-value is 0\.250 before the correction\. "
        r"7 seeds can show one of 0\.\d+ \(power 0\.8\)\.",
        text,
    )
    assert " 9 seeds can" in limits(rows, 8)


def test_the_area_is_that_of_the_trapezoidal_rule_whatever_the_spacing_of_the_points(tmp_path):
    comparison = two(metric="eval/m")
    points = [(0, 0.0), (80, 0.4), (90, 0.8), (100, 0.8)]
    history = [
        (n, {"eval/m": v, "eval/episodes_before": float(x)}) for n, (x, v) in enumerate(points)
    ]
    (row, _) = summarise(comparison, results_of(comparison, tmp_path, lambda run: history))["one"]
    assert row.episodes[-1] == 100
    np.testing.assert_allclose(row.areas, [(80 * 0.2 + 10 * 0.6 + 10 * 0.8) / 100])


@pytest.mark.slow
def test_reports_without_a_difference_make_a_false_claim_in_at_most_one_of_twenty(tmp_path):
    arms = arms_of(a={}, b={}, c={}, d={})
    problems = {name: small() for name in ("p", "q", "r", "s")}
    comparison = Comparison(problems=problems, arms=arms, seeds=10, metric="m")
    runs, rng, claims = list(planned(comparison, tmp_path)), np.random.default_rng(0), 0
    reports = 100
    for _ in range(reports):
        values = rng.beta(8, 2, len(runs))
        results = [result_of(r, [(1, {"m": v})]) for r, v in zip(runs, values, strict=True)]
        rows = summarise(comparison, results).values()
        claims += any(row.direction for problem in rows for row in problem)
    assert claims <= 0.05 * reports + 2 * (0.05 * 0.95 * reports) ** 0.5  # two standard errors


def test_problems_whose_names_differ_in_a_sign_have_their_own_pictures(tmp_path):
    names = ["a/b", "a-b", "a b", "A-B", "a\\b", "x" * 200]
    comparison = two(problems=dict.fromkeys(names, small()))
    results = learning(comparison, tmp_path, lambda played, seed: played / 100)
    paths = write_report(comparison, results, tmp_path)[2:]
    assert len({str(path).casefold() for path in paths}) == len(names)
    assert all(path.is_file() and path.parent == tmp_path for path in paths)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("gamma=0.5,1", [0.5, 1]),
        ('lora_targets="q_proj,v_proj",all-linear', ["q_proj,v_proj", "all-linear"]),
        (
            'advantage={"name": "gigpo", "gamma": 0.5}, gigpo',
            [{"name": "gigpo", "gamma": 0.5}, "gigpo"],
        ),
        ('advantage=outcome,{"name": "gigpo"}', ["outcome", {"name": "gigpo"}]),
        ("learning_rate=1e-3 ,0.002", [1e-3, 0.002]),
    ],
)
def test_an_axis_of_the_command_line_splits_between_values_not_inside_them(text, values):
    arms = parse({}, [text], small()).arms
    assert [next(iter(arm.changes.values())) for arm in arms] == values


def test_rollouts_are_compared_by_the_episodes_that_came_before_them(tmp_path):
    history = [
        (1, {"rollout/return": 0.1, "rollout/episodes_before": 0.0}),
        (2, {"rollout/return": 0.2, "rollout/episodes_before": 8.0}),
        (2, {"eval/success": 0.5, "eval/episodes_before": 16.0}),
    ]
    result, _ = results_of(two(), tmp_path, lambda run: history)
    assert result.curve("rollout/return") == ([0.0, 8.0], [0.1, 0.2])
    assert result.curve("eval/success") == ([16.0], [0.5])


def test_arms_that_change_the_recipe_or_the_model_get_a_start_of_their_own(tmp_path):
    changes = [{}, {"gamma": 0.5}, {"imitation_steps": 9}, {"model": "mine"}, {"lora_rank": 2}]
    arms = tuple(Arm(name=str(n), changes=c) for n, c in enumerate(changes))
    comparison = Comparison(problems={"one": small()}, arms=arms, seeds=2)
    starts = {(run.arm.name, run.seed): run.start for run in planned(comparison, tmp_path)}
    assert starts["0", 0] == starts["1", 0] != starts["0", 1]
    assert starts["3", 0] is None
    assert len({starts[name, 0] for name in "0234"}) == 4
    results = learning(comparison, tmp_path, lambda played, seed: 0.0)
    write_report(comparison, results, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "2, 3, 4: another start than the first arm" in text


def test_a_missing_value_is_read_between_its_neighbours(tmp_path):
    comparison = two("whole", "gap", metric="m")
    points = [(1, {"m": 0.2}), (2, {"m": 0.4}), (3, {"m": 0.6})]
    histories = {"whole": points, "gap": [points[0], (2, {}), points[2]]}
    results = results_of(comparison, tmp_path, lambda run: histories[run.arm.name])
    whole_row, gap_row = summarise(comparison, results)["one"]
    assert gap_row.episodes == (8.0, 24.0)
    np.testing.assert_allclose(gap_row.areas, whole_row.areas)


def test_runs_that_decided_to_learn_from_different_rewards_are_named(tmp_path):
    runs = list(planned(two(problems={"p": small()}, seeds=2), tmp_path))

    def said(*scores):
        for run, score in zip(runs, scores, strict=True):
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "config.toml").write_text(f'[credit]\nscore = "{score}"\n')
            (run.folder / "metrics.jsonl").touch()
            (run.folder / "model").mkdir(exist_ok=True)
        return list(mixed_scores(list(map(read, runs))))

    assert said("turns", "turns", "turns", "auto") == []
    (line,) = said("turns", "turns", "outcome", "turns")
    assert line.startswith(
        "runs of p learned from different rewards: turns (p · a · seed 0), outcome"
    )
    failed = [dataclasses.replace(read(run), error="gone") for run in runs]
    assert list(mixed_scores(failed)) == []


def test_an_arm_may_take_back_a_score_that_its_estimator_does_not_use():
    problems = {"p": from_dict({"env": "gspo/Additive-v0", "credit": {"score": "turns"}})}
    with pytest.raises(ConfigError, match="'outcome' does not use; expected --score auto"):
        two(problems=problems, changes={"advantage": "outcome"})
    two(problems=problems, changes={"advantage": "outcome", "score": "auto"})


def wilson(successes, trials):
    z, p = 1.959963984540054, successes / trials
    centre = (p + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2))
    return centre - half, centre + half


def test_an_interval_is_wilsons_for_one_sample_a_task_and_for_the_same_rate_everywhere():
    assert success_interval([[1]] * 7 + [[0]] * 3) == pytest.approx(wilson(7, 10))
    assert success_interval([[1, 1]] * 10) == pytest.approx(wilson(10, 10))
    assert success_interval([[1, 0, 0, 0]]) == pytest.approx(wilson(1, 4))


def test_more_episodes_of_the_same_tasks_do_not_narrow_an_interval():
    few = [[1] * 16] * 3 + [[0] * 16] * 4  # 7 tasks in 112 episodes
    low, high = success_interval(few)
    assert high - low > 2 * (wilson(48, 112)[1] - wilson(48, 112)[0])
    assert (low, high) == success_interval(few)
    # tasks are known to be fewer than the rows, but not which rows are of one task
    unknown = success_interval([[1]] * 48 + [[0]] * 64, tasks=7)
    assert unknown == pytest.approx(wilson(3, 7))


def test_an_interval_of_tasks_with_different_numbers_of_samples_is_around_the_rate():
    rows = [[1] * 9] * 30 + [[0]] * 30
    low, high = success_interval(rows)
    assert 0.6 < low < 270 / 300 < high < 1.0  # the mean of the tasks' rates is 0.5


@pytest.mark.parametrize(
    ("tasks", "each", "rate", "alike"),
    [(4, 16, 0.5, 0.8), (16, 16, 0.1, 0.8), (64, 16, 0.02, 0.8), (16, 4, 0.9, 0.0)],
)
def test_intervals_contain_the_rate_also_where_few_tasks_are_alike(tasks, each, rate, alike):
    assert success_coverage(tasks, each, rate, alike, samples=400) >= 0.92


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 2), (5, 5, 5), (6, 3, 4)])
def test_pass_rates_equal_enumeration(n, c, k):
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert stats.pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert stats.pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_impossible_counts_are_named():
    with pytest.raises(ConfigError, match="c is 6"):
        stats.pass_at_k(5, 6, 1)
    with pytest.raises(ConfigError, match="k is 6"):
        stats.pass_hat_k(5, 1, 6)
    with pytest.raises(ConfigError, match="empty row"):
        success_interval([[1], []])
    with pytest.raises(ConfigError, match="0 or 1"):
        success_interval([[0.5]])


def test_power_is_that_of_the_noncentral_t():
    for n in (3, 8, 20):
        bound, shift = t.ppf(0.975, n - 1), 0.7 * math.sqrt(n)
        expected = nct.sf(bound, n - 1, shift) + nct.cdf(-bound, n - 1, shift)
        assert stats.power(0.7, n) == pytest.approx(expected, abs=1e-3)
    assert stats.power(1.0, 9) < 0.8 <= stats.power(1.0, 10)  # a well-known number
    assert stats.smallest_difference(0.1, 34) == pytest.approx(0.05, rel=0.02)


@pytest.mark.slow
def test_a_comparison_whose_runs_all_fail_is_an_error_without_tracebacks(
    in_folder, capfd, tokenizer
):
    tokenizer.save_pretrained("words")
    Path("words/config.json").write_text('{"model_type": "qwen3"}')
    arguments = "--model ./words --arm gamma=0.5,1.0 --seeds 1 --pilot --tracker none --workers 2"
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments.split(), "--output", "out"])
    out, err = capfd.readouterr()
    assert ended.value.code == 2
    assert "all 2 runs failed; the first: ModelError: cannot load the model './words'" in err
    assert "All runs failed." in out
    assert "Traceback" not in err


def test_a_comparison_goes_on_in_a_folder_that_was_moved_or_is_named_in_another_way(tmp_path):
    def stop(line):
        raise KeyboardInterrupt

    for place in ("first", str(tmp_path / "first"), "moved"):
        problems = {"one": small(output=place)}
        with pytest.raises(KeyboardInterrupt):  # not OutputError: it is the same comparison
            compare(two(problems=problems), tmp_path / Path(place).name, NoTracker(), stop)
        if place != "moved":
            shutil.copytree(tmp_path / "first", tmp_path / "moved", dirs_exist_ok=True)


WORK = """
import os, time

def write(path):
    print("dropped")
    path.write_text(str(os.getpid()))

def die(path):
    os._exit(1)

def write_or_wait(path):
    if path.name == "long":
        time.sleep(600)
    write(path)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A module that a worker can import."""
    (tmp_path / "work_of_a_comparison.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("work_of_a_comparison")


@pytest.mark.slow
def test_each_job_has_its_own_process_and_its_own_death(work, tmp_path, capfd):
    paths = [tmp_path / "a", tmp_path / "b"]
    assert dict(in_processes(work.write, paths, 1)) == dict.fromkeys(paths, 0)
    assert len({str(os.getpid()), *(path.read_text() for path in paths)}) == 3
    assert "dropped" not in capfd.readouterr().out
    assert dict(in_processes(work.die, paths, 2)) == dict.fromkeys(paths, 1)


def test_processes_that_run_are_stopped_when_nobody_waits_for_them(work, tmp_path):
    jobs = in_processes(work.write_or_wait, [tmp_path / "a", tmp_path / "long"], 2)
    assert next(jobs) == (tmp_path / "a", 0)
    (process,) = active_children()
    jobs.close()
    process.join(10)
    assert not process.is_alive()
