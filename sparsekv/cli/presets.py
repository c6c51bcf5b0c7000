"""Geometries of well-known models, so that a plan needs neither network nor files."""

from __future__ import annotations

import torch

from sparsekv.cli.errors import CommandLineError
from sparsekv.format import KVGeometry
from sparsekv.format.compressed import CompressedGeometry, EntryFormat, LayerKind

# num_layers, num_kv_heads, head_dim, head_dim_v, shared_kv; from the models' published
# configurations.
_PRESETS: dict[str, tuple[int, int, int, int, bool]] = {
    "qwen3-30b-a3b": (48, 4, 128, 128, False),
    "mixtral-8x7b": (32, 8, 128, 128, False),
    # Caches the 512 latent values that also serve as V, and 64 rotary ones.
    "deepseek-v2-lite": (27, 1, 576, 512, True),
    "smollm2": (30, 3, 64, 64, False),
}

# The kinds of DeepSeek-V4's layers; all other sizes are the defaults of CompressedGeometry.
_LAYER_KINDS: dict[str, tuple[LayerKind, ...]] = {
    "deepseek-v4-flash": ("sliding", "sliding", *("csa", "hca") * 20, "csa"),
    "deepseek-v4-pro": ("hca", "hca", *("csa", "hca") * 29, "csa"),
}


def preset_names() -> tuple[str, ...]:
    """Names `preset_geometry` knows."""
    return (*_PRESETS, *_LAYER_KINDS)


def preset_geometry(
    name: str, dtype: torch.dtype, entry_format: EntryFormat
) -> KVGeometry | CompressedGeometry:
    """What a well-known model stores; the entry format is DeepSeek-V4's alone.

    Raises:
        CommandLineError: an unknown name.
    """
    if name.lower() not in preset_names():
        raise CommandLineError(
            f"{name}: neither a file or folder here nor a known model; known are "
            f"{', '.join(preset_names())}; or give a model folder or its config.json"
        )
    if kinds := _LAYER_KINDS.get(name.lower()):
        return CompressedGeometry(layer_kinds=kinds, dtype=dtype, entry_format=entry_format)
    num_layers, num_kv_heads, head_dim, head_dim_v, shared_kv = _PRESETS[name.lower()]
    return KVGeometry(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        shared_kv=shared_kv,
    )
