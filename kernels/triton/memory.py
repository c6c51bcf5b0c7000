"""What memory a kernel may be given, and on which device it is launched."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

import triton
from sparsekv.errors import LayoutError

IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run as Python on the CPU, for tests: TRITON_INTERPRET=1 when triton was imported."""


_LOADING = threading.RLock()
"""Triton loads a kernel at its first launch, and shows it half loaded to other threads."""


@contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Launches within go to `device`, on its current stream; one thread's at a time."""
    if device.type == "cpu":
        yield
    else:
        with _LOADING, torch.cuda.device(device):
            yield


def check_home(name: str, tensor: Tensor) -> None:
    """Raise unless kernels are launched where `tensor` lies.

    Raises:
        LayoutError: it is not on a CUDA device.
    """
    if not (tensor.is_cuda or (IS_INTERPRETED and tensor.device.type == "cpu")):
        raise LayoutError(
            f"{name} lies on {tensor.device}: must lie on a CUDA device, where the kernel runs; "
            "move it, or ask kernels.dispatch for the op of its device"
        )


def check_readable(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless a kernel on `device` can read `tensor` where it lies.

    Raises:
        LayoutError: it is neither there nor in host memory registered with CUDA.
    """
    if tensor.device == device or tensor.numel() == 0:
        return
    if tensor.device.type != "cpu" or not tensor.is_pinned():
        raise LayoutError(
            f"{name} lies on {tensor.device}, not in registered host memory: a kernel on {device} "
            "reads what lies there, or in host memory registered with CUDA; move or register it"
        )


def check_result(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise unless `tensor` can take a result of that shape and dtype.

    Raises:
        LayoutError: its shape or dtype differs, or it is not contiguous.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise LayoutError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, contiguous: "
            f"{tensor.is_contiguous()}; must be contiguous, {shape} of {dtype}: make another one, "
            f"of {prod(shape)} numbers"
        )


def is_contiguous_at_last(tensor: Tensor) -> bool:
    """Whether the numbers of the last dimension lie next to each other."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
