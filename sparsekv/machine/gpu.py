"""The GPU: whether there is one, whether torch may use it, and what it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsekv.machine.files import SystemFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One CUDA device.

    Attributes:
        name: its name for itself.
        index: torch's number of it, that of the current device.
        count: devices that torch sees.
        total_bytes: its memory.
        free_bytes: memory that nobody has taken yet.
        capability: compute capability, (9, 0) for example.
        architectures: those that torch has kernels for, "sm_90" or "compute_90" for example; empty
            where torch does not say.
    """

    name: str
    index: int
    count: int
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    architectures: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What torch and the system know of GPUs.

    Attributes:
        device: the current one; None: torch can use none.
        reason: what torch says when it is asked for a device that it cannot use; empty else.
        cuda: version of CUDA that torch was built for; None: built without.
        is_rocm: whether it was built for AMD's GPUs.
        driver: version of NVIDIA's driver in this kernel; None where none shows itself.
        has_nodes: whether a device of that driver can be opened here.
        hidden_by: value of CUDA_VISIBLE_DEVICES; None: not set.
    """

    device: GpuDevice | None
    reason: str
    cuda: str | None
    is_rocm: bool
    driver: str | None
    has_nodes: bool
    hidden_by: str | None


def probe_gpu(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ, torch: Any = torch
) -> Gpu:
    """Ask torch and the system.

    Args:
        root: where `proc` and `dev` are.
        environ: the environment.
        torch: the module, or what plays it.
    """
    files = SystemFiles(root)
    device, reason = None, ""
    try:
        if torch.cuda.is_available():
            device = _current_device(torch.cuda)
        elif torch.version.cuda:
            torch.cuda.init()
    except Exception as error:  # of torch or the driver, of whatever kind
        reason = " ".join(str(error).split())
    return Gpu(
        device=device,
        reason=reason,
        cuda=torch.version.cuda,
        is_rocm=getattr(torch.version, "hip", None) is not None,
        driver=driver_version(root),
        has_nodes=any(files.names("dev", r"nvidia\d+")),
        hidden_by=environ.get("CUDA_VISIBLE_DEVICES"),
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """Version of NVIDIA's driver in this kernel; None where none shows itself."""
    text = SystemFiles(root).text("proc/driver/nvidia/version") or ""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else None


def _current_device(cuda: Any) -> GpuDevice:
    index = cuda.current_device()
    free_bytes, total_bytes = cuda.mem_get_info(index)
    return GpuDevice(
        name=cuda.get_device_name(index),
        index=index,
        count=cuda.device_count(),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        capability=tuple(cuda.get_device_capability(index)),
        architectures=tuple(cuda.get_arch_list()),
    )
