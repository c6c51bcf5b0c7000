"""The Triton op for tests to be parametrised with: interpreted on the CPU, and on CUDA.

Whether kernels are interpreted is settled when triton is first imported, so a process of its own
does it. Tensors are shared with it, strides and all, so what it writes in place is seen here.
"""

import importlib
import importlib.util
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import hypothesis
import pytest
import torch
import torch.multiprocessing  # lets tensors pass between processes
from torch import Tensor

# Without it torch refuses products on CUDA while tests have it poison the memory it hands out.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no triton")
needs_cuda = pytest.mark.skipif(
    not (HAS_TRITON and torch.cuda.is_available()), reason="no triton or no CUDA device"
)


@cache
def why_not_interpreted() -> str | None:
    """Why Triton's interpreter cannot run here; None if it can."""
    if not HAS_TRITON:
        return "no triton"
    triton, numpy = (
        tuple(int(part) for part in version(name).split(".")[:2]) for name in ("triton", "numpy")
    )
    if triton < (3, 9) and numpy >= (2, 4):
        return "triton before 3.9 interprets loops only with numpy before 2.4"
    return None


class InterpretedOp:
    """An op of sparsekv.kernels.triton, run by Triton's interpreter on tensors of the CPU."""

    def __init__(self, name: str = "partial_attention") -> None:
        self.name = name

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        if (reason := why_not_interpreted()) is not None:
            pytest.skip(reason)
        if any(t.dtype == torch.bfloat16 for t in tensors if isinstance(t, Tensor)):
            _leave_out("the interpreter multiplies bfloat16 bit by bit")
        return _interpreter().submit(_call, self.name, tensors, options).result()


class CudaOp:
    """Partial attention on CUDA, for tensors of the CPU; with their strides, NaN around them too.

    `in_place`: keys and values stay in host memory, which is registered.
    """

    def __init__(self, in_place: bool = False) -> None:
        self.in_place = in_place

    def __call__(self, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        from sparsekv.kernels import triton as ops

        query, key, value, positions, scale = tensors
        if self.in_place and (query.dtype == torch.float64 or options.get("mask") is not None):
            _leave_out("computed by torch's ops, on keys on the device")
        moved: dict[int, Tensor] = {}
        stored = [
            registered(t, moved) if self.in_place else on_cuda(t, moved) for t in (key, value)
        ]
        for name in ("key_mask", "mask"):
            if options.get(name) is not None:
                options[name] = options[name].cuda()
        if (blocks := options.get("blocks")) is not None:
            options["blocks"] = type(blocks)(
                indices=blocks.indices.cuda(),
                num_blocks=blocks.num_blocks.cuda(),
                block_size=blocks.block_size,
            )
        out, lse = ops.partial_attention(on_cuda(query, {}), *stored, positions, scale, **options)
        return out.cpu(), lse.cpu()


def on_cuda(tensor: Tensor, moved: dict[int, Tensor]) -> Tensor:
    """The same view of the same storage, on CUDA; `moved` keeps storages that views share."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in moved:
        moved[storage.data_ptr()] = _bytes_of(tensor).cuda()
    flat = moved[storage.data_ptr()].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def registered(tensor: Tensor, moved: dict[int, Tensor]) -> Tensor:
    """The same view of the same storage, in host memory that is registered with CUDA."""
    from sparsekv.device import open_accelerator
    from sparsekv.regions import RegionPool

    storage = tensor.untyped_storage()
    if storage.data_ptr() not in moved:
        num_bytes = max(storage.nbytes(), 1)
        lease = RegionPool().lease(num_bytes, num_bytes, accelerator := open_accelerator("cuda"))
        lease.mapping.register(accelerator, lease.mapping.num_bytes)
        flat = lease.tensor(0, (1, num_bytes), num_bytes, torch.uint8)[0]
        flat[: storage.nbytes()] = _bytes_of(tensor)
        moved[storage.data_ptr()] = flat
    flat = moved[storage.data_ptr()][: storage.nbytes()].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _leave_out(reason: str) -> None:
    if hypothesis.currently_in_test_context():
        hypothesis.reject()
    pytest.skip(reason)


@cache
def _interpreter() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # memory that torch hands out unwritten holds NaN


def _call(name: str, tensors: Any, options: Any) -> Any:
    made = getattr(importlib.import_module("sparsekv.kernels.triton"), name)(*tensors, **options)
    return made() if name.startswith("Prepared") else made  # writes in place


TRITON_OPS = [
    pytest.param(InterpretedOp(), id="triton-interpreted", marks=pytest.mark.slow),
    pytest.param(CudaOp(), id="triton", marks=[pytest.mark.gpu, needs_cuda]),
    pytest.param(CudaOp(True), id="triton-in-place", marks=[pytest.mark.gpu, needs_cuda]),
]
