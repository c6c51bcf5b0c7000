"""Limits of the control groups that this process is in, in both versions of the interface.

A limit of any group from the process's own up to the root binds; the least counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from sparsekv.machine.files import SystemFiles

_UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" by a number of about 2^63."""


def cpu_limit(files: SystemFiles) -> float | None:
    """Processors' worth of time that the groups grant, 1.5 for example; None: no limit."""
    limits = []
    for folder, is_unified in _groups(files, "cpu"):
        if is_unified:
            quota, _, period = (files.text(f"{folder}/cpu.max") or "").partition(" ")
        else:
            quota = files.text(f"{folder}/cpu.cfs_quota_us") or ""
            period = files.text(f"{folder}/cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit(files: SystemFiles) -> int | None:
    """Bytes that the groups grant; None: no limit."""
    limits = []
    for folder, is_unified in _groups(files, "memory"):
        name = "memory.max" if is_unified else "memory.limit_in_bytes"
        limit = files.text(f"{folder}/{name}") or ""
        if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
            limits.append(int(limit))
    return min(limits, default=None)


def _groups(files: SystemFiles, controller: str) -> Iterator[tuple[str, bool]]:
    """Folders of the groups that limit `controller`, and whether each is of version 2."""
    table = files.text("proc/self/cgroup") or ""
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(/.*)$", table, re.MULTILINE):
        is_unified = controllers == ""
        if not is_unified and controller not in controllers.split(","):
            continue
        root = "sys/fs/cgroup" if is_unified else f"sys/fs/cgroup/{controller}"
        group = PurePosixPath(path.lstrip("/"))
        for part in (group, *group.parents):
            yield (root if part == PurePosixPath() else f"{root}/{part}"), is_unified
