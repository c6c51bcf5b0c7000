"""Attention masks without a (tokens x tokens) tensor: a padding mask per key stays two-dimensional.

The mask function is what transformers calls once per forward for each kind of layer. It answers
None (plain causal, as sdpa reads it), a 2D key mask, or transformers' own 4D mask for everything
else.

Letters: B batch, T query tokens, S key tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from sparsekv.errors import LayoutError

_ALL_VISIBLE = "_sparsekv_all_visible"
_DENSE = "_sparsekv_dense"


@torch.compiler.disable
def sparsekv_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one kind of layer, in the smallest form that says everything.

    Args:
        batch_size, q_length, kv_length: B, T, S.
        q_offset, kv_offset: position of the first query and key. A static cache gives more keys
            than were written.
        mask_function: which key a query sees, by position; anything but plain causal goes to
            transformers.
        attention_mask: (B, number of tokens so far) bool, True = not padding, or None.
    Returns:
        None: causal, and T is 1 or S. (B, S) bool: causal and these keys only. (B, 1, T, S) bool:
            this mask only.
    """
    is_plain = (
        allow_is_causal_skip
        and mask_function is causal_mask_function
        and isinstance(q_offset, int)
        and kv_offset + kv_length == q_offset + q_length
        and (attention_mask is None or attention_mask.shape[0] == batch_size)
    )
    if not is_plain:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
    if attention_mask is not None:
        key_mask = F.pad(
            attention_mask.bool(), (0, max(kv_offset + kv_length - attention_mask.shape[1], 0))
        )
        key_mask = key_mask[:, kv_offset : kv_offset + kv_length]
        # Reading waits for the device, but once per forward and when it has little to do; a mask
        # that hides nothing would cost more, in every layer.
        if not bool(key_mask.all()):
            return key_mask
    if q_length == 1 or q_length == kv_length:
        return None
    # sdpa reads None as "aligned at the first key", which is wrong here: queries are the last
    # tokens.
    device = kwargs.get("device", "cpu")
    all_visible = torch.ones((1, 1), dtype=torch.bool, device=device).expand(batch_size, kv_length)
    setattr(all_visible, _ALL_VISIBLE, True)
    return all_visible


def split_mask(mask: Any, num_queries: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """What an attention module got, as (key_mask, full mask): at most one of them.

    Raises:
        LayoutError: neither a (B, S) bool nor a (B or 1, H or 1, T, S) bool or floating mask.
    """
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):
        raise LayoutError(
            f"attention_mask of type {type(mask).__name__}: must be a tensor; convert it, or "
            "restore() this model"
        )
    if mask.ndim == 2 and mask.dtype == torch.bool and mask.shape[1] == num_keys:
        return (None if getattr(mask, _ALL_VISIBLE, False) else mask), None
    if mask.ndim == 4 and mask.shape[2:] == (num_queries, num_keys):
        if mask.dtype == torch.bool or mask.dtype.is_floating_point:
            return None, mask
        raise LayoutError(
            f"attention_mask of dtype {mask.dtype}: a 4D mask must be bool (True = visible) or "
            "floating (added to the scores); use mask.bool()"
        )
    raise LayoutError(
        f"attention_mask of shape {tuple(mask.shape)} and {mask.dtype}: for {num_queries} queries "
        f"and {num_keys} keys it must be (batch, {num_keys}) bool or (batch, heads or 1, "
        f"{num_queries}, {num_keys})"
    )


def dense_mask(mask: Any, num_queries: int, num_keys: int) -> Any:
    """The mask in the form transformers' sdpa takes: a 2D key mask becomes causal and 4D, once for
    all layers.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return mask
    cached = getattr(mask, _DENSE, None)
    if cached is not None and cached.shape[2:] == (num_queries, num_keys):
        return cached
    key_mask = mask[:, None, None, :]
    causal = causal_rows(num_keys - num_queries, num_keys, num_keys, mask.device)
    full = key_mask & causal[None, None]  # [B, 1, T, S]
    setattr(mask, _DENSE, full)
    return full


def causal_rows(start: int, stop: int, num_keys: int, device: torch.device) -> Tensor:
    """(stop - start, num_keys) bool: what the queries at positions start..stop-1 see."""
    queries = torch.arange(start, stop, device=device)[:, None]
    return torch.arange(num_keys, device=device)[None, :] <= queries
