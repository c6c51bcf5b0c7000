"""Ops for CUDA in Triton. Imported by kernels.dispatch, and only where triton can be imported."""

from sparsekv.kernels.triton.append import PreparedAppend, append
from sparsekv.kernels.triton.arguments import workspace_numel
from sparsekv.kernels.triton.merge_partials import PreparedMerge, merge_partials
from sparsekv.kernels.triton.partial_attention import partial_attention
from sparsekv.kernels.triton.prepared_attention import PreparedAttention

__all__ = [
    "PreparedAppend",
    "PreparedAttention",
    "PreparedMerge",
    "append",
    "merge_partials",
    "partial_attention",
    "workspace_numel",
]
