"""How often the host waits for a GPU: in an update once a step and once for the metrics; in a
decode step once, for the sampled ids."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from support.device_cases import LOSSES, with_prefix
from support.learners import adapted
from support.pretend_device import pretend_gpu

from gspo_env.batch.packing import upload
from gspo_env.engines.base import Sampling
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.learner import GSPO, Learner, LearnerConfig

STEPS = 3


def waits_of_an_update(model, loss, samples, **config):
    """The places where an update waited, with their numbers."""
    with pretend_gpu() as gpu:
        settings = LearnerConfig(warmup_steps=0, minibatches=STEPS, **config)
        learner = Learner(copy.deepcopy(model).to("cuda"), loss, settings, total_steps=8)
        gpu.clear()
        learner.update(samples)
        return [(place.split(":")[0], place.split()[1]) for _, place in gpu.waits.elements()]


EXPECTED = [("gspo_env/learner/learner.py", "_clip")] * STEPS + [
    ("gspo_env/learner/stats.py", "to_cpu")
]


@pytest.mark.parametrize("name", LOSSES)
def test_an_update_waits_once_a_step_and_once_for_its_metrics(model, samples, name):
    found = waits_of_an_update(model, LOSSES[name], samples, microbatch_tokens=60)
    assert sorted(found) == EXPECTED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shared_prefixes_adapters_checkpointing_and_masters_add_no_wait(model, dtype):
    samples = with_prefix(np.random.default_rng(1))
    given = adapted(model) if dtype == torch.float32 else model.to(dtype)
    found = waits_of_an_update(given, GSPO(kl_coef=0.1), samples, checkpointing=True)
    assert sorted(found) == EXPECTED


@pytest.mark.parametrize("alike", [False, True])
def test_a_decode_step_waits_once_and_uploads_its_feed_its_draws_and_its_copies(model, alike):
    with pretend_gpu() as gpu:
        engine = TransformersEngine(
            copy.deepcopy(model).to("cuda"), max_slots=5, max_context=300, max_step_tokens=37
        )
        steps, copies = [], []
        step, copy_slots = engine._step, engine._cache.copy
        engine._step = lambda: (steps.append(1), step())
        engine._cache.copy = lambda *places: (copies.append(1), copy_slots(*places))

        async def play():
            jobs = (
                engine.generate(
                    list(range(1 if alike else n + 1, 8 * n + 9)),
                    Sampling(max_tokens=9, temperature=n % 2, seed=n),
                    f"s{n}",
                )
                for n in range(5)
            )
            await asyncio.gather(*jobs)

        gpu.clear()
        asyncio.run(play())
    places = {place.split(":")[0] for _, place in gpu.waits}
    assert (places, gpu.waits.total()) == ({"gspo_env/engines/embedded/engine.py"}, len(steps))
    assert gpu.uploads.total() == 2 * len(steps) + len(copies)
    assert bool(copies) == alike


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_upload_keeps_values_shapes_and_dtypes(device):
    arrays = [
        np.arange(6).reshape(2, 3)[:, ::2],
        np.array([], dtype=np.int64),
        np.array([True, False, True]),
        np.array([1.5, -2.5], dtype=np.float32),
        np.array([[0.1]]),
        np.arange(3, dtype=np.int32),
    ]
    with pretend_gpu() as gpu:
        found = upload(arrays, device)
        assert {t.device.type for t in found} == {device}
        moved = [t.cpu().numpy() if device == "cpu" else t.inner.numpy() for t in found]
    assert not gpu.waits
    assert gpu.uploads.total() == (device == "cuda")
    for array, tensor in zip(arrays, moved, strict=True):
        assert array.dtype == tensor.dtype
        np.testing.assert_array_equal(array, tensor)
