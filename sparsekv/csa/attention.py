"""The three kinds of attention in a DeepSeek-V4 layer, each as (out, lse) without the sink.

Scores are exact; every part is float32 (float64 for float64 input), natural log. The parts of one
layer are merged once, with the sink, by `merge_partials`; the inverse rotation comes after that.

Letters: B batch, H query heads, T query tokens, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsekv.attention import merge_partials
from sparsekv.csa.residence import entries_at, gather, slots
from sparsekv.device import Accelerator
from sparsekv.format import KVView, LayerViews
from sparsekv.kernels.dispatch import (
    gathered_attention_for,
    partial_attention_for,
    unpack_entries,
)

Partial = tuple[Tensor, Tensor]

_TOKENS_AT_ONCE = 256
"""Query tokens of a prefill attended at a time: bounds masks."""
_GATHERED_BYTES = 64 * 2**20
"""Fewer at a time if their gathered entries would take more; one at least."""


def window_attention(query: Tensor, recent: Tensor, sliding_window: int, scale: float) -> Partial:
    """Attention to the last `sliding_window` raw tokens, each query's own included.

    Args:
        query: (batch, num_heads, tokens, dim), the newest tokens.
        recent: (batch, past + tokens, dim) keys = values of the last `past` (at most sliding_window
            - 1) tokens and the new ones.
    """
    past = recent.shape[1] - query.shape[2]
    parts = []
    for start, stop in _runs(query.shape[2]):
        first = max(past + start - sliding_window + 1, 0)
        keys = recent[:, first : past + stop]
        distance = _distances(past + start - first, stop - start, keys.shape[1], query.device)
        mask = ((distance >= 0) & (distance < sliding_window))[None, None]
        parts.append(_attend(query[:, :, start:stop], keys, scale, mask))
    return _joined(parts)


def compressed_attention(
    query: Tensor, entries: Tensor, num_visible: Tensor, scale: float
) -> Partial:
    """Attention to every visible compressed entry (HCA).

    Args:
        query: (batch, num_heads, tokens, dim).
        entries: (batch, num_entries, dim).
        num_visible: (tokens,) int64 on the query's device: token t sees entries 0 to num_visible[t]
            - 1.
    """
    ids = torch.arange(entries.shape[1], device=query.device)
    parts = []
    for start, stop in _runs(query.shape[2]):
        mask = (ids[None, :] < num_visible[start:stop, None])[None, None]
        parts.append(_attend(query[:, :, start:stop], entries, scale, mask))
    return _joined(parts)


def selected_attention(
    query: Tensor, views: LayerViews, indices: Tensor, scale: float, accelerator: Accelerator
) -> Partial:
    """Attention to selected entries (CSA), each attended where it lives.

    Unpinned entries are gathered and attended by the CPU; pinned ones are gathered and copied to
    the accelerator, which attends to them and to those in the window. Only selected entries are
    ever touched.

    Args:
        query: (batch, num_heads, tokens, dim).
        views: the pool's views of this layer: entries (N, rows, 1, S, dim), or packed bytes.
        indices: (batch, tokens, k) int64 positions on the query's device, no duplicates; -1 =
            absent.
    """
    chosen = indices.cpu()  # where views keep their positions and row tables
    per_token = query[:, 0, 0].numel() * query.element_size() * max(chosen.shape[2], 1)
    parts = []
    for start, stop in _runs(query.shape[2], _GATHERED_BYTES // per_token):
        run, run_query = chosen[:, start:stop], query[:, :, start:stop]
        found = [
            *_attend_on_cpu(run_query, views.unpinned, run, scale),
            *_attend_gathered(run_query, _loaded(views.pinned, run, accelerator), scale),
            *_attend_gathered(run_query, _gathered(views.window, run), scale),
        ]
        parts.append(merge_partials(found or [_nothing(run_query)]))
    return _joined(parts)


def _gathered(views: tuple[KVView, ...], indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(entries, is_valid) of each view that holds any of the selected entries."""
    for view in views:
        if (found := gather(view, indices)) is not None:
            yield found


def _loaded(
    views: tuple[KVView, ...], indices: Tensor, accelerator: Accelerator
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same from host memory: each selected entry is copied to the accelerator once."""
    for view in views:
        if (found := slots(view, indices)) is None:
            continue
        slot, is_valid = found
        unique, place = torch.unique(slot[is_valid], return_inverse=True)
        host = entries_at(view, unique)
        entries = accelerator.empty(host.shape, host.dtype)
        accelerator.copy_from_host(entries, host)
        places = slot.masked_scatter(is_valid, place).to(accelerator.device)
        yield entries[places], is_valid.to(accelerator.device)


def _attend_on_cpu(
    query: Tensor, views: tuple[KVView, ...], indices: Tensor, scale: float
) -> Iterator[Partial]:
    for out, lse in _attend_gathered(query.cpu(), _gathered(views, indices), scale):
        yield out.to(query.device), lse.to(query.device)


def _attend_gathered(
    query: Tensor, gathered: Iterator[tuple[Tensor, Tensor]], scale: float
) -> Iterator[Partial]:
    for entries, is_valid in gathered:
        yield gathered_attention_for(query.device)(query, decoded(entries), is_valid, scale)


def decoded(entries: Tensor) -> Tensor:
    """Entries as numbers: packed bytes are unpacked, exactly."""
    return unpack_entries(entries) if entries.dtype == torch.uint8 else entries


def _attend(query: Tensor, keys: Tensor, scale: float, mask: Tensor) -> Partial:
    key = keys[None, :, None]  # [1, B, 1, S, D]
    positions = torch.zeros(1, dtype=torch.int64)
    return partial_attention_for(query.device)(query, key, key, positions, scale, mask=mask)


def _runs(num_tokens: int, most: int = _TOKENS_AT_ONCE) -> Iterator[tuple[int, int]]:
    at_once = max(min(most, _TOKENS_AT_ONCE), 1)
    for start in range(0, num_tokens, at_once):
        yield start, min(start + at_once, num_tokens)


def _joined(parts: list[Partial]) -> Partial:
    """Consecutive query tokens, put together."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _nothing(query: Tensor) -> Partial:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(query, dtype=dtype)
    return out, out.new_full(out.shape[:-1], -torch.inf)


def _distances(query_start: int, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """(num_queries, num_keys): how far each key lies before each query."""
    queries = torch.arange(query_start, query_start + num_queries, device=device)
    return queries[:, None] - torch.arange(num_keys, device=device)[None, :]
