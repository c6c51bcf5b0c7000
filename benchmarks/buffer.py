"""Memory to measure on, in huge pages where the system gives them."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import available_bytes, llc_bytes

HUGE_PAGE_BYTES = 2 << 20
CACHES = 4.25
"""Last-level caches to a buffer: what a pass leaves there is gone when the next one comes."""

_LEAST_BYTES = 256 << 20


class Span(NamedTuple):
    """Some memory: its address, a multiple of 64, and its bytes, a multiple of 256."""

    address: int
    num_bytes: int

    def part(self, offset: int, num_bytes: int) -> Span:
        """`num_bytes` of it, from byte `offset` on."""
        assert 0 <= offset <= offset + num_bytes <= self.num_bytes, (offset, num_bytes, self)
        return Span(self.address + offset, num_bytes)


class Buffer:
    """Private anonymous memory in huge pages; unmapped when it and all its tensors are gone.

    Args:
        num_bytes: its size, rounded up to huge pages.
    """

    def __init__(self, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
        self._mapping.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._offset = -base % HUGE_PAGE_BYTES
        self.span = Span(base + self._offset, num_bytes)

    def tensor(self) -> Tensor:
        """All of it, as a tensor of bytes."""
        count, offset = self.span.num_bytes, self._offset
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=offset)

    def huge_fraction(self) -> float:
        """The part of it that lies in huge pages now, as the kernel counts; 0 where it does not."""
        end = self.span.address + self.span.num_bytes
        huge = is_inside = 0
        for line in _lines(Path("/proc/self/smaps")):
            if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                first, last = (int(word, 16) for word in area.groups())
                is_inside = first < end and last > self.span.address
            elif is_inside and line.startswith("AnonHugePages:"):
                huge += int(line.split()[1]) << 10
        return min(huge / self.span.num_bytes, 1.0)


def measuring_bytes(num_buffers: int = 1) -> int:
    """Bytes of each of `num_buffers` to measure on: over 4 last-level caches, if memory allows.

    All of them take at most half of the memory that is available.
    """
    wanted = max(int(CACHES * llc_bytes()), _LEAST_BYTES)
    allowed = available_bytes() // 2 // num_buffers
    return min(wanted, allowed) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
