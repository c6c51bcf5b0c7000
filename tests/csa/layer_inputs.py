"""Random inputs of DeepSeek-V4 layers, and caches small enough that a few tokens fill regions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepseek_v4_reference as reference
import torch
from torch import Tensor

import sparsekv.cache as cache_module
from sparsekv.csa.cache import CompressedCache
from sparsekv.csa.compressor import CompressorWeights
from sparsekv.csa.step import CompressorInput, IndexerInput, LayerInput, attend_compressed
from sparsekv.format import PartitionSpec
from sparsekv.format.compressed import CompressedGeometry
from sparsekv.roofline import ShareRouter

KINDS = ("csa", "hca", "sliding", "csa")
EPS, HEADS, DIM, INDEX_HEADS, INDEX_DIM, ROPE = 1e-6, 3, 8, 16, 6, 4
FREQUENCIES = torch.tensor([1.0, 0.1])


def geometry(**changes: Any) -> CompressedGeometry:
    fields: dict[str, Any] = {
        "layer_kinds": KINDS,
        "head_dim": DIM,
        "index_head_dim": INDEX_DIM,
        "sliding_window": 6,
        "hca_ratio": 8,
        "dtype": torch.float64,
    }
    return CompressedGeometry(**(fields | changes))


def build(
    geometry_: CompressedGeometry | None = None,
    share: float = 0.5,
    batch_size: int = 2,
    accelerator: Any = None,
    monkeypatch: Any = None,
    **changes: Any,
) -> CompressedCache:
    """A cache whose window is of 4 entries, in segments of 2."""
    geometry_ = geometry() if geometry_ is None else geometry_
    sizes: dict[str, Any] = {"block_size": 2, "window_size": 4, "segment_size": 2}
    sizes["ping_pong_tokens"] = 2 * changes.get("window_size", 4)
    spec = PartitionSpec(
        geometry=geometry_.pool_geometry,
        batch_size=batch_size,
        max_tokens=None,
        **(sizes | changes),
    )
    if accelerator is not None:
        monkeypatch.setattr(cache_module, "open_accelerator", lambda device: accelerator)
    cache = CompressedCache(geometry_, spec, "cpu", ShareRouter(share))
    if accelerator is not None:
        monkeypatch.undo()
    return cache


def weights(dim: int, ratio: int, width: int, seed: int) -> CompressorWeights:
    random = torch.Generator().manual_seed(seed)
    return CompressorWeights(
        position_bias=torch.randn(ratio, width, generator=random, dtype=torch.float64),
        norm_weight=1 + 0.1 * torch.randn(dim, generator=random, dtype=torch.float64),
        eps=EPS,
    )


def frequencies(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[None, :, None] * FREQUENCIES.double()
    return angles.cos(), angles.sin()


def layer_input(
    kind: str, num_tokens: int, batch_size: int = 2, topk: int = 3, seed: int = 0
) -> LayerInput:
    """All tokens of a layer at once."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch_size, *shape, generator=random, dtype=torch.float64)

    cos, sin = frequencies(torch.arange(num_tokens))
    new = LayerInput(
        query=draw(HEADS, num_tokens, DIM),
        kv=draw(num_tokens, DIM),
        cos=cos,
        sin=sin,
        sinks=torch.linspace(-1, 1, HEADS),
    )
    if kind == "sliding":
        return new
    ratio, width = (4, 2 * DIM) if kind == "csa" else (8, DIM)
    compressor = CompressorInput(
        kv=draw(num_tokens, width),
        gate=draw(num_tokens, width),
        weights=weights(DIM, ratio, width, seed=1),
    )
    new = replace(new, frequencies=frequencies, compressor=compressor)
    if kind == "hca":
        return new
    keys = CompressorInput(
        kv=draw(num_tokens, 2 * INDEX_DIM),
        gate=draw(num_tokens, 2 * INDEX_DIM),
        weights=weights(INDEX_DIM, ratio, 2 * INDEX_DIM, seed=2),
    )
    indexer = IndexerInput(
        compressor=keys,
        query=draw(INDEX_HEADS, num_tokens, INDEX_DIM),
        head_weights=draw(num_tokens, INDEX_HEADS),
        topk=topk,
    )
    return replace(new, indexer=indexer)


