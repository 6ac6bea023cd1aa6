"""The next-observation loss: cross-entropy on the tokens that the environment answered with.

Such tokens are context to the policy loss: they are neither in y_i nor in its ratio. But they are
in the rows already, so that the policy can learn to predict what its actions lead to in the same
pass, also from episodes that fail. With o_b the observation tokens of sequence b of B,

    J' = J + observation_coef * 1/B sum_b 1/|o_b| sum over t in o_b of log pi(o_bt).

Source:
    ECHO, arXiv 2605.24517: cross-entropy of the environment's tokens, divided by their number.

Example:
    A sequence with two observation tokens of probability 1/2 and 1/4 has the loss
    (log 2 + log 4) / 2 = 1.04.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.model.head import Predictions
from gspo_env.model.router import RouterBalance
from gspo_env.model.scorer import Scorer
from gspo_env.types import BoolArray, FloatArray


def predict_with_observations(
    scorer: Scorer,
    samples: Sequence[Sample],
    pack: Callable[[Sequence[Sample]], PackedBatch],
    routers: bool,
    entropy: bool,
) -> tuple[Predictions, RouterBalance | None, Tensor]:
    """Predicts the model tokens and the observation tokens of samples in one pass.

    Returns:
        The predictions of the model tokens, the routers' balance, and the sum over the sequences of
        the mean negative log-probability of their observation tokens, with a gradient.
    """
    row = pack([_with_observations_as_targets(sample) for sample in samples])
    predictions, balance = scorer(row, routers, entropy)
    is_model = np.concatenate([s.mask[s.mask | _observed(s)] for s in samples])
    share = np.concatenate([_shares(s)[s.mask | _observed(s)] for s in samples])
    places = torch.from_numpy(np.flatnonzero(is_model)).to(row.target_N.device)
    share_N = torch.from_numpy(share).to(predictions.logprobs_N)
    return predictions.at(places), balance, -(share_N * predictions.logprobs_N).sum()


def _observed(sample: Sample) -> BoolArray:
    """Returns a mask (T,) of the observation tokens; without one, a sample has none."""
    return np.zeros(len(sample.token_ids), bool) if sample.observed is None else sample.observed


def _shares(sample: Sample) -> FloatArray:
    """Returns the weight (T,) of each token: 1 / |o_b| if it is an observation, else 0."""
    return _observed(sample) / max(int(_observed(sample).sum()), 1)


def _with_observations_as_targets(sample: Sample) -> Sample:
    """Returns the same tokens, of which the observations are predicted too."""
    turn_ids = np.where(_observed(sample), 0, sample.turn_ids)
    advantages = np.zeros(int((turn_ids >= 0).sum()))
    return replace(
        sample, turn_ids=turn_ids, advantages=advantages, engine_logprobs=None, ages=None
    )
