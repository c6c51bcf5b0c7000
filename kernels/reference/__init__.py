"""The definition of each op in plain torch: slow, obvious, what all others are tested against."""

from sparsekv.kernels.reference.append import append
from sparsekv.kernels.reference.gather import copy_segment, gather_blocks
from sparsekv.kernels.reference.merge_partials import merge_partials
from sparsekv.kernels.reference.partial_attention import partial_attention

__all__ = ["append", "copy_segment", "gather_blocks", "merge_partials", "partial_attention"]