def part(new: LayerInput, start: int, stop: int) -> LayerInput:
    """Tokens `start` to `stop`."""

    def cut(given: CompressorInput) -> CompressorInput:
        return replace(given, kv=given.kv[:, start:stop], gate=given.gate[:, start:stop])

    changes: dict[str, Any] = {
        "query": new.query[:, :, start:stop],
        "kv": new.kv[:, start:stop],
        "cos": new.cos[:, start:stop],
        "sin": new.sin[:, start:stop],
    }
    if new.compressor is not None:
        changes["compressor"] = cut(new.compressor)
    if new.indexer is not None:
        changes["indexer"] = replace(
            new.indexer,
            compressor=cut(new.indexer.compressor),
            query=new.indexer.query[:, :, start:stop],
            head_weights=new.indexer.head_weights[:, start:stop],
        )
    return replace(new, **changes)


def rows(new: LayerInput, indices: list[int]) -> LayerInput:
    """The sequences `indices`."""

    def cut(given: CompressorInput) -> CompressorInput:
        return replace(given, kv=given.kv[indices], gate=given.gate[indices])

    changes: dict[str, Any] = {"query": new.query[indices], "kv": new.kv[indices]}
    if new.compressor is not None:
        changes["compressor"] = cut(new.compressor)
    if new.indexer is not None:
        changes["indexer"] = replace(
            new.indexer,
            compressor=cut(new.indexer.compressor),
            query=new.indexer.query[indices],
            head_weights=new.indexer.head_weights[indices],
        )
    return replace(new, **changes)


def expected(new: LayerInput, sliding_window: int = 6) -> tuple[Tensor, list[list[list[int]]]]:
    """(outputs (batch, heads, tokens, dim), entries each token of each row attends to)."""
    outputs, chosen = [], []
    for row in range(len(new.kv)):
        x = reference.Sequence(
            query=new.query[row].transpose(0, 1),
            kv=new.kv[row],
            sinks=new.sinks,
            angles=lambda positions: positions[:, None] * FREQUENCIES.double(),
            sliding_window=sliding_window,
            compressor=None if new.compressor is None else _compressor(new.compressor, row),
        )
        if new.indexer is not None:
            x.indexer = reference.Indexer(
                compressor=_compressor(new.indexer.compressor, row),
                query=new.indexer.query[row].transpose(0, 1),
                head_weights=new.indexer.head_weights[row],
                topk=new.indexer.topk,
            )
        out, entries = reference.attention(x)
        outputs.append(out.transpose(0, 1))
        chosen.append(entries)
    return torch.stack(outputs), chosen


def _compressor(given: CompressorInput, row: int) -> reference.Compressor:
    return reference.Compressor(
        kv=given.kv[row],
        gate=given.gate[row],
        position_bias=given.weights.position_bias,
        norm_weight=given.weights.norm_weight,
        eps=given.weights.eps,
    )


class Layers:
    """Inputs of all layers of a cache, and the outputs they should give."""

    def __init__(self, cache: CompressedCache, num_tokens: int, topk: int = 3, seed: int = 0):
        self.cache = cache
        kinds = cache.geometry.layer_kinds
        self.inputs = [
            layer_input(kind, num_tokens, cache.batch_size, topk, seed=seed + i)
            for i, kind in enumerate(kinds)
        ]
        window = cache.geometry.sliding_window
        self.expected = [expected(new, window)[0] for new in self.inputs]

    def run(self, start: int, stop: int, layers: Any = None) -> None:
        """Feed tokens `start` to `stop` to each layer, and check the outputs."""
        layers = range(len(self.inputs)) if layers is None else layers
        if 0 in layers:
            ids = torch.arange(start, stop).expand(self.cache.batch_size, -1)
            self.cache.record(ids)
        for layer_idx in layers:
            new = part(self.inputs[layer_idx], start, stop)
            out = attend_compressed(self.cache, layer_idx, new)
            wanted = self.expected[layer_idx][:, :, start:stop]
            torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)

    def replay(self, ids: Tensor) -> None:
        if ids.shape[1]:
            self.run(int(ids[0, 0]), int(ids[0, -1]) + 1)

    def select(self, indices: list[int]) -> None:
        """The same choice of rows on both sides."""
        self.cache.select_rows(torch.tensor(indices))
        self.inputs = [rows(new, indices) for new in self.inputs]
        self.expected = [out[indices] for out in self.expected]
