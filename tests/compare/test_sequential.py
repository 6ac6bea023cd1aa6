"""Added seeds: power, bounds, pruning, budgets, resumption, and what the report then says."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import nct, t

from gspo_env.compare import Arm, Comparison, Planned, Rounds, Sequential, planned
from gspo_env.compare.power import (
    earlier,
    fewest_pairs,
    lines,
    seeds_needed,
    shown_with,
    smallest_shown,
    spreads,
)
from gspo_env.compare.runner import has_result, read
from gspo_env.compare.sequential import bounds, cannot_win, differences, seconds, tight
from gspo_env.compare.stats import paired_interval
from gspo_env.config import from_dict
from gspo_env.errors import ConfigError, OutputError
from gspo_env.report.comparison import markdown, summarise, table, verdict

PLAN = Sequential(until=0.05, first=6, step=2, most=20)


def comparison(*names, seeds=5):
    arms = tuple(Arm(name=n, changes={"gamma": k / 10}) for k, n in enumerate(names))
    config = from_dict({"env": "gspo/Additive-v0", "steps": 2, "tasks_per_step": 2})
    return Comparison(problems={"one": config}, arms=arms, seeds=seeds, metric="m")


def player(score, seconds=1.0):
    """Plays a run by a function of its arm and seed; keeps what it played."""
    played = []

    def play(runs):
        for run in runs:
            if not has_result(run):
                history = [(step, {"m": score(run.arm.name, run.seed)}) for step in range(3)]
                run.folder.mkdir(parents=True, exist_ok=True)
                result = {"history": history, "seconds": seconds, "error": ""}
                (run.folder / "result.json").write_text(json.dumps(result))
                played.append((run.arm.name, run.seed))
        return [read(run) for run in runs]

    return play, played


def noise(name, seed, size=0.05):
    return size * float(np.random.default_rng([seed, sum(map(ord, name))]).standard_normal())


def test_power_is_that_of_the_noncentral_t():
    for n in (3, 8, 20):
        bound = t.ppf(0.975, n - 1)
        shift = 0.7 * math.sqrt(n)
        wanted = nct.sf(bound, n - 1, shift) + nct.cdf(-bound, n - 1, shift)
        assert shown_with(0.1, 0.07, n) == pytest.approx(wanted, abs=1e-3)
    assert seeds_needed(0.1, 0.1) == 10  # a well-known number: effect size 1, power 0.8
    assert seeds_needed(0.1, 0.05) in (33, 34)
    assert math.isinf(seeds_needed(1.0, 1e-4))
    assert seeds_needed(0.0, 0.1) == 2
    assert smallest_shown(0.1, 34) == pytest.approx(0.05, rel=0.02)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 3.0))
def test_the_seeds_needed_are_the_fewest(effect):
    count = seeds_needed(1.0, effect)
    assert shown_with(1.0, effect, count) >= 0.8
    assert shown_with(1.0, effect, count - 1) < 0.8


def test_signs_alone_are_significant_from_the_fewest_pairs_on():
    assert fewest_pairs(0.05) == 6
    assert 2 / 2 ** fewest_pairs(0.01) <= 0.01 < 2 / 2 ** (fewest_pairs(0.01) - 1)


def test_the_bounds_spend_the_level_evenly_and_agree_with_one_look():
    (single,) = bounds((10,), 0.05)
    assert single == pytest.approx(t.ppf(0.975, 9), rel=0.02)
    looks = (6, 12, 18, 24)
    found = np.array(bounds(looks, 0.05))
    assert (found > [t.ppf(0.975, n - 1) for n in looks]).all()
    rng = np.random.default_rng(1)
    x = rng.standard_normal((20_000, 24))
    crossed = np.array(
        [
            np.abs(x[:, :n].mean(1)) / x[:, :n].std(1, ddof=1) * math.sqrt(n) > c
            for n, c in zip(looks, found, strict=True)
        ]
    )
    spent = [crossed[: k + 1].any(0).mean() for k in range(4)]
    np.testing.assert_allclose(spent, [0.0125, 0.025, 0.0375, 0.05], atol=0.004)


def test_the_intervals_of_looks_are_wider_than_students_and_shrink():
    rng = np.random.default_rng(0)
    areas = {"a": rng.standard_normal(20), "b": rng.standard_normal(20)}
    widths = []
    for n in PLAN.looks(1):
        (_, ours) = differences(areas, PLAN, 1, n)
        low, high = paired_interval((areas["b"] - areas["a"])[:n])
        assert ours.low < low < high < ours.high
        widths.append(ours.width)
    assert widths[-1] < widths[0]


def test_equal_differences_of_a_coarse_metric_prove_nothing_before_their_signs_do():
    assert PLAN.looks(1)[0] == 6
    assert PLAN.looks(10)[0] == fewest_pairs(0.005) == 9
    areas = {"a": np.zeros(20), "b": np.ones(20)}
    assert set(cannot_win(differences(areas, PLAN, 1, 6), "b")) == {"a"}
    assert not cannot_win(differences({"a": np.ones(20), "b": np.ones(20)}, PLAN, 1, 6), "a")


def test_seeds_are_added_until_the_intervals_are_tight(tmp_path):
    play, played = player(lambda name, seed: noise(name, seed) + 0.02 * (name == "b"))
    rounds, said = Rounds(plan=PLAN), []
    results = rounds(play, comparison("a", "b"), tmp_path, said.append)
    (found,) = rounds.found["one"]
    assert found.width <= 0.05
    assert 6 <= found.seeds < 20
    assert len(played) == len(results) == 2 * found.seeds
    assert said[-1] == "All intervals are within 0.05 of their middle"
    assert "paired differences have a spread of" in said[0]


@pytest.mark.slow
def test_an_arm_that_cannot_win_gets_no_more_seeds_and_the_first_always_does(tmp_path):
    level = {"first": 0.0, "worse": -0.8, "good": 0.02}
    play, played = player(lambda name, seed: level[name] + noise(name, seed, 0.1))
    rounds, said = Rounds(plan=Sequential(until=0.06, first=6, step=2, most=40)), []
    results = rounds(play, comparison("first", "worse", "good"), tmp_path, said.append)
    seeds = {name: sum(arm == name for arm, _ in played) for name in level}
    assert seeds["worse"] < seeds["good"] == seeds["first"]
    assert any("no more seeds for worse, which cannot win" in line for line in said)
    one = comparison("first", "worse", "good")
    summary = summarise(one, results, rounds.found)
    assert verdict(summary["one"]) == (
        "Shown to be worse than first: worse. No difference from first is shown for good."
    )
    text = markdown(one, summary)
    assert "p (Holm)" not in text
    assert "a p-value would not" in text
    assert table(one, summary["one"])[2][5] == str(seeds["worse"])


def test_a_comparison_that_was_stopped_ends_with_the_same_intervals(tmp_path):
    def score(name, seed):
        return noise(name, seed)

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    play, _ = player(score)
    whole = Rounds(plan=PLAN)
    whole(play, comparison("a", "b", "c"), tmp_path / "whole", lambda line: None)
    stopped, _ = player(score, seconds=1e6)
    said = []
    short = Rounds(plan=Sequential(until=0.05, first=6, step=2, most=20, budget=60.0))
    short(stopped, comparison("a", "b", "c"), tmp_path / "parts", said.append)
    assert "The budget ends before" in said[-1]
    again, played = player(score)
    parts = Rounds(plan=PLAN)
    parts(again, comparison("a", "b", "c"), tmp_path / "parts", lambda line: None)
    assert played
    assert parts.found == whole.found
    other = Rounds(plan=Sequential(most=30))
    with pytest.raises(OutputError, match="because the intervals depend on them"):
        other(again, comparison("a", "b", "c"), tmp_path / "parts", lambda line: None)


def test_the_first_seeds_are_the_pilot_and_earlier_results_replace_it(tmp_path):
    one = comparison("a", "b", seeds=5)
    play, played = player(noise)
    said = []
    Planned(difference=0.1)(play, one, tmp_path, said.append)
    assert said[0] == "No earlier runs: the first 3 seeds are the pilot"
    assert "a difference of 0.1 needs" in said[1]
    assert "5 pairs cannot have a p-value below 0.05" in said[2]
    assert len(played) == 10
    said.clear()
    Planned(difference=0.1)(play, one, tmp_path, said.append)
    assert "(5 seeds)" in said[0]
    (tmp_path / "comparison.json").write_text(json.dumps({"arms": [["a", {}], ["b", {}]]}))
    spread = spreads(earlier(tmp_path, "m"))
    results = [read(run) for run in planned(one, tmp_path)]
    scores = {
        n: np.array([r.history[0][1]["m"] for r in results if r.run.arm.name == n]) for n in "ab"
    }
    ((value, pairs),) = spread.values()
    assert pairs == 5
    assert value == pytest.approx(np.std(scores["b"] - scores["a"], ddof=1))
    with pytest.raises(ConfigError, match="no run with the metric 'x'"):
        earlier(tmp_path, "x")


def test_a_study_on_fresh_seeds_has_the_same_pilot_looks_and_pairs(tmp_path):
    fresh = dataclasses.replace(comparison("first", "worse", seeds=5), first_seed=100)
    play, played = player(noise)
    said = []
    results = Planned(difference=0.1)(play, fresh, tmp_path / "planned", said.append)
    assert said[0] == "No earlier runs: the first 3 seeds are the pilot"
    assert {seed for _, seed in played} == {r.run.seed for r in results} == set(range(100, 105))
    said.clear()
    Planned(difference=0.1)(play, fresh, tmp_path / "planned", said.append)
    assert "(5 seeds)" in said[0]
    (tmp_path / "rounds").mkdir()
    pruning = dataclasses.replace(comparison("first", "worse", "good"), first_seed=100)
    level = {"first": 0.0, "worse": -0.8, "good": 0.02}
    play, played = player(lambda name, seed: level[name] + noise(name, seed, 0.1))
    Rounds(plan=PLAN)(play, pruning, tmp_path / "rounds", said.append)
    seeds = {name: [seed for arm, seed in played if arm == name] for name in level}
    assert len(seeds["first"]) > len(seeds["worse"]) >= 6
    assert min(seeds["worse"]) == 100
    with pytest.raises(ConfigError, match="first_seed -1"):
        dataclasses.replace(fresh, first_seed=-1)


def test_few_seeds_are_said_to_be_too_few():
    said = list(lines({"one": (0.5, 4)}, 0.001, 5, 3))
    assert "needs more than 10,000 seeds" in said[0]
    assert "8 can" not in said[1]
    assert said[1].startswith("5 pairs cannot have a p-value below 0.05 after the correction")


def test_no_winner_is_named_that_the_data_do_not_show(tmp_path):
    one = comparison("a", "b", seeds=5)
    play, _ = player(lambda name, seed: seed + (name == "b"))
    rows = summarise(one, play(list(planned(one, tmp_path))))["one"]
    # the interval excludes 0, but 5 pairs cannot have a p-value below 0.062
    assert rows[1].difference.low > 0
    assert rows[1].shown == 0
    assert verdict(rows) == "No difference from a is shown for b."
    more = comparison("a", "b", seeds=8)
    rows = summarise(more, play(list(planned(more, tmp_path))))["one"]
    assert verdict(rows) == "Shown to be better than a: b."
    head, _, line = table(more, rows)
    assert head[1] == "difference from the first (95 % interval)"
    assert line[1] == "+1.000 (+1.000 to +1.000)"


def test_tight_needs_every_remaining_arm():
    areas = {"a": np.arange(6.0), "b": np.arange(6.0), "c": np.array([0.0, 9, 1, 8, 2, 7])}
    found = differences(areas, PLAN, 1, 6)
    assert not tight(found, "a", ["a", "b", "c"], 0.1)
    assert tight(found, "a", ["a", "b"], 0.1)


def test_impossible_plans_and_budgets_are_refused():
    assert [seconds(s) for s in ("90", "90s", "1.5m", "2h")] == [90.0, 90.0, 90.0, 7200.0]
    for text in ("", "h", "-1h", "2 days", "nan"):
        with pytest.raises(ConfigError, match="expected a time such as"):
            seconds(text)
    for settings_ in ({"until": 0.0}, {"most": 2}, {"first": 1}, {"alpha": 1.0}, {"step": 0}):
        with pytest.raises(ConfigError, match=" is "):
            Sequential(**settings_)
