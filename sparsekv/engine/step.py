"""One layer's attention in one step."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from sparsekv.attention import DecodeAttention, split_attention
from sparsekv.attention.split import Load
from sparsekv.cache import InplaceKVCache
from sparsekv.engine.balance import Balance
from sparsekv.format import KVView
from sparsekv.transfer import reads_in_place, stream


def attend(
    cache: InplaceKVCache,
    layer_idx: int,
    query: Tensor,
    softmax_scale: float,
    *,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend to everything a layer holds, then let its full segments leave the window.

    The unpinned region is attended where it lies, by the CPU, and so is what the CPU borrows of the
    pinned one; the rest of that by the accelerator, where it lies too, but for the first chunks,
    which came through the ping-pong buffers before; or all of it through these, where it would
    be read more than once, or where copies are known to be faster (`cache.reads_in_place`); the
    window, and tokens just appended, where they are.

    Args:
        query: (batch, num_heads, num_queries, head_dim): the last tokens appended, in order.
        softmax_scale: factor of the scores.
        key_mask: (batch, num_tokens) bool by position, True where a key may be seen; None: all.
        mask: (batch or 1, num_heads or 1, num_queries, num_tokens) bool, or float to be added;
            replaces causality.
    Returns:
        (batch, num_heads, num_queries, head_dim_v) float32, or float64 for float64 input.
    Raises:
        LayoutError: the query does not match the cache.
        CapacityError: full segments found no memory; attention was computed, nothing is lost.
    """
    companion = _companion_of(cache)
    can_read_in_place = reads_in_place(query, cache.spec.geometry.num_kv_heads, mask)
    is_in_place = can_read_in_place and cache.reads_in_place
    out = None
    if can_read_in_place and key_mask is None and query.shape[2] == 1:
        parts = cache.parts(layer_idx)
        if parts is not None:
            next_idx = (layer_idx + 1) % cache.spec.geometry.num_layers
            upcoming = next_idx, cache.pinned_ahead(next_idx)[0]
            out = companion.attend(layer_idx, query, softmax_scale, parts, upcoming)
    if out is None:
        out, _ = split_attention(
            query,
            cache.step_views(layer_idx),
            softmax_scale,
            key_mask=key_mask,
            mask=mask,
            load=partial(_as_they_lie, cache) if is_in_place else _streamed(cache, layer_idx),
            host=companion.host,
        )
    cache.count_borrowed(layer_idx)
    cache.flush(layer_idx)
    cache.register_ahead(layer_idx)
    if query.shape[2] == 1 and layer_idx == cache.spec.geometry.num_layers - 1:
        _end_step(cache, companion)
    return out


def _as_they_lie(cache: InplaceKVCache, pinned: tuple[KVView, ...]) -> tuple[KVView, ...]:
    """The accelerator reads registered memory itself; the bytes cross the bus as copies do."""
    bytes_per_token = cache.spec.geometry.bytes_per_token_per_layer
    for view in pinned:
        cache.accelerator.h2d_bytes += view.num_tokens * view.batch_size * bytes_per_token
    return pinned


def _streamed(cache: InplaceKVCache, layer_idx: int) -> Load:
    """Through the ping-pong buffers; the next layer's first chunks are copied while this one's
    experts compute, and after the last layer comes the first one of the next step.
    """
    upcoming, after = cache.pinned_ahead((layer_idx + 1) % cache.spec.geometry.num_layers)
    return partial(stream, cache.ping_pong, upcoming=upcoming, after=after)


def _end_step(cache: InplaceKVCache, companion: DecodeAttention) -> None:
    if isinstance(cache.balance, Balance):
        cache.balance.end_step(cache, companion.timings)


def _companion_of(cache: InplaceKVCache) -> DecodeAttention:
    """Who attends for this cache; made at its first step."""
    companion = cache.companion
    if not isinstance(companion, DecodeAttention):
        cache.companion = companion = DecodeAttention(
            cache.registrar,
            cache.ping_pong,
            cache.spec.geometry,
            reads_in_place=cache.reads_in_place,
        )
    return companion
