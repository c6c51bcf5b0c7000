"""Rotary position embedding of DeepSeek-V4: interleaved pairs on the last channels of a head.

One pass over the input in plain torch, so the definition is also the implementation for every
device. Which angle belongs to which position (base, YaRN) is the caller's business.
"""

import torch
from torch import Tensor

from sparsekv.errors import LayoutError


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the pairs (2j, 2j + 1) of the trailing channels by the angles of their tokens.

    (a, b) -> (a cos - b sin, a sin + b cos);  with `inverse` by the negative angles, which undoes
    it: attention's output is rotated back at the query's position, since key and value are one
    tensor (DeepSeek-V4, section 2.3). Linear in x, so rotating back may follow any merge of parts.

    Args:
        x: (batch, num_heads, tokens, head_dim), floating.
        cos: (batch or 1, tokens, rope_dim / 2), floating: cosine of each pair's angle;
            rope_dim <= head_dim. Pair j stands on channels head_dim - rope_dim + 2j and the next.
        sin: like `cos`.
        inverse: rotate by the negative angle.

    Returns:
        A new tensor with the shape and dtype of x. Products are in float32 (float64 for a float64
        x) and rounded once; the first head_dim - rope_dim channels keep their bits.

    Raises:
        LayoutError: more rotated channels than head_dim.
    """
    head_dim, rope_dim = x.shape[-1], 2 * cos.shape[-1]
    if rope_dim > head_dim:
        raise LayoutError(
            f"cos has {cos.shape[-1]} angles for head_dim={head_dim}: each turns two channels, so "
            f"there are at most {head_dim // 2}; pass one angle a pair, not one a channel"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)  # [B, 1, T, R / 2]
    if inverse:
        sin = -sin
    pairs = x[..., head_dim - rope_dim :].to(dtype)
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., : head_dim - rope_dim], rotated.to(x.dtype)], dim=-1)
