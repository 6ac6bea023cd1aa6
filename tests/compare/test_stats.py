"""Intervals and pass rates against numbers computed by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import nct, t

from gspo_env.compare.stats import (
    pass_at_k,
    pass_hat_k,
    power,
    smallest_difference,
    success_interval,
)
from gspo_env.errors import ConfigError


def wilson(successes, trials):
    z, p = 1.959963984540054, successes / trials
    centre = (p + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2))
    return centre - half, centre + half


def test_one_sample_a_task_gives_wilson():
    assert success_interval([[1]] * 7 + [[0]] * 3) == pytest.approx(wilson(7, 10))


def test_same_rate_everywhere_keeps_a_width():
    assert success_interval([[1, 1]] * 10) == pytest.approx(wilson(10, 10))
    assert success_interval([[1, 0, 0, 0]]) == pytest.approx(wilson(1, 4))


def test_bootstrap_draws_tasks_not_samples():
    clustered = [[1] * 8] * 10 + [[0] * 8] * 10
    low, high = success_interval(clustered)
    assert low < 0.5 < high
    # 20 tasks decide the width, not 160 samples
    assert high - low > 2 * (wilson(80, 160)[1] - wilson(80, 160)[0])
    assert (low, high) == success_interval(clustered)


def test_more_episodes_of_the_same_tasks_do_not_narrow_an_interval():
    few = [[1] * 16] * 3 + [[0] * 16] * 4  # 7 tasks in 112 episodes
    low, high = success_interval(few)
    assert high - low > 2 * (wilson(48, 112)[1] - wilson(48, 112)[0])
    # tasks are known to be fewer than the rows, but not which rows are of one task
    unknown = success_interval([[1]] * 48 + [[0]] * 64, tasks=7)
    assert unknown == pytest.approx(wilson(3, 7))


def test_an_interval_of_tasks_with_different_numbers_of_samples_is_around_the_rate():
    rows = [[1] * 9] * 30 + [[0]] * 30
    low, high = success_interval(rows)
    assert 0.6 < low < 270 / 300 < high < 1.0  # the mean of the tasks' rates is 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 2), (5, 5, 5), (6, 3, 4)])
def test_pass_rates_equal_enumeration(n, c, k):
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_impossible_counts_are_named():
    with pytest.raises(ConfigError, match="c is 6"):
        pass_at_k(5, 6, 1)
    with pytest.raises(ConfigError, match="k is 6"):
        pass_hat_k(5, 1, 6)
    with pytest.raises(ConfigError, match="empty row"):
        success_interval([[1], []])
    with pytest.raises(ConfigError, match="0 or 1"):
        success_interval([[0.5]])


def test_power_is_that_of_the_noncentral_t():
    for n in (3, 8, 20):
        bound, shift = t.ppf(0.975, n - 1), 0.7 * math.sqrt(n)
        expected = nct.sf(bound, n - 1, shift) + nct.cdf(-bound, n - 1, shift)
        assert power(0.7, n) == pytest.approx(expected, abs=1e-3)
    assert power(1.0, 9) < 0.8 <= power(1.0, 10)  # a well-known number
    assert smallest_difference(0.1, 34) == pytest.approx(0.05, rel=0.02)
