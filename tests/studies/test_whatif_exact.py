"""What `whatif` predicts from a batch is near the truth, and tells arms apart that differ much."""

import numpy as np
import pytest

from gspo_agents.whatif import predicted
from studies.credit.whatif_exact import changes


def test_the_predicted_change_is_near_the_exact_one_and_tells_lengths_apart():
    differences = []
    for arm in ("token_sum", "outcome"):
        ours_B, exact_B = changes("may stop", arm, 100)
        assert ours_B.mean() == pytest.approx(exact_B.mean(), rel=0.15)
        differences.append((ours_B, exact_B))
    ours_B, exact_B = (np.subtract(*pair) for pair in zip(*differences, strict=True))
    assert ours_B.mean() > 0
    assert exact_B.mean() > 0
    assert np.mean(np.sign(ours_B) == np.sign(exact_B)) > 0.6


def test_groups_without_a_difference_predict_nothing():
    assert predicted([[1.0, 1.0], [0.0, 2.0]], [[0.3, -0.3], [0.0, 0.0]]) == 0.0
    assert np.isnan(predicted([[1.0], []], [[0.5], []]))
