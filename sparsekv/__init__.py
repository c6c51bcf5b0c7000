"""Long-context inference on one GPU with a KV cache larger than its memory, under plain Hugging
Face `generate`.

Importing this package loads neither torch nor transformers and changes nothing; names are loaded
when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsekv.errors import (
    CacheStateError,
    CapacityError,
    FormatError,
    LayoutError,
    SparseKVError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from sparsekv.attention import merge_partials, split_attention
    from sparsekv.cache import InplaceKVCache
    from sparsekv.engine import CacheConfig
    from sparsekv.engine.calibrate import calibrate
    from sparsekv.format import KVGeometry, PartitionSpec
    from sparsekv.models.patch import patch
    from sparsekv.models.planning import plan
    from sparsekv.roofline import CostModel, MachineProfile, ShareRouter

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "CacheStateError",
    "CapacityError",
    "CostModel",
    "FormatError",
    "InplaceKVCache",
    "KVGeometry",
    "LayoutError",
    "MachineProfile",
    "PartitionSpec",
    "ShareRouter",
    "SparseKVError",
    "UnsupportedModelError",
    "__version__",
    "calibrate",
    "merge_partials",
    "patch",
    "plan",
    "split_attention",
]

_HOME = {
    "CacheConfig": "sparsekv.engine",
    "CostModel": "sparsekv.roofline",
    "InplaceKVCache": "sparsekv.cache",
    "KVGeometry": "sparsekv.format",
    "MachineProfile": "sparsekv.roofline",
    "PartitionSpec": "sparsekv.format",
    "ShareRouter": "sparsekv.roofline",
    "calibrate": "sparsekv.engine.calibrate",
    "merge_partials": "sparsekv.attention",
    "patch": "sparsekv.models.patch",
    "plan": "sparsekv.models.planning",
    "split_attention": "sparsekv.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsekv' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
