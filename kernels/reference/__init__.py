"""The definition of each op in plain torch: slow, obvious, what all others are tested against."""

from sparsekv.kernels.reference.partial_attention import partial_attention

__all__ = ["partial_attention"]
