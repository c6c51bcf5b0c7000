"""Sizes of well-known models, so that a plan needs neither network nor files."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparsekv.engine.model_size import ModelSize, WeightCounts
from sparsekv.errors import UnsupportedModelError
from sparsekv.format import KVGeometry
from sparsekv.format.compressed import CompressedGeometry, EntryFormat

# From the models' published configurations; parameters as transformers makes them of these.
_KNOWN: dict[str, ModelSize] = {
    size.name: size
    for size in (
        ModelSize(
            name="qwen3-30b-a3b",
            geometry=KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128),
            num_heads=32,
            num_experts=128,
            experts_per_token=8,
            weights=WeightCounts(
                attention=905_981_952,
                experts=28_991_029_248,
                feed_forward=12_582_912,
                embedding=311_164_928,
                head=311_164_928,
                other=198_656,
            ),
        ),
        ModelSize(
            name="mixtral-8x7b",
            geometry=KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128),
            num_heads=32,
            num_experts=8,
            experts_per_token=2,
            weights=WeightCounts(
                attention=1_342_177_280,
                experts=45_097_156_608,
                feed_forward=1_048_576,
                embedding=131_072_000,
                head=131_072_000,
                other=266_240,
            ),
        ),
        ModelSize(
            name="deepseek-v2-lite",
            # Caches the 512 latent values that also serve as V, and 64 rotary ones.
            geometry=KVGeometry(
                num_layers=27, num_kv_heads=1, head_dim=576, head_dim_v=512, shared_kv=True
            ),
            num_heads=16,
            num_experts=64,
            experts_per_token=6,
            weights=WeightCounts(
                attention=371_602_944,
                experts=14_394_851_328,
                feed_forward=520_486_912,
                embedding=209_715_200,
                head=209_715_200,
                other=112_640,
            ),
        ),
        ModelSize(
            name="smollm2",
            geometry=KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64),
            num_heads=9,
            weights=WeightCounts(
                attention=26_542_080,
                experts=0,
                feed_forward=79_626_240,
                embedding=28_311_552,
                head=0,
                other=35_136,
            ),
        ),
        ModelSize(
            name="deepseek-v4-flash",
            geometry=CompressedGeometry(
                layer_kinds=("sliding", "sliding", *("csa", "hca") * 20, "csa")
            ),
            num_heads=64,
            num_experts=256,
            experts_per_token=6,
            selected_entries=512,
            weights=WeightCounts(
                attention=5_086_317_888,
                experts=277_025_390_592,
                feed_forward=1_127_219_200,
                embedding=529_530_880,
                head=529_530_880,
                other=34_240_791,
            ),
        ),
        ModelSize(
            name="deepseek-v4-pro",
            geometry=CompressedGeometry(layer_kinds=("hca", "hca", *("csa", "hca") * 29, "csa")),
            num_heads=128,
            num_experts=384,
            experts_per_token=6,
            selected_entries=1024,
            weights=WeightCounts(
                attention=19_465_103_232,
                experts=1_547_396_186_112,
                feed_forward=4_197_580_800,
                embedding=926_679_040,
                head=926_679_040,
                other=84_951_267,
            ),
        ),
    )
}


def known_names() -> tuple[str, ...]:
    """Names `known_size` knows."""
    return tuple(_KNOWN)


def known_size(name: str, dtype: torch.dtype, entry_format: EntryFormat) -> ModelSize:
    """The size of a well-known model with weights and cache in `dtype`; the entry format is
    DeepSeek-V4's alone, and not looked at for others.

    Raises:
        UnsupportedModelError: an unknown name.
    """
    size = _KNOWN.get(name.lower())
    if size is None:
        raise UnsupportedModelError(
            f"{name}: neither a file or folder here nor a known model; known are "
            f"{', '.join(_KNOWN)}; or give a model folder or its config.json"
        )
    geometry = replace(size.geometry, dtype=dtype)
    if isinstance(geometry, CompressedGeometry):
        geometry = replace(geometry, entry_format=entry_format)
    return replace(size, name=name, geometry=geometry)
