"""Which calls the accelerator can answer from the pinned region as it lies, without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.dispatch import decode_ops_for

_MOST_ROWS = 16
"""Query rows of a kv head for which the kernels read each key once, whatever its size and dtype."""


def reads_in_place(query: Tensor, num_kv_heads: int, mask: Tensor | None) -> bool:
    """Whether attention to pinned segments reads each of their bytes once where they lie: as fast
    as copying them, and in one launch.

    More query rows would read them again over the bus; a mask or float64 is for ops that take keys
    on the accelerator.

    Args:
        query: (batch, num_heads, num_queries, head_dim) on the accelerator.
        num_kv_heads: of the keys.
        mask: as given to split attention.
    """
    num_rows = query.shape[1] // num_kv_heads * query.shape[2]
    is_for_copies = mask is not None or query.dtype == torch.float64 or num_rows > _MOST_ROWS
    return not is_for_copies and decode_ops_for(query.device) is not None
