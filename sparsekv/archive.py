"""Saved caches: one safetensors file with a versioned header (FORMAT.md, "A saved cache").

Segments are written as they lie, physical rows and row tables included, so saving copies nothing
and a loaded cache has every segment in the region it came from.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsekv.device import SimulatedAccelerator
from sparsekv.errors import CacheStateError, CapacityError, FormatError
from sparsekv.format import KVGeometry, Placement, SegmentPlace
from sparsekv.regions import Window

if TYPE_CHECKING:
    from sparsekv.cache import InplaceKVCache

FORMAT_NAME = "sparsekv-cache"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What a cache keeps besides its regions, saved in the same file."""

    kind: str
    """Whose it is; files of another kind are refused."""
    header: dict[str, Any]
    """Plain values, for JSON."""
    tensors: dict[str, Tensor]
    """By name; in the file each is called `extra.` and its name."""


NO_EXTRA = Extra(kind="kv", header={}, tensors={})


def save_cache(cache: InplaceKVCache, path: Path, extra: Extra = NO_EXTRA) -> None:
    """Write a cache that is between steps. The file appears at `path` whole, or not at all.

    Raises:
        CacheStateError: layers hold different numbers of tokens.
        OSError: the file cannot be written.
    """
    if not cache.is_complete:
        raise CacheStateError(cache._incomplete_message())
    for layer_idx in range(len(cache._layers)):
        cache.flush(layer_idx)
    cache.settle()
    metadata = {
        "format": FORMAT_NAME,
        "version": str(FORMAT_VERSION),
        "header": json.dumps({**_header(cache), "kind": extra.kind, "extra": extra.header}),
    }
    tensors = _tensors(cache)
    tensors |= {f"extra.{name}": t.cpu().contiguous() for name, t in extra.tensors.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error
    finally:
        partial.unlink(missing_ok=True)


def load_extra(path: Path, kind: str) -> Extra:
    """What a saved cache keeps besides its regions; the tensors are on the CPU.

    Raises:
        FormatError: as `load_cache`, or a file of another kind.
    """
    header = read_header(path)
    _check_kind(header, kind, path)
    with _open(path) as file:
        names = [name for name in file.keys() if name.startswith("extra.")]  # noqa: SIM118
        tensors = {name.removeprefix("extra."): file.get_tensor(name) for name in names}
    return Extra(kind=kind, header=header["extra"], tensors=tensors)


def load_cache(cache: InplaceKVCache, path: Path, kind: str = NO_EXTRA.kind) -> None:
    """Replace a cache's content by a saved one's. Everything is checked, and read into new regions,
    before the swap.
    """
    header = read_header(path)
    _check_kind(header, kind, path)
    _check_header(cache, header, path)
    num_rows = header["segment_rows"]
    placement = Placement(header["batch_size"])
    placement.places = [
        SegmentPlace(region, rows, error)
        for region, rows, error in zip(
            header["regions"], num_rows, header["router_errors"], strict=True
        )
    ]
    per_row = cache.spec.segment_bytes // cache.spec.batch_size
    fill = header["num_tokens"] - len(num_rows) * cache.spec.segment_tokens
    with _open(path) as file:
        tables = file.get_tensor("row_tables")
        _check_row_tables(tables, header, path)
        placement.set_row_tables(tables)
        cache._check_memory(sum(num_rows) * per_row * len(cache._layers), f"loading {path}")
        layers, windows = cache._new_layers(), cache._new_windows(header["batch_size"])
        for layer_idx, (layer, window) in enumerate(zip(layers, windows, strict=True)):
            for region, stack in layer.stacks.items():
                for name in _pieces(file, layer_idx, region):
                    piece = file.get_tensor(name)
                    stack.push(len(piece), piece.shape[1])
                    for i, segment in enumerate(piece):
                        stack.segment(len(stack) - len(piece) + i).copy_(segment)
            window.elements.copy_(file.get_tensor(f"layers.{layer_idx}.window"))
            layer.progress = type(layer.progress)(len(num_rows), fill)
    cache.settle()
    cache.router.error = header["router_error"]
    cache._placement, cache._windows, cache._layers = placement, windows, layers


def read_header(path: Path) -> dict[str, Any]:
    """The header of a saved cache, which the tensors in the file bear out.

    Raises:
        FormatError: no such file, truncated, not a saved cache, a newer version, or one that
            contradicts itself.
    """
    with _open(path) as file:
        header = _parsed_header(file.metadata() or {}, path)
        _check_tensors(file, header, path)
    return header


def _parsed_header(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if metadata.get("format") != FORMAT_NAME:
        raise FormatError(
            f"{path}: a safetensors file, but not a saved cache; save one with cache.save(path)"
        )
    version = metadata.get("version", "")
    if not version.isdigit() or not 1 <= int(version) <= FORMAT_VERSION:
        raise FormatError(
            f"{path}: format version {version!r}, this sparsekv reads versions 1 to "
            f"{FORMAT_VERSION}; upgrade sparsekv"
        )
    try:
        header = json.loads(metadata["header"])
        missing = set(_HEADER_KEYS) - set(header)
    except (KeyError, ValueError, TypeError):
        raise FormatError(f"{path}: its header cannot be read; save the cache again") from None
    if missing:
        raise FormatError(
            f"{path}: its header lacks {', '.join(sorted(missing))}; save the cache again"
        )
    if not _is_consistent(header):
        raise FormatError(f"{path}: its header contradicts itself; save the cache again")
    return dict(header)


_HEADER_KEYS = (
    "kind",
    "extra",
    "geometry",
    "window_size",
    "segment_size",
    "batch_size",
    "num_tokens",
    "regions",
    "segment_rows",
    "router_errors",
    "router_error",
)


def _geometry_of(header: dict[str, Any], path: Path) -> KVGeometry:
    """The geometry that a saved cache was made for."""
    try:
        fields = dict(header["geometry"])
        fields["dtype"] = getattr(torch, fields["dtype"])
        return KVGeometry(**fields)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise FormatError(
            f"{path}: its geometry cannot be read ({error}); save the cache again"
        ) from None


def _header(cache: InplaceKVCache) -> dict[str, Any]:
    geometry, places = cache.spec.geometry, cache._placement.places
    return {
        "geometry": {
            "num_layers": geometry.num_layers,
            "num_kv_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "head_dim_v": geometry.head_dim_v,
            "dtype": str(geometry.dtype).removeprefix("torch."),
            "shared_kv": geometry.shared_kv,
        },
        "window_size": cache.spec.window_size,
        "segment_size": cache.spec.segment_tokens,
        "batch_size": cache.batch_size,
        "num_tokens": cache.num_tokens,
        "regions": [place.region for place in places],
        "segment_rows": [place.num_rows for place in places],
        "router_errors": [place.router_error for place in places],
        "router_error": cache.router.error,
    }


def _tensors(cache: InplaceKVCache) -> dict[str, Tensor]:
    tensors = {"row_tables": cache._placement.all_row_tables()}
    for layer_idx, (layer, window) in enumerate(zip(cache._layers, cache._windows, strict=True)):
        # A copy: behind the newest token lies whatever was there before.
        saved = Window(SimulatedAccelerator(), cache.spec, cache.batch_size)
        saved.elements.zero_()
        for first, key, value in window.pieces(layer.progress.fill):
            for i, (k, v) in enumerate(zip(key, value, strict=True)):
                start = first + i * cache.spec.segment_tokens
                saved.write(start, k, None if cache.spec.geometry.shared_kv else v)
        tensors[f"layers.{layer_idx}.window"] = saved.elements
        for region, stack in layer.stacks.items():
            for i, run in enumerate(stack.runs()):
                tensors[f"layers.{layer_idx}.{region}.{i}"] = run.contiguous()
    return tensors


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except FileNotFoundError:
        raise FormatError(
            f"{path}: no such file; save a cache there first with cache.save(path)"
        ) from None
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{path}: not a whole safetensors file ({error}); save the cache again"
        ) from None


def _check_kind(header: dict[str, Any], kind: str, path: Path) -> None:
    if header["kind"] != kind:
        raise FormatError(
            f"{path}: a saved cache of kind {header['kind']!r}, this one is of kind {kind!r}; load "
            "it into a cache of the model it was saved from"
        )


def _check_header(cache: InplaceKVCache, header: dict[str, Any], path: Path) -> None:
    spec = cache.spec
    for name, saved, own in (
        ("geometry", _geometry_of(header, path), spec.geometry),
        ("window_size", header["window_size"], spec.window_size),
        ("segment_size", header["segment_size"], spec.segment_tokens),
    ):
        if saved != own:
            raise FormatError(
                f"{path}: saved with {name}={saved}, this cache has {own}; load it into a cache "
                "built alike"
            )
    if spec.max_tokens is not None and header["num_tokens"] > spec.max_tokens:
        raise CapacityError(
            f"{path}: holds {header['num_tokens']} tokens, over max_tokens={spec.max_tokens}; "
            "raise max_tokens"
        )


def _is_consistent(header: dict[str, Any]) -> bool:
    """Whether counts are counts, the lists are equally long, segments fill windows, and tokens
    segments.
    """
    regions, rows, errors = (header[name] for name in ("regions", "segment_rows", "router_errors"))
    num_tokens, window_size, segment_size = (
        header[name] for name in ("num_tokens", "window_size", "segment_size")
    )
    counts = window_size, segment_size, header["batch_size"]
    try:
        return (
            len(regions) == len(rows) == len(errors)
            and all(type(count) is int for count in (num_tokens, *counts, *rows))
            and min([*counts, *rows]) >= 1
            and window_size % segment_size == 0
            and 0 <= num_tokens - len(regions) * segment_size <= window_size
            and set(regions) <= {"unpinned", "pinned"}
            and all(abs(error) <= 1 for error in (*errors, header["router_error"]))
        )
    except TypeError:
        return False


def _check_row_tables(tables: Tensor, header: dict[str, Any], path: Path) -> None:
    """Every logical row of every segment is a row that was written."""
    rows = torch.tensor(header["segment_rows"], dtype=torch.int64)[:, None]
    if (
        tables.dtype != torch.int64
        or tables.shape != (len(rows), header["batch_size"])
        or not ((tables >= 0) & (tables < rows)).all()
    ):
        raise FormatError(
            f"{path}: row_tables of shape {tuple(tables.shape)} do not fit its header; save the "
            "cache again"
        )


def _pieces(file: Any, layer_idx: int, region: str) -> list[str]:
    prefix = f"layers.{layer_idx}.{region}."
    names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dict)
    return sorted(names, key=lambda name: (len(name), name))


