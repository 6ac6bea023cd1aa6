"""The NumPy reference against independent numbers and against finite differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import objective_reference as reference
import pytest

CASES = json.loads((Path(__file__).parents[1] / "data" / "objective_cases.json").read_text())
INPUTS = ("logprobs", "old_logprobs", "advantages", "mask", "turn_ids")


@pytest.mark.parametrize("case", CASES)
def test_independent_case(case: dict[str, Any]) -> None:
    options = {n: case[n] for n in (*INPUTS, "ratio_level", "clip_low", "clip_high")}
    output = reference.policy_loss(**options)
    np.testing.assert_allclose(output.loss, case["loss"], atol=1e-9, rtol=0)
    np.testing.assert_allclose(output.gradient, case["gradient"], atol=1e-9, rtol=0)
    np.testing.assert_allclose(output.ratio, case["ratio"], atol=1e-9, rtol=0)
    assert output.clipped.sum() / np.sum(case["mask"]) == pytest.approx(case["clipped_fraction"])


def test_token_gradient_is_the_derivative_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    old = -rng.exponential(1.0, (2, 5))
    new = old + 0.3 * rng.standard_normal((2, 5))
    options: dict[str, Any] = {
        "old_logprobs": old,
        "advantages": rng.standard_normal((2, 5)),
        "mask": np.ones((2, 5), bool),
        "ratio_level": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 1.4,
        "reference_logprobs": old - 0.2,
        "kl_coef": 0.5,
        "importance_weights": rng.random((2, 5)),
    }
    gradient = reference.policy_loss(new, **options).gradient
    for index in np.ndindex(2, 5):
        step = np.zeros((2, 5))
        step[index] = 1e-6
        up = reference.policy_loss(new + step, **options).loss
        down = reference.policy_loss(new - step, **options).loss
        assert gradient[index] == pytest.approx((up - down) / 2e-6, abs=1e-8)
