"""The accelerator: CUDA, or a simulated one that keeps the same regions in ordinary memory.

Everything that allocates on the accelerator, copies to or from it, or registers host memory goes
through here, so that bytes are counted in one place and tests can make each operation fail.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsekv.errors import CapacityError, LayoutError

_CU_MEMHOSTREGISTER_PORTABLE = 1


class Accelerator:
    """Memory and copies of one device. Copies are synchronous: the bytes are there when the call
    returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.h2d_bytes = 0
        self.d2h_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the accelerator."""
        # What is made under inference_mode could never be written to outside it.
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def copy_to_host(self, host: Tensor, source: Tensor) -> None:
        """Copy accelerator memory into host memory of the same shape."""
        host.copy_(source)
        self.d2h_bytes += source.numel() * source.element_size()

    def copy_from_host(self, target: Tensor, host: Tensor) -> None:
        """Copy host memory into accelerator memory of the same shape."""
        target.copy_(host)
        self.h2d_bytes += host.numel() * host.element_size()

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory so that the accelerator can read it at full speed.

        Raises:
            CapacityError: the system refuses; nothing is registered then and no error is left
                behind.
        """
        raise NotImplementedError

    def unregister(self, address: int) -> None:
        """Undo `register`, if that was done; must come before the memory is unmapped."""
        raise NotImplementedError


class SimulatedAccelerator(Accelerator):
    """Ordinary memory that plays the accelerator, on machines without one."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.registered: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> None:
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        self.registered.pop(address, None)


class CudaAccelerator(Accelerator):
    """One CUDA device. Registration uses the driver, whose failures leave no error for the next
    launch to find.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.init()
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device.index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def register(self, address: int, num_bytes: int) -> None:
        status = self._in_context(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(num_bytes),
            _CU_MEMHOSTREGISTER_PORTABLE,
        )
        if status:
            raise CapacityError(
                f"registering {num_bytes} bytes of host memory with {self.device}: refused by "
                "the driver (error "
                f"{status}); raise the limit of locked memory (ulimit -l) or lower the pinned "
                "share with a higher cpu_share"
            )

    def unregister(self, address: int) -> None:
        # At exit the driver may be gone, and the registration with it.
        self._in_context("cuMemHostUnregister", ctypes.c_void_p(address))

    def _in_context(self, name: str, *args: object) -> int:
        """Call the driver with this device's context, on whatever thread (a finalizer's, say)."""
        status = self._driver.cuCtxPushCurrent_v2(self._context)
        if status:
            return int(status)
        try:
            return int(getattr(self._driver, name)(*args))
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._driver, name)(*args)
        if status:
            raise LayoutError(
                f"device={self.device}: {name} failed with error {status}; check nvidia-smi"
            )


def open_accelerator(device: str | torch.device) -> Accelerator:
    """The accelerator behind a torch device: CUDA for `cuda[:n]`, the simulated one for `cpu`.

    Raises:
        LayoutError: not a device, another kind of device, or CUDA where there is none.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise LayoutError(
            f"device={device!r}: not a device; use 'cuda', 'cuda:<index>' or 'cpu' (simulated "
            "accelerator)"
        ) from None
    if device.type == "cpu":
        return SimulatedAccelerator()
    if device.type != "cuda":
        raise LayoutError(
            f"device={str(device)!r}: must be 'cuda', 'cuda:<index>' or 'cpu' (simulated "
            "accelerator)"
        )
    if not torch.cuda.is_available():
        raise LayoutError(
            f"device={str(device)!r}: torch sees no CUDA device; use device='cpu' for the "
            "simulated accelerator, or "
            "install a CUDA build of torch"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise LayoutError(
            f"device='cuda:{index}': this machine has {torch.cuda.device_count()} CUDA "
            "device(s), from 0"
        )
    return CudaAccelerator(torch.device("cuda", index))
