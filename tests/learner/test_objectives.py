"""The losses against numbers of TRL, the equations, and their invariances."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import learners
import numpy as np
import objective_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import evaluate

from gspo_env.errors import BatchError, ConfigError
from gspo_env.learner import importance_weights, policy_loss

TRL_CASES = json.loads((Path(__file__).parents[1] / "data" / "trl_cases.json").read_text())
LEVELS = ["sequence", "turn", "token"]
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("case", TRL_CASES)
def test_loss_and_gradient_are_those_of_trl(case: dict[str, Any]) -> None:
    """TRL 1.16, three loss types, uniform advantages: see `tests/data/make_trl_cases.py`."""
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    inputs = {n: torch.tensor(case[n]) for n in names if n == "mask"}
    inputs |= {n: torch.tensor(case[n], dtype=torch.float64) for n in names if n != "mask"}
    options = {n: case[n] for n in ("clip_low", "clip_high")} | case["options"]
    output, gradient = evaluate(inputs, **options)
    np.testing.assert_allclose(output.loss.item(), case["loss"], atol=1e-12, rtol=0)
    np.testing.assert_allclose(gradient, case["gradient"], atol=1e-12, rtol=0)
    assert 0 < output.clipped.sum() < inputs["mask"].sum()


batch = partial(learners.batch, rows=4, length=12, spread=4e-3)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, padding=st.integers(0, 7))
def test_padding_and_masked_content_change_nothing(level: str, seed: int, padding: int) -> None:
    inputs = batch(seed)
    output, gradient = evaluate(inputs, ratio_level=level)
    padded = {}
    for name, tensor in inputs.items():
        fill = {"mask": 0, "turn_ids": -1}.get(name, np.nan)
        extra = torch.full((len(tensor), padding), fill, dtype=tensor.dtype)
        if tensor.is_floating_point():
            tensor = torch.where(inputs["mask"], tensor, torch.nan)
        padded[name] = torch.cat([tensor, extra], dim=1)
    again, padded_gradient = evaluate(padded, ratio_level=level)
    assert torch.equal(again.loss, output.loss)
    assert torch.equal(padded_gradient[:, : gradient.shape[1]], gradient)
    assert not padded_gradient[:, gradient.shape[1] :].any()


def test_half_precision_is_computed_in_float32_and_extremes_stay_finite() -> None:
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch(7).items()}
    assert policy_loss(**inputs).ratio.dtype == torch.float32  # type: ignore[arg-type]
    far = batch(8, spread=500.0)
    output, gradient = evaluate(far, ratio_level="token")
    assert output.loss.isfinite()
    assert gradient.isfinite().all()


def test_importance_weights() -> None:
    old = torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    engine = torch.tensor([-2.0, 0.5, -1.0, -1.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 1, 1])
    truncated = importance_weights(old, engine, ids, kind="truncated")
    np.testing.assert_allclose(truncated, reference.truncated_importance_weights(old, engine))
    # geometric means exp(0.75) = 2.117 and exp(1) = 2.718
    assert importance_weights(old, engine, ids, kind="mask", cap=2.5).tolist() == [1, 1, 0, 0]
    assert importance_weights(old, engine, ids, kind="none").tolist() == [1, 1, 1, 1]
    with pytest.raises(BatchError, match="kind is 'other'"):
        importance_weights(old, engine, ids, kind="other")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio_level": "episode"}, "ratio_level is 'episode'"),
        ({"ratio_level": "turn", "turn_ids": None}, "without turn_ids"),
        ({"mask": torch.ones(4, 12)}, "mask has dtype"),
        ({"clip_low": 1.0}, "clip_low is 1.0"),
        ({"kl_coef": 0.1}, "without reference_logprobs"),
        ({"old_logprobs": torch.zeros(4, 3)}, r"old_logprobs has shape \(4, 3\)"),
        ({"advantages": torch.zeros(3)}, r"advantages has shape \(3,\)"),
        ({"ratio_level": "turn", "turn_ids": torch.full((4, 12), -1)}, "turn_ids_N spans -1"),
    ],
)
def test_impossible_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises((BatchError, ConfigError), match=message):
        policy_loss(**{**batch(9), **change})
