"""Ops for CUDA in Triton. Imported by kernels.dispatch, and only where triton can be imported."""

from sparsekv.kernels.triton.append import append
from sparsekv.kernels.triton.merge_partials import merge_partials
from sparsekv.kernels.triton.partial_attention import partial_attention, workspace_numel

__all__ = ["append", "merge_partials", "partial_attention", "workspace_numel"]
