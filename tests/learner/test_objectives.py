"""The losses against numbers of TRL, by hand and against the reference, and their invariances."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import support.objective_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import learners
from support.learners import evaluate

from gspo_env.errors import BatchError, ConfigError
from gspo_env.learner import importance_weights, policy_loss

TRL_CASES = json.loads((Path(__file__).parents[1] / "data" / "trl_cases.json").read_text())
LEVELS = ["sequence", "turn", "token"]
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("case", TRL_CASES)
def test_loss_and_gradient_are_those_of_trl(case):
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
def test_padding_and_masked_content_change_nothing(level, seed, padding):
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


def test_half_precision_is_computed_in_float32_and_extremes_stay_finite():
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch(7).items()}
    assert policy_loss(**inputs).ratio.dtype == torch.float32  # type: ignore[arg-type]
    far = batch(8, spread=500.0)
    output, gradient = evaluate(far, ratio_level="token")
    assert output.loss.isfinite()
    assert gradient.isfinite().all()


def test_importance_weights():
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
        ({"aggregation": "turn_mean", "turn_ids": None}, "without turn_ids"),
        ({"clip_staleness": 1.0}, "without ages"),
        ({"old_logprobs": torch.zeros(4, 3)}, r"old_logprobs has shape \(4, 3\)"),
        ({"advantages": torch.zeros(3)}, r"advantages has shape \(3,\)"),
        ({"ratio_level": "turn", "turn_ids": torch.full((4, 12), -1)}, "turn_ids_N spans -1"),
    ],
)
def test_impossible_input_is_named(change, message):
    with pytest.raises((BatchError, ConfigError), match=message):
        policy_loss(**{**batch(9), **change})


AGGREGATIONS = ["sequence_mean", "turn_mean", "token_mean", "token_sum"]
# two sequences of 1 and 3 tokens, ratios 2, 1, 1 and 8, advantages 1 and -1
RATIOS = [[2.0, 1.0, 1.0], [1.0, 1.0, 8.0]]
MASK = [[True, False, False], [True, True, True]]


def case(advantages=(1.0, -1.0)):
    return {
        "logprobs": torch.tensor(RATIOS, dtype=torch.float64).log() - 3,
        "old_logprobs": torch.full((2, 3), -3.0, dtype=torch.float64),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "mask": torch.tensor(MASK),
        "turn_ids": torch.tensor([[0, -1, -1], [0, 2, 2]]),
        "ages": torch.tensor([[3, 0, 0], [0, 1, 1]]),
    }


wide = partial(learners.batch, rows=4, length=9, spread=0.4)


@pytest.mark.parametrize(
    ("options", "loss", "gradient"),
    [
        # (2 / 1 - (1 + 1 + 8) / 3) / 2
        ({}, 2 / 3, [[-1, 0, 0], [1 / 6, 1 / 6, 8 / 6]]),
        # the turns of the second have 1 and 2 tokens: (2 - (1 + (1 + 8) / 2) / 2) / 2
        ({"aggregation": "turn_mean"}, 3 / 8, [[-1, 0, 0], [1 / 4, 1 / 8, 1]]),
        # the range of the first token is 1.5 * (1 + 3)^-1 above 1, so that 2 counts as 1.375
        ({"clip_staleness": -1.0}, (10 / 3 - 1.375) / 2, [[0, 0, 0], [1 / 6, 1 / 6, 8 / 6]]),
        # no bound for the advantage above 0, or its ratio counts as 1
        ({"clip_high": 0.5, "positives": "unclipped"}, 2 / 3, [[-1, 0, 0], [1 / 6, 1 / 6, 8 / 6]]),
        ({"positives": "unweighted"}, 7 / 6, [[-0.5, 0, 0], [1 / 6, 1 / 6, 8 / 6]]),
        # (2 - 10) / 4
        ({"aggregation": "token_mean"}, 2.0, [[-0.5, 0, 0], [0.25, 0.25, 2.0]]),
        # (2 - 10) / 5 / 2
        ({"aggregation": "token_sum", "max_tokens": 5}, 0.8, [[-0.2, 0, 0], [0.1, 0.1, 0.8]]),
        # dual clip: the ratio 8 counts as 3 and has no gradient: (2 - (1 + 1 + 3) / 3) / 2
        ({"dual_clip": 3.0}, -1 / 6, [[-1, 0, 0], [1 / 6, 1 / 6, 0]]),
    ],
)
def test_token_ratios_by_hand(options, loss, gradient):
    options = {"ratio_level": "token", "clip_low": 0.5, "clip_high": 1.5, **options}
    output, found = evaluate(case(), **options)
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(found, gradient, atol=1e-12)
    expected = reference.policy_loss(**{k: v.numpy() for k, v in case().items()}, **options)
    assert expected.loss == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(expected.gradient, gradient, atol=1e-12)


@pytest.mark.parametrize("power", [-3.0, -1.0, 0.3, 1.0, 3.0])
def test_extreme_log_ratios_stay_finite_and_keep_their_mean(power):
    far = {k: v.float() if v.is_floating_point() else v for k, v in wide(8, spread=500.0).items()}
    output, gradient = evaluate(far, ratio_mean=power)
    assert output.loss.isfinite()
    assert gradient.isfinite().all()
    low = torch.full((1, 4), -18.0)
    inputs = {
        "logprobs": low + torch.tensor([[0.0, 0.1, 0.2, 0.3]]),
        "old_logprobs": torch.zeros(1, 4),
        "advantages": torch.ones(1),
        "mask": torch.ones(1, 4, dtype=torch.bool),
    }
    wanted = reference.policy_loss(**{k: v.numpy() for k, v in inputs.items()}, ratio_mean=power)
    np.testing.assert_allclose(evaluate(inputs, ratio_mean=power)[0].ratio, wanted.ratio, rtol=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    power=st.sampled_from([-2.0, 0.0, 0.01, 0.5, 1.0, 3.0]),
    dual=st.sampled_from([0.0, 1.5]),
    positives=st.sampled_from(["clipped", "unclipped", "unweighted"]),
    staleness=st.sampled_from([0.0, -2.0, 1.0]),
)
def test_loss_and_gradient_are_those_of_the_reference(
    aggregation, level, seed, power, dual, positives, staleness
):
    inputs = wide(seed)
    ages = np.random.default_rng(seed).integers(0, 4, inputs["mask"].shape)
    inputs["ages"] = torch.tensor(ages)
    inputs["reference_logprobs"] = inputs["old_logprobs"] + 0.1
    power = 0.0 if level == "token" else power
    options = {"ratio_level": level, "aggregation": aggregation, "max_tokens": 7, "kl_coef": 0.3}
    options |= {"ratio_mean": power, "dual_clip": dual, "clip_low": 0.1, "clip_high": 0.2}
    options |= {"positives": positives, "clip_staleness": staleness}
    output, gradient = evaluate(inputs, **options)
    expected = reference.policy_loss(**{k: v.numpy() for k, v in inputs.items()}, **options)
    np.testing.assert_allclose(output.loss.item(), expected.loss, atol=1e-11)
    np.testing.assert_allclose(gradient, expected.gradient, atol=1e-11)
    np.testing.assert_allclose(output.ratio, expected.ratio, rtol=1e-11)
    np.testing.assert_array_equal(output.clipped, expected.clipped)


def test_a_range_for_stale_tokens_is_that_of_a_new_one_at_age_0_whatever_the_power():
    inputs = wide(3) | {"ages": torch.zeros(4, 9, dtype=torch.int64)}
    plain, slopes = evaluate(inputs, clip_low=0.1, clip_high=0.2)
    for power in (-2.0, 3.0):
        same, gradient = evaluate(inputs, clip_low=0.1, clip_high=0.2, clip_staleness=power)
        assert torch.equal(same.loss, plain.loss)
        assert torch.equal(gradient, slopes)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_empty_sequences_change_nothing(aggregation):
    inputs = wide(6)
    options = {"aggregation": aggregation, "max_tokens": 3}
    whole, _ = evaluate({k: v[:3] for k, v in inputs.items()}, **options)
    inputs["mask"][3] = False
    output, gradient = evaluate(inputs, **options)
    torch.testing.assert_close(output.loss, whole.loss)
    assert not gradient[3].any()
    inputs["mask"][:] = False
    assert evaluate(inputs, **options)[0].loss == 0
