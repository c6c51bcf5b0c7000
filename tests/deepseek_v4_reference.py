"""DeepSeek-V4's attention by definition, in float64: one sequence, one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Compressor:
    """Projections (tokens, width), and parameters."""

    kv: Tensor
    gate: Tensor
    position_bias: Tensor
    norm_weight: Tensor
    eps: float


@dataclass(kw_only=True)
class Indexer:
    """Of the lightning indexer: query (tokens, heads, dim), head_weights (tokens, heads)."""

    compressor: Compressor
    query: Tensor
    head_weights: Tensor
    topk: int


@dataclass(kw_only=True)
class Sequence:
    """All tokens of a sequence: query (tokens, heads, dim), kv (tokens, dim), not rotated."""

    query: Tensor
    kv: Tensor
    sinks: Tensor
    angles: Callable[[Tensor], Tensor]
    """Positions (n,) -> angles (n, rope_dim / 2)."""
    sliding_window: int
    compressor: Compressor | None = None
    indexer: Indexer | None = None
    stored: Callable[[Tensor], Tensor] = lambda entries: entries
    """What storing does to entries."""


def attention(x: Sequence) -> tuple[Tensor, list[list[int]]]:
    """(output (tokens, heads, dim) in float64, the entries that each token attends to)."""
    num_tokens = len(x.kv)
    angles = x.angles(torch.arange(num_tokens)).double()
    query, kv = rotated(x.query.double(), angles[:, None]), rotated(x.kv.double(), angles)
    entries = kv[:0] if x.compressor is None else x.stored(compressed(x.compressor, x.angles))
    scores = None if x.indexer is None else _scores(x.indexer, x.angles, angles)
    outputs, chosen = [], []
    for t in range(num_tokens):
        visible = 0 if x.compressor is None else (t + 1) // len(x.compressor.position_bias)
        selected = list(range(visible))
        if scores is not None and x.indexer is not None:
            row = scores[t].tolist()
            best = sorted((-row[i], i) for i in selected)[: x.indexer.topk]
            selected = sorted(i for _, i in best)
        keys = torch.cat([kv[max(t - x.sliding_window + 1, 0) : t + 1], entries[selected]])
        logits = query[t] @ keys.T * query.shape[-1] ** -0.5
        logits = torch.cat([logits, x.sinks.double()[:, None]], 1)
        outputs.append(torch.softmax(logits, 1)[:, :-1] @ keys)
        chosen.append(selected)
    return rotated(torch.stack(outputs), -angles[:, None]), chosen


def compressed(x: Compressor, angles: Callable[[Tensor], Tensor]) -> Tensor:
    """All entries (tokens // ratio, dim) of the whole windows."""
    (ratio, width), dim = x.position_bias.shape, len(x.norm_weight)
    kv, gate, bias = x.kv.double(), x.gate.double(), x.position_bias.double()
    entries = []
    for start in range(0, len(kv) // ratio * ratio, ratio):
        window = slice(start, start + ratio)
        values, logits = kv[window, width - dim :], (gate[window] + bias)[:, width - dim :]
        if width == 2 * dim and start:
            prior = slice(start - ratio, start)
            values = torch.cat([kv[prior, :dim], values])
            logits = torch.cat([(gate[prior] + bias)[:, :dim], logits])
        pooled = (torch.softmax(logits, 0) * values).sum(0)
        normed = pooled / (pooled.square().mean() + x.eps).sqrt() * x.norm_weight.double()
        entries.append(rotated(normed, angles(torch.tensor([start])).double()[0]))
    return torch.stack(entries) if entries else kv.new_zeros(0, dim)


def _scores(x: Indexer, angles: Callable[[Tensor], Tensor], query_angles: Tensor) -> Tensor:
    keys, query = compressed(x.compressor, angles), rotated(x.query.double(), query_angles[:, None])
    products = torch.einsum("thd,nd->thn", query, keys).relu()
    scores = torch.einsum("th,thn->tn", x.head_weights.double(), products)
    return scores * query.shape[-1] ** -0.5


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the last pairs (2 k, 2 k + 1) of x by the angles (..., rope_dim / 2)."""
    rope_dim = 2 * angles.shape[-1]
    pairs = torch.view_as_complex(x[..., -rope_dim:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([x[..., :-rope_dim], turned], -1)
