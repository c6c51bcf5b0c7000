"""Ops built from torch's own kernels: they run on any device, in bounded memory."""

from sparsekv.kernels.torch_ops.partial_attention import partial_attention

__all__ = ["partial_attention"]
