"""The native op in each instruction set, for tests to be parametrised with."""

from typing import Any

import pytest
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import library

ISAS = ("avx512", "avx2", "portable")


class NativeOp:
    """Partial attention by the native library in one instruction set; skips where it cannot run."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def __call__(self, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if library.native_library() is None:
            pytest.skip(f"no native library: {cpu.backend().reason}")
        try:
            library.set_isa(self.isa)
        except LayoutError:
            pytest.skip(f"this processor has no {self.isa}")
        try:
            assert cpu.backend().isa == self.isa
            return cpu.partial_attention(*tensors, **options)
        finally:
            library.set_isa(None)


NATIVE_OPS = [pytest.param(NativeOp(isa), id=isa) for isa in ISAS]
