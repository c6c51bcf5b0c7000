"""Which implementation of an op runs on which device.

Callers ask here and never import an implementation; a faster one is entered in the table below.
"""

from typing import Protocol

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels import torch_ops


class PartialAttention(Protocol):
    """Attention to one set of keys; sparsekv.kernels.reference.partial_attention defines it."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        softmax_scale: float,
        *,
        row_table: Tensor | None = None,
        query_start: int = 0,
        key_mask: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


_PARTIAL_ATTENTION: dict[str, PartialAttention] = {
    "cpu": torch_ops.partial_attention,
    "cuda": torch_ops.partial_attention,
}


def partial_attention_for(device: torch.device) -> PartialAttention:
    """The implementation of partial attention for tensors on `device`.

    Raises:
        LayoutError: no implementation runs on such a device.
    """
    try:
        return _PARTIAL_ATTENTION[device.type]
    except KeyError:
        known = " or ".join(_PARTIAL_ATTENTION)
        raise LayoutError(
            f"device={device}: partial attention runs on {known}; move the tensors there"
        ) from None
