"""A reference of PyTorch's flash kernels for rows of sequences, on the CPU.

`aten::_flash_attention_forward` and its backward have kernels for GPUs only. `register` gives them
one for the CPU, so that everything above them runs as it does on a GPU: `varlen_attn`, its
gradient, and the calls with a log-sum-exp of several parts. It refuses what the kernels refuse,
except wider dtypes, which it computes in.

Source: `mha_varlen_fwd` and `mha_varlen_bwd` of PyTorch's flash_api.cpp, and arXiv 2307.08691,
algorithms 1 and 2.
"""

import functools
from itertools import pairwise

import torch

_library = torch.library.Library("aten", "IMPL")


@functools.cache
def register():
    """Gives the two operators a kernel for the CPU."""
    _library.impl("_flash_attention_forward", forward, "CPU")
    _library.impl("_flash_attention_backward", backward, "CPU")


def forward(*tensors, scale=None, window_size_left=None, window_size_right=None, **unused):
    """Returns the output (T, H, D), the log-sum-exp (H, T), and three that nothing reads."""
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, *others = tensors
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    dropout_p, is_causal, return_debug_mask = others
    assert not dropout_p
    assert not return_debug_mask
    assert not [value for value in unused.values() if value is not None]
    out = torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full((query.shape[1], len(query)), torch.nan, dtype=wide)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    seen_by = cum_seq_q, cum_seq_k, is_causal, window_size_left, window_size_right
    for q, k, seen in _sequences(*seen_by):
        scores = _scores(query[q], key[k], seen, scale, wide)
        lse[:, q] = scores.logsumexp(-1)
        shares = (scores - lse[:, q, None]).exp()
        out[q] = torch.einsum("hqk,khd->qhd", shares, _grouped(value[k], query).to(wide)).to(
            out.dtype
        )
    empty = torch.empty(0, dtype=query.dtype)
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0, dtype=torch.uint64), empty


def backward(*tensors, scale=None, window_size_left=None, window_size_right=None):
    """Returns the gradients of queries, keys and values, from the given output and log-sum-exp."""
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, *others = tensors
    max_q, max_k, _, is_causal, _, _ = others
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert grad_out.dtype == out.dtype == query.dtype
    assert logsumexp.shape == (query.shape[1], len(query))
    assert logsumexp.is_contiguous()
    wide = torch.promote_types(query.dtype, torch.float32)
    assert logsumexp.dtype == wide
    grads = [torch.zeros_like(t, dtype=wide) for t in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = key.shape[1], query.shape[1] // key.shape[1]
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1)  # (T, H)
    seen_by = cum_seq_q, cum_seq_k, is_causal, window_size_left, window_size_right
    for q, k, seen in _sequences(*seen_by):
        scores = _scores(query[q], key[k], seen, scale, wide)
        shares = (scores - logsumexp[:, q, None]).exp()
        g = grad_out[q].to(wide)
        d_shares = torch.einsum("qhd,khd->hqk", g, _grouped(value[k], query).to(wide))
        d_scores = shares * (d_shares - delta[q].T[:, :, None]) * scale
        grads[0][q] = torch.einsum("hqk,khd->qhd", d_scores, _grouped(key[k], query).to(wide))
        d_key = torch.einsum("hqk,qhd->khd", d_scores, query[q].to(wide))
        d_value = torch.einsum("hqk,qhd->khd", shares, g)
        grads[1][k] = d_key.unflatten(1, heads).sum(2)
        grads[2][k] = d_value.unflatten(1, heads).sum(2)
    return tuple(d.to(t.dtype) for d, t in zip(grads, (query, key, value), strict=True))


def _sequences(cum_q, cum_k, causal, left, right):
    """Yields the queries, the keys and the mask of each sequence; the last ones are aligned."""
    left = -1 if left is None else left
    right = 0 if causal else -1 if right is None else right
    for (q0, k0), (q1, k1) in pairwise(zip(cum_q.tolist(), cum_k.tolist(), strict=True)):
        place = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        ahead = torch.arange(k1 - k0) - place
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if right >= 0:
            seen &= ahead <= right
        if left >= 0:
            seen &= ahead >= -left
        yield slice(q0, q1), slice(k0, k1), seen


def _scores(q, k, seen, scale, wide):
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), _grouped(k, q).to(wide)) * scale
    return scores.masked_fill(~seen, -torch.inf)


def _grouped(tensor, query):
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _check(q, k, v, cum_q, cum_k, max_q, max_k):
    size = q.shape[-1]
    if cum_q is None or cum_k is None or cum_q.dtype != torch.int32 or cum_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")
    if len(cum_q) != len(cum_k) or not (cum_q.is_contiguous() and cum_k.is_contiguous()):
        raise RuntimeError("cu_seqlens must be contiguous and of one length")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if k.shape != v.shape or k.shape[-1] != size or q.shape[1] % k.shape[1]:
        raise RuntimeError(f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if size % 8 or size > 256:
        raise RuntimeError("head_size must be a multiple of 8, at most 256")
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        raise RuntimeError("Input tensor must have contiguous last dimension")
    for rows, cum, longest in ((q, cum_q, max_q), (k, cum_k, max_k)):
        lengths = cum.diff()
        if int(cum[0]) or int(cum[-1]) != len(rows) or int(lengths.min()) < 1:
            raise RuntimeError(f"sequences {cum.tolist()} for {len(rows)} tokens")
        if int(lengths.max()) > longest:
            raise RuntimeError(f"a sequence is longer than the maximum {longest}")
