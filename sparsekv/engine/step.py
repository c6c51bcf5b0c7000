"""One layer's attention in one step."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from sparsekv.attention import HostAttention, HostCalls, HostJobs, split_attention
from sparsekv.cache import InplaceKVCache
from sparsekv.transfer import stream


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

    The unpinned region is attended where it lies, by the CPU; the pinned one passes through the
    ping-pong buffers; the window, and tokens just appended, are attended where they are.

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
    # The next layer's first chunks are copied while this one's experts compute; after the last
    # layer comes the first one of the next step.
    upcoming, after = cache.pinned_ahead((layer_idx + 1) % cache.spec.geometry.num_layers)
    load = partial(stream, cache.ping_pong, upcoming=upcoming, after=after)
    views = cache.views(layer_idx)
    out, _ = split_attention(
        query,
        views,
        softmax_scale,
        key_mask=key_mask,
        mask=mask,
        load=load,
        host=_host_of(cache),
    )
    cache.flush(layer_idx)
    cache.register_ahead(layer_idx)
    return out


def _host_of(cache: InplaceKVCache) -> HostAttention:
    """What attends for this cache on the CPU; made at its first step, and its companion then."""
    host = cache.companion
    if not isinstance(host, (HostJobs, HostCalls)):
        has_flags = cache.accelerator.has_flags
        cache.companion = host = HostJobs(cache.registrar) if has_flags else HostCalls()
    return host
