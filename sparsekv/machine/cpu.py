"""The processor: what it is, and how much of it this process may use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparsekv.machine.files import SystemFiles, field
from sparsekv.regions import control_groups, numa

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_SETS = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""What the native library asks of a processor for each of its instruction sets, best first."""
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processor as the system describes it.

    Attributes:
        model: its name for itself; None where the system gives none.
        best_isa: the best of the native library's instruction sets that it has: "amx", "avx512",
            "avx2" or "portable"; None where the system does not say.
        machine_cores: physical cores of the machine.
        machine_cpus: its logical processors.
        allowed_cores: physical cores that this process may use.
        allowed_cpus: logical processors that it may use.
        cgroup_cpus: processors' worth of time that its control groups grant; None: no limit.
        nodes: memory nodes of the processors that it may use.
        can_interleave: whether it may spread memory over them.
        binding: environment variables by which OpenMP may have narrowed `allowed_cpus`.
        unread: files that should have told, and did not.
    """

    model: str | None
    best_isa: str | None
    machine_cores: int
    machine_cpus: int
    allowed_cores: int
    allowed_cpus: int
    cgroup_cpus: float | None
    nodes: tuple[int, ...]
    can_interleave: bool
    binding: tuple[str, ...]
    unread: tuple[str, ...]


def probe_cpu(
    root: Path = Path("/"),
    allowed: Iterable[int] | None = None,
    can_interleave: Callable[[], bool] = numa.can_interleave,
    environ: Mapping[str, str] = os.environ,
) -> Cpu:
    """Read what the system says.

    Args:
        root: where `proc` and `sys` are.
        allowed: logical processors that this process may use; None: the affinity mask.
        can_interleave: asks the system whether memory may be spread.
        environ: the environment.
    """
    files = SystemFiles(root)
    info = files.read("proc/cpuinfo", lambda text: text or None) or ""
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    online = files.read(f"{_CPUS}/online", numa.parse_list) or usable
    flags = field("flags", info)
    return Cpu(
        model=field("model name", info),
        best_isa=_best_isa(info, flags),
        machine_cores=_num_cores(files, online | usable),
        machine_cpus=len(online | usable),
        allowed_cores=_num_cores(files, usable),
        allowed_cpus=len(usable),
        cgroup_cpus=control_groups.cpu_limit(root),
        nodes=_nodes_of(files, usable),
        can_interleave=can_interleave(),
        binding=tuple(name for name in _BINDING if environ.get(name)),
        unread=files.unread,
    )


def _best_isa(info: str, flags: str | None) -> str | None:
    if not info:
        return None
    has = set((flags or "").split())
    return next((name for name, needed in _SETS.items() if needed <= has), "portable")


def _num_cores(files: SystemFiles, cpus: Iterable[int]) -> int:
    """Threads of one core name the same siblings; a processor that names none is a core."""
    siblings = (files.text(f"{_CPUS}/cpu{n}/topology/thread_siblings_list") or str(n) for n in cpus)
    return len(set(siblings))


def _nodes_of(files: SystemFiles, cpus: set[int]) -> tuple[int, ...]:
    found = []
    for name in files.names(_NODES, r"node\d+"):
        there = files.read(f"{_NODES}/{name}/cpulist", numa.parse_list)
        if there and there & cpus:
            found.append(int(name.removeprefix("node")))
    return tuple(sorted(found))
