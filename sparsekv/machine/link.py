"""The link to the GPU: what it is, and what a short copy makes of it.

An idle GPU lets its link fall back to a slower generation: it is asked right after the copies.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsekv.device import Accelerator, CudaAccelerator
from sparsekv.errors import CapacityError
from sparsekv.machine.files import SystemFiles
from sparsekv.regions.host_buffer import buffer_mapping, buffer_on

COPY_BYTES = 64 << 20
"""From here on a copy runs at the link's full rate."""

_LEAST_COPIES = 4
_COPYING_S = 0.1
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Of PCIe, by transfers a second and lane, in 10^9."""
_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Bytes a second and lane, in 10^9, after the line code (8b/10b, from 3 on 128b/130b, 6: flits)."""
_FIELDS = ("gen.current", "gen.max", "width.current", "width.max")
_SMI_COMMAND = (
    "nvidia-smi",
    "--query-gpu=" + ",".join(f"pcie.link.{name}" for name in _FIELDS),
    "--format=csv,noheader",
)
_SMI_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """A PCIe link as the system describes it; None where it does not.

    Attributes:
        generation: in use while copying.
        max_generation: the most that the device, and the slot if it is known, could use.
        width: lanes in use.
        max_width: the most lanes.
        source: who says so: "sysfs" or "nvidia-smi".
    """

    generation: int | None
    max_generation: int | None
    width: int | None
    max_width: int | None
    source: str

    @property
    def gbs(self) -> float | None:
        """What the link can carry, in 10^9 bytes a second each way; None: not known."""
        if self.generation not in _LANE_GBS or self.width is None:
            return None
        return _LANE_GBS[self.generation] * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRate:
    """What copies from registered host memory to the GPU reached.

    Attributes:
        gbs: 10^9 bytes a second, of the fastest copy; None: the memory could not be registered.
        num_bytes: of one copy.
        refusal: what the system said when it registered nothing; empty else.
    """

    gbs: float | None
    num_bytes: int
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from host memory to the GPU.

    Attributes:
        copy: as measured.
        pcie: as described; None: nobody describes it.
    """

    copy: CopyRate
    pcie: PcieLink | None


def carrying_generation(gbs: float, width: int) -> int | None:
    """The first generation of PCIe whose links of `width` lanes carry so many 10^9 bytes a second;
    None: none does.
    """
    return next((number for number, lane in _LANE_GBS.items() if lane * width >= gbs), None)


def probe_link(accelerator: Accelerator, root: Path = Path("/")) -> Link:
    """Copy for a tenth of a second, then ask what the link is."""
    copy = measure_copies(accelerator)
    bus_id = _bus_id(accelerator)
    pcie = None
    if bus_id is not None:
        pcie = sysfs_link(bus_id, root) or smi_link(bus_id)
    return Link(copy=copy, pcie=pcie)


def measure_copies(accelerator: Accelerator, num_bytes: int = COPY_BYTES) -> CopyRate:
    """Copy `num_bytes` from registered memory to the accelerator, several times."""
    mapping = buffer_mapping(accelerator, (num_bytes,), torch.uint8)
    try:
        mapping.register(accelerator, mapping.num_bytes)
    except CapacityError as error:
        mapping.unmap()
        return CopyRate(gbs=None, num_bytes=num_bytes, refusal=str(error).partition("; ")[0])
    host = buffer_on(mapping, (num_bytes,), torch.uint8)
    stream, target = accelerator.new_stream(), accelerator.empty((num_bytes,), torch.uint8)
    accelerator.current_stream().synchronize()
    times: list[float] = []
    while len(times) < _LEAST_COPIES or sum(times) < _COPYING_S:
        began = time.perf_counter()
        stream.copy_from_host(target, host)
        stream.synchronize()
        times.append(time.perf_counter() - began)
    return CopyRate(gbs=num_bytes / min(times) / 1e9, num_bytes=num_bytes, refusal="")


def sysfs_link(bus_id: str, root: Path = Path("/")) -> PcieLink | None:
    """The link of a PCI device, such as `0000:81:00.0`, by the kernel; None: it says nothing."""
    files = SystemFiles(root)
    folder = f"sys/bus/pci/devices/{bus_id}"
    link = PcieLink(
        generation=_generation(files.text(f"{folder}/current_link_speed")),
        max_generation=_generation(files.text(f"{folder}/max_link_speed")),
        width=_width(files.text(f"{folder}/current_link_width")),
        max_width=_width(files.text(f"{folder}/max_link_width")),
        source="sysfs",
    )
    return None if link.gbs is None else link


def smi_link(bus_id: str, run: Callable[[tuple[str, ...]], str] | None = None) -> PcieLink | None:
    """The link of a GPU by nvidia-smi; None: it is not here, or does not know."""
    try:
        answer = (run or _output)((*_SMI_COMMAND, f"--id={bus_id}"))
    except (OSError, subprocess.SubprocessError):
        return None
    values = [int(word) if word.isdigit() else None for word in re.split(r",\s*", answer.strip())]
    if len(values) != len(_FIELDS):
        return None
    generation, max_generation, width, max_width = values
    link = PcieLink(
        generation=generation,
        max_generation=max_generation,
        width=width,
        max_width=max_width,
        source="nvidia-smi",
    )
    return None if link.gbs is None else link


def _output(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
    return done.stdout


def _bus_id(accelerator: Accelerator) -> str | None:
    """The GPU's place on the bus, as sysfs writes it; None: it has none."""
    if not isinstance(accelerator, CudaAccelerator):
        return None
    text = ctypes.create_string_buffer(32)
    if accelerator.call("cuDeviceGetPCIBusId", text, len(text), accelerator.device.index):
        return None
    return text.value.decode().lower()


def _generation(text: str | None) -> int | None:
    found = re.match(r"([\d.]+) GT/s", text or "")
    return _GENERATIONS.get(float(found[1])) if found else None


def _width(text: str | None) -> int | None:
    """Lanes; virtual machines may say 0, and 255 where they do not know."""
    return int(text) if text and text.isdigit() and 0 < int(text) <= 32 else None
