"""The merge of partial attention, by definition: the softmax over all parts, part by part."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_partials(
    parts: Sequence[tuple[Tensor, Tensor]], attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of the parts' key sets.

    lse = log(sum of exp(lse_i), and of exp(attn_sink));  out = sum of exp(lse_i - lse) * out_i
    Computed in the wider of the dtypes of out and lse. Nothing is written in place.

    Args:
        parts: at least one (out, lse); out (batch, num_heads, ..., head_dim_v), lse (batch,
            num_heads, ...), all alike. An lse of -inf or +inf marks an empty key set, whose out is
            not read.
        attn_sink: (num_heads,) logit per head whose value is zero; None: none.

    Returns:
        out and lse like the parts'. All empty: out 0, lse -inf (the sink's logit with a sink). A
        NaN lse makes its row NaN. A sink of +inf: out 0, lse +inf.
    """
    out, lse = parts[0]
    lses = torch.stack([part_lse for _, part_lse in parts])  # [P, B, H, ...]
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
    top = lses.amax(dim=0)  # [B, H, ...]
    if attn_sink is not None:
        sink = attn_sink.to(lse.dtype).view(-1, *[1] * (lse.dim() - 2))  # [H, 1...]
        top = torch.maximum(top, sink)

    base = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf is never formed
    weights = torch.exp(lses - base)  # [P, B, H, ...]
    total = weights.sum(dim=0)
    if attn_sink is not None:
        total += torch.exp((sink - base).masked_fill(sink == base, 0.0))  # inf - inf is 0 here
    merged = torch.zeros_like(out, dtype=torch.promote_types(out.dtype, lse.dtype))
    for (part_out, _), part_lse, weight in zip(parts, lses, weights, strict=True):
        empty = (part_lse == -torch.inf)[..., None]
        merged += (weight[..., None] * part_out).masked_fill_(empty, 0.0)
    merged /= total.masked_fill(total == 0.0, 1.0)[..., None]
    return merged.to(out.dtype), base + torch.log(total)
