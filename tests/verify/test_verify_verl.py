"""Batches of verl's own `DataProto` and advantages: a clean one, and faults of public reports."""

import numpy as np
import pytest

from gspo_env.recipes.build import build_model
from gspo_env.recipes.tiny import Tiny
from gspo_env.verify import verify
from gspo_env.verify.from_verl import from_verl

pytest.importorskip("verl", reason="see adapter_tests in .ci/run")
pytestmark = pytest.mark.adapters

UIDS = np.array(["a", "a", "b", "b"], dtype=object)
PROMPTS, RESPONSES = (2, 2, 3, 3), (4, 2, 3, 4)
WIDTH, LENGTH = 3, 4
"""Columns of prompts, which are padded on the left, and of responses, padded on the right."""


@pytest.fixture(scope="module")
def models():
    """The model that sampled, and one with other weights."""
    return [build_model(Tiny(hidden_size=16), 64, 1, seed).eval() for seed in (0, 1)]


def logprobs(model, data):
    """(B, R) as verl's actor computes them, with positions that skip padding."""
    import torch

    ids, attention = data.batch["input_ids"], data.batch["attention_mask"]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=attention, position_ids=positions).logits
    shifted = logits[:, WIDTH - 1 : -1].log_softmax(-1)
    return shifted.gather(2, data.batch["responses"][..., None])[..., 0]


def make(models, *, of_weights=0, uids=UIDS, mask=None):
    """What verl's trainer has before the update of its actor."""
    import torch
    from verl import DataProto
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask

    drawn = np.random.default_rng(0)
    ids, attention = torch.zeros(4, WIDTH + LENGTH, dtype=torch.long), torch.zeros(4, 7).long()
    prompts = {uid: drawn.integers(2, 64, n) for uid, n in zip(UIDS, PROMPTS, strict=True)}
    rewards = torch.zeros(4, LENGTH)
    for n, (uid, size) in enumerate(zip(UIDS, RESPONSES, strict=True)):
        ids[n, WIDTH - len(prompts[uid]) : WIDTH] = torch.tensor(prompts[uid])
        ids[n, WIDTH : WIDTH + size] = torch.tensor(drawn.integers(2, 64, size))
        attention[n, WIDTH - len(prompts[uid]) : WIDTH + size] = 1
        rewards[n, size - 1] = float(n % 2)
    tensors = {"input_ids": ids, "attention_mask": attention, "responses": ids[:, WIDTH:].clone()}
    tensors["token_level_rewards"] = rewards
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})
    own = compute_response_mask(data)
    data.batch["response_mask"] = own if mask is None else mask(own)
    data.batch["old_log_probs"] = logprobs(models[of_weights], data)
    return compute_advantage(data, AdvantageEstimator.GRPO)


def names(data, model):
    return {f.name for f in verify(from_verl(data, "grpo"), model=model) if not f.ok}


def test_a_clean_batch_of_verl_has_no_finding(models):
    data = make(models)
    assert names(data, models[0]) == set()
    rows = from_verl(data, "grpo").rows
    assert [sum(row.mask) for row in rows] == list(RESPONSES)
    assert [row.reward for row in rows] == [0.0, 1.0, 0.0, 1.0]


def crossed(models):
    """Advantages of groups in another order than the rows, as after the wrong `repeat`."""
    data = make(models, uids=np.array(["a", "b", "b", "a"], dtype=object))
    data.batch["token_level_rewards"] = data.batch["token_level_rewards"].flip(0)
    data.non_tensor_batch["uid"] = UIDS
    return data


def shifted(models):
    import torch

    data = make(models)
    data.batch["old_log_probs"] = torch.roll(data.batch["old_log_probs"], -1, 1)
    return data


def masked_after(models):
    """The mask of a truncated response is emptied after its reward has moved its group."""
    data = make(models)
    data.batch["response_mask"][0] = 0
    return data


FAULTS = {
    "padding": lambda models: make(models, mask=lambda own: own * 0 + 1),
    "advantages": crossed,
    "logprobs_shifted": shifted,
    "logprobs_other_weights": lambda models: make(models, of_weights=1),
    "no_token": masked_after,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_public_report_is_found_in_verl(name, models):
    assert name in names(FAULTS[name](models), models[0])
