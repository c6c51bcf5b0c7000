"""The native ops in each instruction set, for tests to be parametrised with."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import library

ISAS = ("amx", "amx_emulated", "avx512", "avx2", "portable")


@contextlib.contextmanager
def use_isa(isa: str) -> Iterator[None]:
    """Within, the native library runs in one instruction set; skips where it cannot."""
    if library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")
    try:
        library.set_isa(isa)
    except LayoutError:
        pytest.skip(f"this processor has no {isa}")
    try:
        assert cpu.backend().isa == isa
        yield
    finally:
        library.set_isa(None)


class NativeOp:
    """Partial attention by the native library in one instruction set; skips where it cannot run."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def __call__(self, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        with use_isa(self.isa):
            return cpu.partial_attention(*tensors, **options)

    def kernel_for(self, query: Tensor, key: Tensor) -> str:
        """Name of the kernel that computes a call of these shapes."""
        with use_isa(self.isa):
            return library.kernel_for(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[2],
                num_queries=query.shape[2],
                dtype=key.dtype,
            )

    def tolerance(self, query: Tensor, key: Tensor) -> float:
        """Relative error of a head: kernels in matrices round weights to bfloat16, but for up to 4
        rows.
        """
        is_rounded = query.shape[1] // key.shape[2] * query.shape[2] > 4
        return 3e-3 if is_rounded and self.kernel_for(query, key).startswith("amx") else 1e-5


def tolerance_of(op: Any, query: Tensor, key: Tensor) -> float:
    """Of any implementation that computes in float32, or better."""
    return op.tolerance(query, key) if isinstance(op, NativeOp) else 1e-5


NATIVE_OPS = [pytest.param(NativeOp(isa), id=isa) for isa in ISAS]
MATRIX_OPS = [pytest.param(NativeOp(isa), id=isa) for isa in ("amx", "amx_emulated")]
