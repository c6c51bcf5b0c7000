"""Ops built from torch's own kernels: they run on any device, in bounded memory."""

from sparsekv.kernels.torch_ops.gather import copy_segment, gather_blocks
from sparsekv.kernels.torch_ops.partial_attention import partial_attention

__all__ = ["copy_segment", "gather_blocks", "partial_attention"]
