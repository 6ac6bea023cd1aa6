"""Small models that the direct pass can run, and steps of a cache with them."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gspo_env.engines.embedded.kv_cache import KVCache
from gspo_env.model.attention import use_ragged_attention

SHAPE = {
    **{"vocab_size": 97, "hidden_size": 128, "intermediate_size": 80, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def llama():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    return LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=rope)
    )


def qwen2():
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **window, tie_word_embeddings=True))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=64))


def with_weights(make, spread, dtype=torch.float32):
    """A model with random weights, large enough to make every part count."""
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, spread)
    model = model.to(dtype)
    use_ragged_attention(model)
    return model


def steps(model, direct=None):
    """Log-probabilities of some ragged steps with prompts, single tokens and gaps."""
    cache, logprobs, lengths = KVCache(model, 5, 200), [], [0] * 5
    generator = torch.Generator().manual_seed(1)
    for sizes in ({0: 40, 3: 7}, {0: 1, 3: 1}, {0: 3, 1: 150, 3: 1, 4: 1}, {0: 1, 1: 1, 4: 1}):
        feeds = [torch.randint(0, 90, (n,), generator=generator).tolist() for n in sizes.values()]
        starts = [lengths[slot] for slot in sizes]
        logits = cache.forward(model, list(sizes), starts, feeds, direct)
        logprobs.append(logits.float().log_softmax(-1))
        for slot, size in sizes.items():
            lengths[slot] += size
    return torch.cat(logprobs)
