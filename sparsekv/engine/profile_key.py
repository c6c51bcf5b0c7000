"""What a calibration of this machine is kept under, and the one that is kept."""

from __future__ import annotations

import os
import platform
from dataclasses import replace

import torch

from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry
from sparsekv.machine.cpu import probe_cpu
from sparsekv.machine.gpu import driver_version
from sparsekv.roofline import Calibration, ProfileKey, profile_folder

_NONE = "none"


def profile_key(
    geometry: KVGeometry,
    num_heads: int,
    *,
    batch_size: int,
    device: torch.device,
    num_threads: int,
) -> ProfileKey:
    """The key of this machine, as it is now, for one layer's attention.

    Args:
        geometry: what both engines attend to; the number of its layers does not matter.
        num_heads: query heads.
        batch_size: sequences of a step.
        device: the accelerator; where it is no GPU that can be used, the key names none.
        num_threads: threads of the CPU that attend.
    Raises:
        LayoutError: a count that is not a whole number of at least 1.
    """
    gpu, driver = _gpu(device)
    return ProfileKey(
        cpu=cpu_name(),
        gpu=gpu,
        driver=driver,
        geometry=_geometry_name(geometry, num_heads),
        dtype=_dtype_name(geometry),
        batch_size=batch_size,
        num_threads=num_threads,
    )


def check_geometry(key: ProfileKey, geometry: KVGeometry, num_heads: int) -> None:
    """Raise unless what was measured under a key is this attention.

    Raises:
        LayoutError: it has other heads, sizes or numbers.
    """
    asked = f"{_geometry_name(geometry, num_heads)} in {_dtype_name(geometry)}"
    found = f"{key.geometry} in {key.dtype}"
    if found != asked:
        raise LayoutError(
            f"a calibration for {found}: this is {asked}; calibrate for that, or give the "
            "calibration's machine"
        )


def _geometry_name(geometry: KVGeometry, num_heads: int) -> str:
    shared = " shared" if geometry.shared_kv else ""
    heads = f"{num_heads} heads {geometry.num_kv_heads} kv"
    return f"{heads} {geometry.head_dim} {geometry.value_dim}{shared}"


def _dtype_name(geometry: KVGeometry) -> str:
    return str(geometry.dtype).removeprefix("torch.")


def find_calibration(
    geometry: KVGeometry, num_heads: int, *, batch_size: int, device: torch.device
) -> Calibration | None:
    """What was measured on this machine, with the most threads if with several; None: nothing.

    Args:
        geometry: as for `profile_key`.
        num_heads: as for `profile_key`.
        batch_size: sequences of a step.
        device: as for `profile_key`.
    Raises:
        LayoutError: a count that is not a whole number of at least 1.
    """
    folder = profile_folder()
    key = profile_key(geometry, num_heads, batch_size=batch_size, device=device, num_threads=1)
    for num_threads in range(os.cpu_count() or 1, 0, -1):
        found = Calibration.load(folder, replace(key, num_threads=num_threads))
        if found is not None:
            return found
    return None


def cpu_name() -> str:
    """The processor, as the system calls it."""
    return probe_cpu().model or platform.processor() or platform.machine()


def _gpu(device: torch.device) -> tuple[str, str]:
    """Its name, and the version of its driver."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _NONE, _NONE
    return torch.cuda.get_device_name(device), driver_version() or _NONE
