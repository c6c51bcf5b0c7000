"""The newest tokens of one layer, on the accelerator, laid out as the segment they will become."""

from __future__ import annotations

from torch import Tensor

from sparsekv.device import Accelerator
from sparsekv.format import KVGeometry
from sparsekv.regions.stack import split_elements


class Window:
    """One segment of accelerator memory: (rows, num_kv_heads, window_size * elements). How full it
    is, its owner knows.
    """

    def __init__(
        self, accelerator: Accelerator, geometry: KVGeometry, batch_size: int, window_size: int
    ) -> None:
        shape = (batch_size, geometry.num_kv_heads, window_size * geometry.elements_per_token)
        self.elements = accelerator.empty(shape, geometry.dtype)
        self.key, self.value = split_elements(self.elements, geometry, window_size)

    def write(self, start: int, key: Tensor, value: Tensor | None) -> None:
        """Put tokens (batch, num_kv_heads, tokens, dim) from token `start` on; None where V is part
        of K.
        """
        self.key[:, :, start : start + key.shape[2]].copy_(key)
        if value is not None:
            self.value[:, :, start : start + value.shape[2]].copy_(value)