def _check_tensors(file: Any, header: dict[str, Any], path: Path) -> None:
    """Every tensor that the header promises is there, in its shape and dtype."""
    geometry = _geometry_of(header, path)
    row = [geometry.num_kv_heads, header["segment_size"] * geometry.elements_per_token]
    dtype = torch.empty(0, dtype=geometry.dtype)
    names = set(file.keys())

    def check(name: str, shape: list[int] | None) -> list[int]:
        if name not in names:
            raise FormatError(f"{path}: lacks the tensor {name}; save the cache again")
        part = file.get_slice(name)
        found = list(part.get_shape())
        runs = len(found) == 4 and found[2:] == row and min(found) >= 1
        if not (runs if shape is None else found == shape):
            raise FormatError(
                f"{path}: {name} has shape {found}, which its header does not describe; save the "
                "cache again"
            )
        if part[:0].dtype != dtype.dtype:
            raise FormatError(f"{path}: {name} is not {geometry.dtype}; save the cache again")
        return found

    if "row_tables" not in names:
        raise FormatError(f"{path}: lacks the tensor row_tables; save the cache again")
    for layer_idx in range(geometry.num_layers):
        in_window = header["window_size"] // header["segment_size"]
        check(f"layers.{layer_idx}.window", [in_window, header["batch_size"], *row])
        for region in ("unpinned", "pinned"):
            places = zip(header["regions"], header["segment_rows"], strict=True)
            expected = [rows for name, rows in places if name == region]
            found: list[int] = []
            for name in _pieces(file, layer_idx, region):
                shape = check(name, None)
                found += [shape[1]] * shape[0]
            if found != expected:
                raise FormatError(
                    f"{path}: layer {layer_idx} lacks segments of its {region} region; save the "
                    "cache again"
                )
