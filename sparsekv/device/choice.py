"""From a torch device to the accelerator behind it."""

from __future__ import annotations

import torch

from sparsekv.device.accelerator import Accelerator
from sparsekv.device.cuda import CudaAccelerator
from sparsekv.device.simulated import SimulatedAccelerator
from sparsekv.errors import LayoutError


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
