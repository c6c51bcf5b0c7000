"""Ops for the CPU in a small native library: plain C++ threads and vectors, loaded by ctypes."""

from sparsekv.kernels.cpu.gather import copy_segment, gather_blocks
from sparsekv.kernels.cpu.library import Backend, backend
from sparsekv.kernels.cpu.partial_attention import partial_attention

__all__ = ["Backend", "backend", "copy_segment", "gather_blocks", "partial_attention"]
