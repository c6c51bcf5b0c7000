"""Host memory: how much there is, how much a cache may take, and what the system makes of it."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparsekv.machine.files import SystemFiles, field, kilobytes
from sparsekv.regions import control_groups, memory

_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_NEVER_OVERCOMMIT = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory and its limits, in bytes; None where the system does not say, or sets no limit.

    Attributes:
        total_bytes: memory of the machine.
        available_bytes: what can be taken without pushing anything out.
        cgroup_bytes: what the control groups of this process grant.
        usable_bytes: what caches may still commit here: the library's own figure.
        huge_pages: "always", "madvise" or "never"; None: this kernel has none.
        process_has_huge_pages: whether this process may have them at all.
        locked_limit_bytes: the limit of locked memory, RLIMIT_MEMLOCK.
        address_limit_bytes: the limit of address space, RLIMIT_AS.
        never_overcommits: whether the kernel counts reserved addresses as if they were used.
        unread: files that should have told, and did not.
    """

    total_bytes: int | None
    available_bytes: int | None
    cgroup_bytes: int | None
    usable_bytes: int
    huge_pages: str | None
    process_has_huge_pages: bool
    locked_limit_bytes: int | None
    address_limit_bytes: int | None
    never_overcommits: bool
    unread: tuple[str, ...]


def probe_memory(
    root: Path = Path("/"),
    usable_bytes: Callable[[], int] = memory.available_bytes,
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit,
) -> HostMemory:
    """Read what the system says.

    Args:
        root: where `proc` and `sys` are.
        usable_bytes: asks the library how much it would commit.
        limit: the soft and the hard limit of a resource.
    Raises:
        LayoutError: `SPARSEKV_HOST_MEMORY` is not a size.
    """
    files = SystemFiles(root)
    status = files.text("proc/self/status") or ""
    return HostMemory(
        total_bytes=files.read("proc/meminfo", lambda text: kilobytes("MemTotal", text)),
        available_bytes=kilobytes("MemAvailable", files.text("proc/meminfo") or ""),
        cgroup_bytes=control_groups.memory_limit(root),
        usable_bytes=usable_bytes(),
        huge_pages=_chosen(files.text(_HUGE_PAGES) or ""),
        process_has_huge_pages=field("THP_enabled", status) != "0",
        locked_limit_bytes=_soft(limit, resource.RLIMIT_MEMLOCK),
        address_limit_bytes=_soft(limit, resource.RLIMIT_AS),
        never_overcommits=files.text("proc/sys/vm/overcommit_memory") == _NEVER_OVERCOMMIT,
        unread=files.unread,
    )


def _soft(limit: Callable[[int], tuple[int, int]], which: int) -> int | None:
    soft, _ = limit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _chosen(text: str) -> str | None:
    """The word in brackets: `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else None
