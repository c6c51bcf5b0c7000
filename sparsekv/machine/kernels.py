"""The kernels in use: the CPU's as the library chose them, the GPU's as a small call shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparsekv.kernels.dispatch import Backend, cpu_backend, decode_ops_for, merge_partials_for

__all__ = ["Backend", "GpuKernels", "probe_cpu_kernels", "probe_gpu_kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels:
    """What computes on the GPU.

    Attributes:
        is_triton: whether Triton's kernels are in use; torch's ops else.
        triton_error: why triton cannot be imported; empty where it can.
        error: what went wrong when they were called; empty: they gave the right answer.
    """

    is_triton: bool
    triton_error: str
    error: str


def probe_cpu_kernels() -> Backend:
    """What computes attention on the CPU; builds the native library, once, if there is none.

    Raises:
        LayoutError: `SPARSEKV_CPU` is none of its values, or `native` and there is no library.
    """
    return cpu_backend()


def probe_gpu_kernels(device: torch.device) -> GpuKernels:
    """Merge two partial results on `device`; compiles a kernel if none is kept from before."""
    is_triton, triton_error, error_text = False, "", ""
    try:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            triton_error = str(error)
        is_triton = decode_ops_for(device) is not None
        error_text = _merge_twice(device)
    except Exception as error:  # of torch, triton, a compiler or the driver, of whatever kind
        error_text = f"{type(error).__name__}: {error}"
    return GpuKernels(is_triton=is_triton, triton_error=triton_error, error=error_text)


def _merge_twice(device: torch.device) -> str:
    """What is wrong with the merge of a part with itself; empty: nothing."""
    out = torch.arange(8 * 64, dtype=torch.float32, device=device).view(1, 8, 64)
    lse = torch.zeros(1, 8, device=device)
    merged, merged_lse = merge_partials_for(device)([(out, lse), (out, lse)])
    is_right = torch.allclose(merged, out) and torch.allclose(merged_lse, lse + math.log(2))
    return "" if is_right else "the merge of two equal parts is not that part"
