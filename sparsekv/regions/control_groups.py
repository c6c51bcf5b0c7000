"""Limits of the control groups that this process is in, in both versions of the interface.

A limit of any group from the process's own up to the root binds; the least counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
"""Where `proc` and `sys` are; tests have another."""
_UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" by a number of about 2^63."""


def cpu_limit(root: Path = _ROOT) -> float | None:
    """Processors' worth of time that the groups grant, 1.5 for example; None: no limit."""
    limits = []
    for folder, is_unified in _groups(root, "cpu"):
        if is_unified:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes that the groups grant; None: no limit."""
    return min((limit for limit, _, _ in _memory_groups(root)), default=None)


def memory_left(root: Path = _ROOT) -> int | None:
    """Bytes that the groups grant and nobody in them uses; None: no limit.

    File cache that nobody uses counts as free: the kernel drops it before it kills.
    """
    left = []
    for limit, folder, is_unified in _memory_groups(root):
        usage = _text(folder / ("memory.current" if is_unified else "memory.usage_in_bytes"))
        field = "inactive_file" if is_unified else "total_inactive_file"
        cached = re.search(rf"^{field} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        if usage.isdigit():
            left.append(limit - int(usage) + (int(cached[1]) if cached else 0))
    return min(left, default=None)


def _memory_groups(root: Path) -> Iterator[tuple[int, Path, bool]]:
    """Limits of bytes, each with its group's folder and whether that is of version 2."""
    for folder, is_unified in _groups(root, "memory"):
        limit = _text(folder / ("memory.max" if is_unified else "memory.limit_in_bytes"))
        if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
            yield int(limit), folder, is_unified


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of the groups that limit `controller`, and whether each is of version 2."""
    table = _text(root / "proc/self/cgroup")
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(/.*)$", table, re.MULTILINE):
        is_unified = controllers == ""
        if not is_unified and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("" if is_unified else controller)
        group = PurePosixPath(path.lstrip("/"))
        yield from ((top / part, is_unified) for part in (group, *group.parents))


def _text(file: Path) -> str:
    """What a file says; nothing where there is none to read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
