"""Split attention: the CPU attends to what lies unpinned, the accelerator to the rest; a merge.

This module decides who computes what and in which order it is issued. How pinned parts reach the
accelerator is the caller's (`load`).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sparsekv.attention.host import HostAttention, HostCalls, Question
from sparsekv.attention.merge import merge_partials
from sparsekv.errors import LayoutError
from sparsekv.format.views import KVView, LayerViews

Load = Callable[[tuple[KVView, ...]], Iterable[KVView]]

_MOST_RESULTS = 4
"""Results held until they are merged: of a long prompt's queries each takes more than their keys
and values, and a long context is loaded in hundreds of parts.
"""


def split_attention(
    query: Tensor,
    views: LayerViews,
    softmax_scale: float,
    *,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    attn_sink: Tensor | None = None,
    load: Load | None = None,
    host: HostAttention | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest tokens to a layer's whole cache, exact, wherever its parts lie.

    The query tokens are the last num_queries of the sequence, their own keys already in `views`.
    Order: the query goes to the CPU (if there are unpinned parts), the accelerator's work is
    issued, the CPU computes meanwhile, its results come back and all are merged.

    Args:
        query: (batch, num_heads, num_queries, head_dim), dtype of the keys, on the accelerator.
        views: the layer's keys and values; window parts on the query's device, unpinned on the CPU.
        softmax_scale: factor of the scores.
        key_mask: (batch, S) bool, S >= views.num_tokens, by sequence position, True = visible:
            padding and holes.
        mask: (batch or 1, num_heads or 1, num_queries, S), by sequence position, instead of the
            causal rule. Bool: True = visible. Floating: added to the scores; -inf, or the lowest
            finite number of its dtype, hides the key. `key_mask` still applies.
        attn_sink: (num_heads,) floating logit per head with value zero; None without.
        load: yields the pinned parts as views on the query's device, in any split; each is used up
            before the next is asked for, on the current stream, so memory may be reused in stream
            order. Default: a copy of each part.
        host: how the CPU attends to the unpinned parts. Default: on the calling thread.

    Returns:
        out (batch, num_heads, num_queries, head_dim_v) and lse (batch, num_heads, num_queries),
        natural log, on the query's device; float64 for a float64 query, else float32. Where nothing
        is visible: out 0, lse -inf. Views without any part: the same, with head_dim_v = head_dim.

    Raises:
        LayoutError: query, masks or views do not fit each other; nothing has been computed then.
    """
    _check_query(query, views)
    _check_masks(query, views, key_mask, mask)
    question = Question(
        query=query,
        softmax_scale=softmax_scale,
        query_start=views.num_tokens - query.shape[2],
        key_mask=key_mask,
        mask=mask,
    ).to(query.device)
    finish = (host or HostCalls()).begin(question, views.unpinned) if views.unpinned else None
    parts = [question.attend(part) for part in views.window]
    if views.pinned:
        loaded = (part.to(query.device) for part in views.pinned)
        for part in load(views.pinned) if load else loaded:
            if len(parts) >= _MOST_RESULTS:
                parts = [merge_partials(parts)]
            parts.append(question.attend(part))
    if finish is not None:
        parts += finish()
    return merge_partials(parts or [_nothing(query)], attn_sink)


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to no keys at all."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(query, dtype=dtype)
    return out, out.new_full(out.shape[:-1], -torch.inf)


def _check_query(query: Tensor, views: LayerViews) -> None:
    if query.dim() != 4 or not query.is_floating_point():
        raise LayoutError(
            f"query {tuple(query.shape)} of {query.dtype}: must be floating, of shape "
            "(batch, num_heads, num_queries, head_dim); reshape or convert it"
        )
    batch, num_heads, num_queries, head_dim = query.shape
    if views.parts and num_queries > views.num_tokens:
        raise LayoutError(
            f"{num_queries} query tokens over a cache of {views.num_tokens}: the queries are the "
            "newest tokens of the sequence; append their keys and values first"
        )
    for part in views.parts:
        num_kv_heads = part.key.shape[2]
        if part.batch_size != batch:
            raise LayoutError(
                f"query has batch {batch}, the views {part.batch_size}: must be equal; "
                "reorder or select the cache's rows first"
            )
        if part.key.shape[4] != head_dim or part.key.dtype != query.dtype:
            raise LayoutError(
                f"query has head_dim {head_dim} and {query.dtype}, the keys "
                f"{part.key.shape[4]} and {part.key.dtype}: must be equal; convert the query"
            )
        if num_heads % num_kv_heads:
            raise LayoutError(
                f"query has {num_heads} heads, the keys {num_kv_heads}: must be a multiple, each "
                "kv head serves a group of the same size; check the model's head counts"
            )
    for name, parts, device in (
        ("window", views.window, query.device),
        ("unpinned", views.unpinned, torch.device("cpu")),
    ):
        for part in parts:
            if part.key.device != device:
                raise LayoutError(
                    f"a {name} part lies on {part.key.device}: must lie on {device}, where it is "
                    "attended; move the query or the part"
                )


def _check_masks(
    query: Tensor, views: LayerViews, key_mask: Tensor | None, mask: Tensor | None
) -> None:
    batch, num_heads, num_queries, _ = query.shape
    num_tokens = views.num_tokens
    if key_mask is not None and (
        key_mask.dtype != torch.bool
        or key_mask.dim() != 2
        or key_mask.shape[0] != batch
        or key_mask.shape[1] < num_tokens
    ):
        raise LayoutError(
            f"key_mask {tuple(key_mask.shape)} of {key_mask.dtype}: must be bool, of shape "
            f"({batch}, at least {num_tokens}), True = visible; convert or extend it"
        )
    if mask is not None and (
        not (mask.dtype == torch.bool or mask.is_floating_point())
        or mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, num_heads)
        or mask.shape[2] != num_queries
        or mask.shape[3] < num_tokens
    ):
        raise LayoutError(
            f"mask {tuple(mask.shape)} of {mask.dtype}: must be bool or floating, of shape (1 or "
            f"{batch}, 1 or {num_heads}, {num_queries}, at least {num_tokens}); convert it"
        )
