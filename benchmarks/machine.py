"""The machine a benchmark runs on: processors, caches, memory, GPU, and a short name for them."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_VENDOR_WORDS = ("nvidia", "geforce", "amd", "instinct")
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the numbers of a result depend on, beside the software.

    Attributes:
        name: short name, part of the names of result files, such as `h200-16core`.
        cpu: the processor's name for itself.
        num_cores: physical cores that this process may use.
        instruction_sets: those that matter here, as the kernel lists them.
        llc_bytes: size of the last-level cache; 0 where the system does not say.
        memory_bytes: memory of the machine. A virtual machine's may grow as it is used.
        gpu: name of the first GPU; None without one.
        driver: version of the GPU's driver; None without one.
    """

    name: str
    cpu: str
    num_cores: int
    instruction_sets: tuple[str, ...]
    llc_bytes: int
    memory_bytes: int
    gpu: str | None
    driver: str | None


def describe_machine(name: str | None = None) -> Machine:
    """This machine; `name` replaces the short name made from its hardware."""
    cpu, flags = _cpu_info()
    gpu, driver = _gpu()
    return Machine(
        name=name or short_name(cpu, gpu, num_cores()),
        cpu=cpu,
        num_cores=num_cores(),
        instruction_sets=tuple(isa for isa in _INSTRUCTION_SETS if isa in flags),
        llc_bytes=llc_bytes(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpu=gpu,
        driver=driver,
    )


def machine_as_json(machine: Machine) -> dict[str, object]:
    """The fields of a machine, in the types that JSON has."""
    return {**asdict(machine), "instruction_sets": list(machine.instruction_sets)}


def short_name(cpu: str, gpu: str | None, cores: int) -> str:
    """`h200-16core` with a GPU, `xeon-2core` without one."""
    if gpu is not None:
        words = re.findall(r"[a-z0-9]+", gpu.lower())
        kind = "-".join(word for word in words if word not in _VENDOR_WORDS) or "gpu"
    else:
        known = re.search(r"xeon|epyc|ryzen|core|graviton|neoverse|apple", cpu.lower())
        kind = known.group() if known else "cpu"
    return f"{kind}-{cores}core"


def cpus_one_per_core() -> list[int]:
    """Processors that this process may use, one of each physical core first, then the others."""
    seen: set[str] = set()
    first: list[int] = []
    rest: list[int] = []
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        (rest if siblings in seen else first).append(cpu)
        seen.add(siblings)
    return first + rest


def num_cores() -> int:
    """Physical cores that this process may use."""
    allowed = os.sched_getaffinity(0)
    return len({_read(_CPUS / f"cpu{c}/topology/thread_siblings_list") or str(c) for c in allowed})


def llc_bytes() -> int:
    """Size of the last-level cache of the first processor; 0 where the system does not say."""
    sizes = []
    for index in (_CPUS / f"cpu{min(os.sched_getaffinity(0))}/cache").glob("index*"):
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size"))
        if size and _read(index / "type") != "Instruction":
            sizes.append(int(size.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[size.group(2)])
    return max(sizes, default=0)


def available_bytes() -> int:
    """Memory that can be taken without pushing anything out, as the kernel estimates it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    return int(found.group(1)) << 10 if found else 0


def _cpu_info() -> tuple[str, frozenset[str]]:
    text = _read(Path("/proc/cpuinfo"))
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    return (
        name.group(1) if name else platform.processor() or platform.machine(),
        frozenset(flags.group(1).split() if flags else ()),
    )


def _gpu() -> tuple[str | None, str | None]:
    import torch

    if not torch.cuda.is_available():
        return None, None
    driver = re.search(
        r"Kernel Module\s.*?(\d+\.[\d.]+)", _read(Path("/proc/driver/nvidia/version"))
    )
    return torch.cuda.get_device_name(0), driver.group(1) if driver else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
