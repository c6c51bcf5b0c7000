"""How far attention on the CPU is from the same in float64, on a sample of rows and heads."""

from __future__ import annotations

import torch
from torch import Tensor


def errors(
    out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, softmax_scale: float
) -> tuple[float, float]:
    """Largest errors over the first and last row, and the first and last kv head of each.

    Args:
        out: (rows, num_heads, 1, head_dim_v), what is judged.
        lse: (rows, num_heads, 1) likewise.
        query: (rows, num_heads, 1, head_dim).
        key: (num_segments, rows, num_kv_heads, tokens, head_dim), all of it visible.
        value: (num_segments, rows, num_kv_heads, tokens, head_dim_v).
        softmax_scale: factor of the scores.

    Returns:
        Of `out`: the largest difference in a head, relative to its largest number. Of `lse`: the
        largest difference, relative to 1 or the largest score's size.
    """
    num_kv_heads = key.shape[2]
    group_size = query.shape[1] // num_kv_heads
    out_error = lse_error = 0.0
    for row in sorted({0, query.shape[0] - 1}):
        for kv_head in sorted({0, num_kv_heads - 1}):
            heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
            keys = key[:, row, kv_head].flatten(0, 1).double()
            scores = query[row, heads, 0].double() @ keys.T * softmax_scale  # [E, K]
            true_lse = scores.logsumexp(dim=-1)
            values = value[:, row, kv_head].flatten(0, 1).double()
            true_out = (scores - true_lse[:, None]).exp() @ values  # [E, V]
            difference = (out[row, heads, 0].double() - true_out).abs().amax(dim=-1)
            relative = difference / true_out.abs().amax(dim=-1)
            of_lse = (lse[row, heads, 0].double() - true_lse).abs()
            scale = scores.abs().max().clamp(min=1.0)
            out_error = max(out_error, _largest(relative))
            lse_error = max(lse_error, _largest(of_lse / scale))
    return out_error, lse_error


def _largest(values: Tensor) -> float:
    """The largest of some numbers; infinite if one of them is none, which `max` could drop."""
    return float(values.nan_to_num(nan=torch.inf).max())
