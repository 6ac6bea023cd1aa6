"""The exact formulas for the problem of decision density, against enumeration and sampling."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest

from gspo_env.batch.padded import bare_episode
from gspo_env.credit import GroupGAE, NormalizeThenAccumulate, Outcome, ReturnsToGo
from gspo_env.registry import find
from gspo_env.types import Group
from studies.credit.density import Density, signal
from studies.credit.enumeration import Enumeration, direction
from studies.credit.exact import TASK, true_gradient
from studies.diagnostics import DensityEnv

ROOT = Path(__file__).parents[2]
LINEAR = {
    "outcome": Outcome(),
    "leave one out": Outcome(baseline="leave_one_out"),
    "returns_to_go": ReturnsToGo(),
    "immediate": ReturnsToGo(gamma=0.0),
    "discounted": ReturnsToGo(gamma=0.7),
    "turn_plus_outcome": find("advantage", "turn_plus_outcome")(),
    "gigpo": find("advantage", "gigpo")(),
    "normalize_then_accumulate": NormalizeThenAccumulate(),
    "by turn and root": NormalizeThenAccumulate(per="turn", root=True),
    "group_gae": GroupGAE(),
    "td": GroupGAE(lam=0.0),
}


@pytest.mark.parametrize("name", sorted(LINEAR))
@pytest.mark.parametrize(("turns", "decisions", "right"), [(1, 1, 0.25), (4, 2, 0.6), (3, 3, 0.9)])
def test_without_noise_the_formulas_agree_with_all_groups_listed(name, turns, decisions, right):
    problem = Density(turns=turns, decisions=decisions, right=right)
    ours = signal(problem, LINEAR[name], 4)
    listed = direction(
        [(Enumeration(problem.problem(), LINEAR[name], 4), problem.logits())], groups=1
    )
    assert ours.cosine == pytest.approx(listed.cosine, abs=1e-10)
    assert ours.bias == pytest.approx(listed.bias, abs=1e-7)
    assert ours.snr == pytest.approx(
        listed.progress / math.sqrt(listed.cosine**2 - listed.progress**2), rel=1e-8
    )


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("name", ["outcome", "returns_to_go", "td", "normalize_then_accumulate"])
def test_with_noise_and_delay_the_formulas_agree_with_sampled_groups(name, delay):
    problem = Density(turns=5, decisions=2, noise=0.7, delay=delay, right=0.4)
    size, draws, rng, updates = 4, 1500, np.random.default_rng(1), []
    chance = np.exp(problem.logits()[:, 0])
    chance /= chance.sum(1, keepdims=True)
    drawn = (rng.random((draws, size, 5, 1)) > chance.cumsum(1)[:, :3]).sum(-1)
    for actions in drawn:
        rewards = np.zeros((size, 5))
        for k in range(5):
            source = rng.choice([-0.35, 0.35], size)
            if k in problem.positions:
                source = (actions[:, k] == 0) / 2
            rewards[:, problem.paid(k)] += source
        episodes = tuple(
            bare_episode(TASK, [1] * 5, row, list("01234")) for row in rewards.tolist()
        )
        rows = np.array(LINEAR[name].advantages(Group(task=TASK, episodes=episodes)))
        psi = np.eye(4)[actions] - chance
        updates.append((rows[:, :, None] * psi).mean(0).ravel() / 5)
    mean, spread = np.mean(updates, 0), np.sqrt(np.var(updates, 0).sum())
    exact = signal(problem, LINEAR[name], size)
    assert np.linalg.norm(mean) == pytest.approx(exact.length, abs=3 * spread / draws**0.5)
    assert spread == pytest.approx(exact.noise, rel=0.05)


def test_the_tabular_problem_is_the_environment():
    env = DensityEnv(turns=16, density=0.25, delay=3)
    problem = Density(turns=16, decisions=4, delay=3)
    assert env.decisions == problem.positions
    assert problem.density == 0.25
    gradient, value = true_gradient(Density(turns=4, decisions=2).problem(), np.zeros((4, 1, 4)))
    assert value == pytest.approx(0.25)
    assert np.abs(gradient[[1, 3]]).min() > 0
    assert np.abs(gradient[[0, 2]]).max() == 0


def test_exact_turn_credit_gains_the_root_of_the_number_of_turns_over_outcome_credit():
    for turns, decisions in ((16, 1), (16, 4), (16, 16), (4, 4)):
        problem = Density(turns=turns, decisions=decisions)
        gain = signal(problem, ReturnsToGo(gamma=0.0), 64).snr / signal(problem, Outcome(), 64).snr
        # a finite group adds the noise of its baseline
        assert gain == pytest.approx(math.sqrt(turns), rel=0.25)


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_benchmark_prints_and_those_of_the_raw_data(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "studies" / "density"))
    benchmark = importlib.import_module("density")
    page = benchmark.PAGE.read_text()
    assert benchmark.exact_table(0.5) in page
    assert benchmark.delay_table() in page
    for name, table in benchmark.tables().items():
        assert f"<!-- begin {name} -->\n\n{table}\n\n<!-- end {name} -->" in page
