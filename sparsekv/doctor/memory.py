"""Judges host memory: its size, its limits, its pages."""

from __future__ import annotations

from sparsekv.doctor.finding import Finding, Level, gibibytes, unread
from sparsekv.machine.memory import HostMemory

_LEAST_SHARE = 0.1
"""Less than this of the machine's memory left for caches: something else has taken it."""

_ON = {"always": "for all memory (always)", "madvise": "where asked for (madvise)"}


def judge_memory(memory: HostMemory) -> list[Finding]:
    """Memory and addresses, then huge pages, then locked memory."""
    return [
        _usable(memory),
        *_cgroup(memory),
        *_addresses(memory),
        *unread("memory", memory.unread),
        _huge_pages(memory),
        _locked(memory),
    ]


def _usable(memory: HostMemory) -> Finding:
    usable = f"caches may take {gibibytes(memory.usable_bytes)}"
    free = "" if memory.available_bytes is None else f", {gibibytes(memory.available_bytes)} free"
    if memory.total_bytes is None:
        text = usable
    else:
        text = f"{gibibytes(memory.total_bytes)}{free}; {usable}"
    if memory.usable_bytes == 0:
        level, remedy = Level.MUST_FIX, "free memory, or raise the limit of the container"
    elif memory.usable_bytes < _LEAST_SHARE * _granted(memory):
        level, remedy = Level.WARNING, "end what holds the rest, or plan for less context"
    else:
        return Finding(topic="memory", level=Level.OK, text=text)
    return Finding(topic="memory", level=level, text=text, remedy=remedy)


def _granted(memory: HostMemory) -> int:
    """Bytes of the machine, or of the container if that has less."""
    return min(memory.total_bytes or 0, memory.cgroup_bytes or memory.total_bytes or 0)


def _cgroup(memory: HostMemory) -> list[Finding]:
    if memory.cgroup_bytes is None or memory.cgroup_bytes >= (memory.total_bytes or 0):
        return []
    return [
        Finding(
            topic="memory",
            level=Level.NOTE,
            text=f"the control group grants {gibibytes(memory.cgroup_bytes)} of it",
            remedy="raise the container's limit if a longer context is to fit (docker run "
            "--memory, limits.memory in Kubernetes)",
        )
    ]


def _huge_pages(memory: HostMemory) -> Finding:
    topic, slower = "huge pages", "the CPU reads the cache through small pages, more slowly"
    if memory.huge_pages is None:
        return Finding(
            topic=topic,
            level=Level.NOTE,
            text=f"this kernel shows no transparent huge pages; without them {slower}",
            remedy="use a kernel with CONFIG_TRANSPARENT_HUGEPAGE, and mount its /sys",
        )
    if memory.huge_pages == "never":
        return Finding(
            topic=topic,
            level=Level.WARNING,
            text=f"never: {slower}",
            remedy="as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if not memory.process_has_huge_pages:
        return Finding(
            topic=topic,
            level=Level.WARNING,
            text=f"switched off for this process: {slower}",
            remedy="start it from a program that does not set PR_SET_THP_DISABLE",
        )
    text = f"on, {_ON.get(memory.huge_pages, memory.huge_pages)}"
    return Finding(topic=topic, level=Level.OK, text=text)


def _locked(memory: HostMemory) -> Finding:
    if memory.locked_limit_bytes is None:
        limit = "no limit"
    else:
        limit = f"limit {memory.locked_limit_bytes >> 10:,} KiB (ulimit -l)"
    text = f"{limit}; NVIDIA's driver does not count what is registered with the GPU against it"
    return Finding(topic="locked memory", level=Level.OK, text=text)


def _addresses(memory: HostMemory) -> list[Finding]:
    findings = []
    reserves = "regions reserve addresses for the longest context"
    if memory.address_limit_bytes is not None:
        findings.append(
            Finding(
                topic="memory",
                level=Level.WARNING,
                text=f"address space is limited to {gibibytes(memory.address_limit_bytes)}, and "
                f"{reserves}",
                remedy="ulimit -v unlimited, before the start",
            )
        )
    if memory.never_overcommits:
        findings.append(
            Finding(
                topic="memory",
                level=Level.WARNING,
                text="vm.overcommit_memory=2 counts reserved addresses as used memory, and "
                f"{reserves}",
                remedy="as root: sysctl vm.overcommit_memory=0",
            )
        )
    return findings
