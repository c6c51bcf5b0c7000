"""One DeepSeek-V4 layer's attention in one step, in its plain synchronous form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekv.attention import merge_partials
from sparsekv.csa.attention import (
    Partial,
    compressed_attention,
    selected_attention,
    window_attention,
)
from sparsekv.csa.cache import CompressedCache
from sparsekv.csa.compressor import CompressorState, CompressorWeights
from sparsekv.csa.layer import LayerState
from sparsekv.kernels.dispatch import apply_rotary, lightning_indexer_for, pack_entries

Frequencies = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions (n,) -> their cosines and sines, each (1, n, rope_dim / 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorInput:
    """New tokens' projections for one compressor, and its parameters."""

    kv: Tensor
    """(batch, tokens, width)"""
    gate: Tensor
    """(batch, tokens, width)"""
    weights: CompressorWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerInput:
    """New tokens' queries to the lightning indexer, and its own compressor's input."""

    compressor: CompressorInput
    query: Tensor
    """(batch, index_heads, tokens, index_dim), not rotated"""
    head_weights: Tensor
    """(batch, tokens, index_heads), scaled by 1 / sqrt(index_heads)"""
    topk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What a layer's projections give for the new tokens."""

    query: Tensor
    """(batch, num_heads, tokens, head_dim), normed, not rotated"""
    kv: Tensor
    """(batch, tokens, head_dim) raw keys = values, normed, not rotated"""
    cos: Tensor
    """(batch or 1, tokens, rope_dim / 2) at the new tokens' positions"""
    sin: Tensor
    """Likewise"""
    sinks: Tensor
    """(num_heads,) floating"""
    frequencies: Frequencies | None = None
    """For CSA and HCA layers: those of compressed entries."""
    compressor: CompressorInput | None = None
    """For CSA and HCA layers."""
    indexer: IndexerInput | None = None
    """For CSA layers."""


def attend_compressed(cache: CompressedCache, layer_idx: int, new: LayerInput) -> Tensor:
    """Extend a layer by new tokens and attend to everything they see.

    The sink counts once, in the last merge; the rotation that values carry, since they are keys
    too, is undone once, after it (DeepSeek-V4 report, section 2.3).

    Returns:
        (batch, num_heads, tokens, head_dim) float32, or float64 for float64 input.
    Raises:
        CapacityError: entries found no memory; the layer is as before then.
    """
    with cache.layer_step(layer_idx):
        state, window = cache.states[layer_idx], cache.geometry.sliding_window
        query = apply_rotary(new.query, new.cos, new.sin)
        kv = apply_rotary(new.kv[:, None], new.cos, new.sin)[:, 0]
        recent = kv if state.recent is None else torch.cat([state.recent, kv], 1)
        scale = query.shape[3] ** -0.5
        parts = [window_attention(query, recent, window, scale)]
        after = replace(
            state,
            num_tokens=state.num_tokens + kv.shape[1],
            recent=recent[:, max(recent.shape[1] - window + 1, 0) :].clone(),
        )
        kind = cache.geometry.layer_kinds[layer_idx]
        if kind != "sliding":
            attend = _attend_hca if kind == "hca" else _attend_csa
            after, part = attend(cache, layer_idx, query, new, after)
            parts.append(part)
        out, _ = merge_partials(parts, new.sinks.to(parts[0][1].dtype))
        out = apply_rotary(out, new.cos, new.sin, inverse=True)
        cache.states[layer_idx] = after
    return out


def _attend_hca(
    cache: CompressedCache, layer_idx: int, query: Tensor, new: LayerInput, state: LayerState
) -> tuple[LayerState, Partial]:
    assert new.compressor is not None
    compressor, entries = _advance(state.compressor, new.compressor, new)
    stored = cache.buffer(layer_idx)
    stored.append(_unseen(entries, state.compressor, len(stored)))
    visible = _num_visible(state, new, cache.geometry.hca_ratio)
    part = compressed_attention(query, stored.entries, visible, query.shape[3] ** -0.5)
    return replace(state, compressor=compressor), part


def _attend_csa(
    cache: CompressedCache, layer_idx: int, query: Tensor, new: LayerInput, state: LayerState
) -> tuple[LayerState, Partial]:
    assert new.compressor is not None
    assert new.indexer is not None
    compressor, entries = _advance(state.compressor, new.compressor, new)
    indexer, keys = _advance(state.indexer, new.indexer.compressor, new)
    pool_idx, index_keys = cache.pool_idx(layer_idx), cache.buffer(layer_idx)
    index_keys.append(_unseen(keys, state.indexer, len(index_keys)))
    fresh = _unseen(entries, state.compressor, cache.num_entries(layer_idx))[:, None]  # [B,1,n,D]
    is_packed = cache.geometry.entry_format == "packed"
    fresh = pack_entries(fresh) if is_packed else fresh.to(cache.geometry.dtype)
    cache.entries.append(pool_idx, fresh)
    index_query = apply_rotary(new.indexer.query, new.cos, new.sin).transpose(1, 2)
    indices = lightning_indexer_for(query.device)(
        index_query,
        index_keys.entries,
        new.indexer.head_weights,
        _num_visible(state, new, cache.geometry.csa_ratio)[None],
        new.indexer.topk,
        index_query.shape[3] ** -0.5,
    )
    views, scale = cache.entries.views(pool_idx), query.shape[3] ** -0.5
    part = selected_attention(query, views, indices, scale, cache.entries.accelerator)
    cache.entries.flush(pool_idx)
    cache.entries.register_ahead(pool_idx)
    return replace(state, compressor=compressor, indexer=indexer), part


def _advance(
    state: CompressorState, given: CompressorInput, new: LayerInput
) -> tuple[CompressorState, Tensor]:
    """Compress the windows that close; each entry is rotated to its window's first token."""
    assert new.frequencies is not None
    after, entries = state.advance(given.kv, given.gate, given.weights)
    windows = torch.arange(state.num_entries, after.num_entries, device=entries.device)
    cos, sin = new.frequencies(windows * given.weights.ratio)
    return after, apply_rotary(entries[:, None], cos, sin)[:, 0]


def _unseen(entries: Tensor, state: CompressorState, num_stored: int) -> Tensor:
    """The entries that are not stored yet: while tokens are read again, those before are."""
    return entries[:, max(num_stored - state.num_entries, 0) :]


def _num_visible(state: LayerState, new: LayerInput, ratio: int) -> Tensor:
    """(tokens,) entries that each new token sees: windows closed by it or before it."""
    first = state.num_tokens - new.kv.shape[1]
    return (torch.arange(first, state.num_tokens, device=new.kv.device) + 1) // ratio
