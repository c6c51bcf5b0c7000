"""The attention function that transformers calls for the implementation named "sparsekv".

With a handle from a SparseKVCache it reads the regions; without one (no cache, somebody else's
cache, a layer that slides, training) it is transformers' own sdpa. What it would compute wrongly,
it refuses.

Letters: B batch, H query heads, G kv heads, T query tokens, S key tokens, D head_dim.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sparsekv.engine.step import attend
from sparsekv.errors import CacheStateError, UnsupportedModelError
from sparsekv.models.cache import HANDLE, KVHandle
from sparsekv.models.masks import causal_rows, dense_mask, sparsekv_mask, split_mask
from sparsekv.models.owned_cache import interrupted_error
from sparsekv.models.registry import is_supported_attention, output_attentions_error

logger = logging.getLogger(__name__)

NAME = "sparsekv"
_MASK_ELEMENTS, _MIN_RUN = 1 << 24, 16
"""Most elements of a mask that a padded prefill builds at a time, and the fewest queries."""


def register() -> None:
    """Make the name known to transformers. Models use it only when told to."""
    AttentionInterface.register(NAME, sparsekv_attention)
    AttentionMaskInterface.register(NAME, sparsekv_mask)


@torch.compiler.disable
def sparsekv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        module: the attention module.
        query: (batch, num_heads, tokens, head_dim).
        key, value: (batch, num_kv_heads, all tokens, head_dim), or handles of that shape.
        attention_mask: None, (batch, all tokens) bool, or 4D; see `masks.py`.
        scaling: factor of the scores; None: head_dim ** -0.5.
    Returns:
        (batch, tokens, num_heads, head_dim_v) in the query's dtype, contiguous; rows that see
        nothing are 0. And None: attention weights are never formed.
    Raises:
        UnsupportedModelError: the model asks for something this function does not compute.
        CacheStateError: the cache belongs to another model, or a forward of it was interrupted.
    """
    _refuse_unknown(module, kwargs)
    handle = getattr(key, HANDLE, None)
    if handle is None:
        if sliding_window is None and key.shape[2] > query.shape[2]:
            _warn_dense()  # a cache holds this full-attention layer's past, and it is not ours
        mask = dense_mask(attention_mask, query.shape[2], key.shape[2])
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    _check_handle(handle, module, sliding_window, is_causal)
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    with torch.no_grad():
        out = _attend(handle, query.detach(), scaling, attention_mask).to(query.dtype)
    if torch.is_grad_enabled() and query.requires_grad:
        out = _NoBackward.apply(out, query)
    return rearrange(out, "b h t d -> b t h d").contiguous(), None


def _attend(handle: KVHandle, query: Tensor, scaling: float, attention_mask: Any) -> Tensor:
    num_queries = query.shape[2]
    key_mask, mask = split_mask(attention_mask, num_queries, handle.num_past_tokens + num_queries)
    store = handle.store.cache
    assert store is not None, "a handle outlived its store within one attention call"
    if handle.num_past_tokens == 0:
        out = prefill_attention(
            query, handle.key, handle.value, scaling, key_mask=key_mask, mask=mask
        )
        store.flush(handle.layer_idx)
        return out
    query = query.to(store.spec.geometry.dtype)
    # Scores are summed in float32; autocast would quietly make them 16 bit.
    with torch.autocast(query.device.type, enabled=False):
        return attend(store, handle.layer_idx, query, scaling, key_mask=key_mask, mask=mask)


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Causal attention of the first tokens over themselves, by torch's sdpa: nothing is read from
    the regions.

    Args:
        query: (B, H, T, D); key, value: (B, G, T, D).
        key_mask: (B, T) bool, False = padding: never seen, not even if it holds NaN.
        mask: (B or 1, H or 1, T, T) bool or floating, instead of the causal rule.
    Returns:
        (B, H, T, D); rows that see nothing are 0.
    """
    group_size = query.shape[1] // key.shape[1]
    # As transformers does: grouped heads only where CUDA has a fast kernel for them.
    if mask is None and key_mask is None and key.shape[3] == value.shape[3] <= 256:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=group_size > 1
        )
    if key_mask is not None:
        key = key.masked_fill(~key_mask[:, None, :, None], 0)
        value = value.masked_fill(~key_mask[:, None, :, None], 0)
    key, value = (x.repeat_interleave(group_size, dim=1) for x in (key, value))
    if mask is None and key_mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        sees = mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) > float("-inf")
        return out.masked_fill(~sees[..., None], 0)
    assert key_mask is not None
    return _padded_prefill(query, key, value, scaling, key_mask)


def _padded_prefill(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, key_mask: Tensor
) -> Tensor:
    # In runs of queries: a mask for all of them at once is 1 GiB per row at 32k tokens.
    batch_size, num_tokens = key_mask.shape
    sees = key_mask.cumsum(1) > 0  # [B, T]: whether query t sees any key
    run = max(_MASK_ELEMENTS // (batch_size * num_tokens), _MIN_RUN)
    out = torch.empty((*query.shape[:3], value.shape[3]), dtype=query.dtype, device=query.device)
    for start in range(0, num_tokens, run):
        stop = min(start + run, num_tokens)
        causal = causal_rows(start, stop, stop, query.device)
        visible = causal[None] & key_mask[:, None, :stop]  # [B, run, stop]
        out[:, :, start:stop] = F.scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, :stop],
            value[:, :, :stop],
            attn_mask=visible[:, None],
            scale=scaling,
        )
    return out.masked_fill_(~sees[:, None, :, None], 0)


class _NoBackward(torch.autograd.Function):
    """Lets a forward run with gradients enabled, and refuses the backward that would be silently
    incomplete.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise CacheStateError(
            "backward through a SparseKVCache: keys and values in the regions carry no gradients; "
            "train with use_cache=False"
        )


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name, meaning in (
        ("s_aux", "attention sinks"),
        ("softcap", "a soft cap of the scores"),
        ("position_bias", "a position bias"),
    ):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name}: {meaning} would be ignored by sparsekv's "
                'attention; use model.set_attn_implementation("eager")'
            )
    if kwargs.get("output_attentions"):
        raise output_attentions_error("output_attentions=True")
    if not is_supported_attention(module):
        raise UnsupportedModelError(
            f"{type(module).__name__} is not an attention module that sparsekv knows, so it may "
            "need more than softmax over keys; use model.set_attn_implementation with "
            '"sdpa" or "eager"'
        )


def _check_handle(
    handle: KVHandle, module: nn.Module, sliding_window: int | None, is_causal: bool | None
) -> None:
    store = handle.store
    try:
        if not store.owner.owns(module):
            raise CacheStateError(
                "this cache was made for another model (a copy of a model is another model); take "
                "one from the new_cache() of this model's patch. The cache is as it was before "
                "this call"
            )
        if sliding_window is not None or is_causal is False:
            raise UnsupportedModelError(
                f"{type(module).__name__} asks for sliding_window={sliding_window}, "
                f"is_causal={is_causal} on a layer that sparsekv keeps in full; patch the model "
                "after its config is final"
            )
        if handle.layer_idx == 0:
            lengths = {handle.num_past_tokens, *store.layer_lengths()[1:]}
            if len(lengths) > 1:
                raise interrupted_error(min(lengths), max(lengths))
    except Exception:
        # The update before this call has added the step's tokens already.
        store.crop(handle.num_past_tokens)
        raise


@functools.cache
def _warn_dense() -> None:
    logger.warning(
        "a cache that is not sparsekv's holds this model's keys and values: attention over it is "
        "dense and on its device, without regions; let generate make the cache, or pass "
        "patched.new_cache() (said once)"
    )
