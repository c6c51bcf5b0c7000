"""Merge attention over disjoint sets of keys, exactly, by their log-sum-exp (lse).

One log base everywhere: natural. Empty sets are the identity and never make a NaN; a NaN in a part
stays one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.dispatch import merge_partials_for


def merge_partials(
    parts: Sequence[tuple[Tensor, Tensor]], attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint key sets into attention over their union.

    lse = log(sum of exp(lse_i), and of exp(attn_sink));  out = sum of exp(lse_i - lse) * out_i
    (the decomposition of softmax in FlashAttention, arXiv:2205.14135, section 3.1). The result does
    not depend on the order or the grouping of the parts, but for rounding. Nothing is written in
    place; does not synchronise.

    Args:
        parts: (out, lse) pairs, at least one, all of the same shapes, dtypes and device. out
            (batch, num_heads, ..., head_dim_v), floating; lse (batch, num_heads, ...), float32 or
            float64, natural log. An lse of -inf, or of +inf as some kernels write it, marks an
            empty key set; its out is not read.
        attn_sink: (num_heads,) floating: a learned logit per head whose value is zero, counted
            once; give it to the last merge only. None for models without it. -inf changes nothing;
            +inf takes all the weight: out 0 and lse +inf (such a row counts as empty if merged
            again).

    Returns:
        out with the shape and dtype of the parts', and lse likewise. All empty: out 0, lse -inf
        (the sink's logit with a sink). A NaN lse gives NaN out and lse in its row, and in no other.

    Raises:
        LayoutError: no parts; or shapes, dtypes or devices that differ or break the rules above.
    """
    parts = list(parts)
    _check_parts(parts)
    if attn_sink is not None:
        _check_sink(attn_sink, parts[0][0])
    return merge_partials_for(parts[0][0].device)(parts, attn_sink)


def _check_parts(parts: list[tuple[Tensor, Tensor]]) -> None:
    if not parts:
        raise LayoutError(
            "parts is empty: at least one (out, lse) pair is needed to know the shape; "
            "for no keys at all give out 0 and lse -inf"
        )
    first_out, first_lse = parts[0]
    if not first_out.is_floating_point():
        raise LayoutError(f"out has dtype {first_out.dtype}: must be floating; convert it")
    if first_lse.dtype not in (torch.float32, torch.float64):
        raise LayoutError(
            f"lse has dtype {first_lse.dtype}: must be float32 or float64, natural log; convert it"
        )
    for index, (out, lse) in enumerate(parts):
        if out.dim() == 0 or lse.shape != out.shape[:-1]:
            raise LayoutError(
                f"parts[{index}]: lse {tuple(lse.shape)} does not fit out {tuple(out.shape)}: "
                "it has one number for each row of out; pass lse of shape out.shape[:-1]"
            )
        for name, tensor, first in (("out", out, first_out), ("lse", lse, first_lse)):
            given, wanted = _signature(tensor), _signature(first)
            if given != wanted:
                raise LayoutError(
                    f"parts[{index}]: {name} is {given}, that of parts[0] is {wanted}: "
                    "all parts need the same shape, dtype and device; convert or move it"
                )


def _check_sink(attn_sink: Tensor, out: Tensor) -> None:
    if out.dim() < 3 or attn_sink.shape != out.shape[1:2]:
        raise LayoutError(
            f"attn_sink {tuple(attn_sink.shape)} does not fit out {tuple(out.shape)}: it has one "
            "logit for each head, and heads are dimension 1 of out, which has 3 or more; reshape it"
        )
    if not attn_sink.is_floating_point() or attn_sink.device != out.device:
        raise LayoutError(
            f"attn_sink is {attn_sink.dtype} on {attn_sink.device}: must be floating and on the "
            f"parts' device, {out.device}; convert or move it"
        )


def _signature(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device
