"""Saving and loading a DeepSeek-V4 cache: the pool of entries as any cache, and in the same file
all that the accelerator keeps (FORMAT.md, "A saved DeepSeek-V4 cache").
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsekv.archive import Extra, load_cache, load_extra, save_cache
from sparsekv.csa.compressor import CompressorState
from sparsekv.csa.layer import LayerState
from sparsekv.errors import FormatError

if TYPE_CHECKING:
    from sparsekv.csa.cache import CompressedCache

KIND = "deepseek-v4"


def save_compressed(cache: CompressedCache, path: Path) -> None:
    """Write a cache that is between steps; see `save_cache`."""
    cache.check_complete()
    tensors = {"token_ids": cache.token_ids}
    for layer_idx, state in enumerate(cache.states):
        if state.recent is not None:
            tensors[f"{layer_idx}.recent"] = state.recent
        for name in ("compressor", "indexer"):
            for field, tensor in getattr(state, name).tensors().items():
                tensors[f"{layer_idx}.{name}.{field}"] = tensor
        if cache.geometry.layer_kinds[layer_idx] != "sliding":
            tensors[f"{layer_idx}.buffer"] = cache.buffer(layer_idx).entries
    header = {"geometry": _plain_geometry(cache), "num_tokens": cache.num_tokens}
    save_cache(cache.entries, path, Extra(kind=KIND, header=header, tensors=tensors))


def load_compressed(cache: CompressedCache, path: Path) -> None:
    """Replace a cache's content by a saved one's; everything is checked before anything changes.

    Raises:
        FormatError, CapacityError: as `load_cache`.
    """
    extra = load_extra(path, KIND)
    num_tokens = extra.header.get("num_tokens")
    if extra.header.get("geometry") != _plain_geometry(cache) or not isinstance(num_tokens, int):
        raise FormatError(
            f"{path}: saved with {extra.header.get('geometry')}, this cache has "
            f"{_plain_geometry(cache)}; load it into a cache built alike"
        )
    ids = extra.tensors.get("token_ids")
    if ids is None or ids.dtype != torch.int64 or ids.ndim != 2 or ids.shape[1] != num_tokens:
        raise FormatError(f"{path}: its token ids do not fit its header; save the cache again")
    expected = _expected_shapes(cache, ids.shape[0], num_tokens)
    found = {name: tuple(tensor.shape) for name, tensor in extra.tensors.items()}
    if found != expected:
        names = found.keys() | expected.keys()
        wrong = min(name for name in names if found.get(name) != expected.get(name))
        raise FormatError(f"{path}: extra.{wrong} does not fit its header; save the cache again")
    tensors = {name: tensor.to(cache.device) for name, tensor in extra.tensors.items()}
    states = [
        _state(tensors, layer_idx, num_tokens, cache.geometry.ratio_of(kind))
        for layer_idx, kind in enumerate(cache.geometry.layer_kinds)
    ]
    buffers = {}
    for layer_idx in cache.layers_with_buffers:
        buffers[layer_idx] = cache.new_buffer(layer_idx, ids.shape[0])
        buffers[layer_idx].append(tensors[f"{layer_idx}.buffer"])
    load_cache(cache.entries, path, KIND)
    cache.adopt(states, buffers, ids)


def _plain_geometry(cache: CompressedCache) -> dict[str, Any]:
    """The geometry as JSON gives it back."""
    plain = asdict(cache.geometry)
    return plain | {
        "layer_kinds": list(cache.geometry.layer_kinds),
        "dtype": str(cache.geometry.dtype).removeprefix("torch."),
    }


def _expected_shapes(
    cache: CompressedCache, batch_size: int, num_tokens: int
) -> dict[str, tuple[int, ...]]:
    """The shape of every extra tensor of a cache that has read `num_tokens` tokens."""
    geometry = cache.geometry
    shapes: dict[str, tuple[int, ...]] = {"token_ids": (batch_size, num_tokens)}
    for layer_idx, kind in enumerate(geometry.layer_kinds):
        if kind != "sliding":
            dim = geometry.head_dim if kind == "hca" else geometry.index_head_dim
            entries = num_tokens // geometry.ratio_of(kind)
            shapes[f"{layer_idx}.buffer"] = (batch_size, entries, dim)
        if num_tokens == 0:
            continue
        recent = min(num_tokens, geometry.sliding_window - 1)
        shapes[f"{layer_idx}.recent"] = (batch_size, recent, geometry.head_dim)
        compressors = {"sliding": (), "hca": ("compressor",), "csa": ("compressor", "indexer")}
        for name in compressors[kind]:
            dim = geometry.index_head_dim if name == "indexer" else geometry.head_dim
            of_one = _compressor_shapes(kind, geometry.ratio_of(kind), dim, batch_size, num_tokens)
            shapes |= {f"{layer_idx}.{name}.{field}": shape for field, shape in of_one.items()}
    return shapes


def _compressor_shapes(
    kind: str, ratio: int, dim: int, batch_size: int, num_tokens: int
) -> dict[str, tuple[int, ...]]:
    open_shape = (batch_size, num_tokens % ratio, 2 * dim if kind == "csa" else dim)
    shapes: dict[str, tuple[int, ...]] = {"open_kv": open_shape, "open_gate": open_shape}
    if kind == "csa" and num_tokens >= ratio:
        shapes |= {"prior_kv": (batch_size, ratio, dim), "prior_gate": (batch_size, ratio, dim)}
    return shapes


def _state(tensors: dict[str, Tensor], layer_idx: int, num_tokens: int, ratio: int) -> LayerState:
    num_entries = num_tokens // ratio if ratio else 0

    def compressor(name: str) -> CompressorState:
        prefix = f"{layer_idx}.{name}."
        found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        return CompressorState(**found, num_entries=num_entries)

    return LayerState(
        num_tokens=num_tokens,
        recent=tensors.get(f"{layer_idx}.recent"),
        compressor=compressor("compressor"),
        indexer=compressor("indexer"),
    )
