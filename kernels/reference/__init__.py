"""The definition of each op in plain torch: slow, obvious, what all others are tested against."""

from sparsekv.kernels.reference.gather import copy_segment, gather_blocks
from sparsekv.kernels.reference.partial_attention import partial_attention

__all__ = ["copy_segment", "gather_blocks", "partial_attention"]
