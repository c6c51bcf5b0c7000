"""Host memory: anonymous mappings, huge pages, and how much of the machine may be committed.

A mapping reserves addresses only; pages are committed when they are first written. Mappings are not
inherited by forked children, whose copies would cost as much again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re

import psutil

from sparsekv.device import Accelerator
from sparsekv.errors import CapacityError, LayoutError
from sparsekv.regions import control_groups, numa
from sparsekv.regions.touch import Touch

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
RESERVED_BYTES = 2 << 30
"""Left to the rest of the machine: beyond it the kernel kills rather than refuses."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 10, 14, 15

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


class Mapping:
    """A range of addresses, aligned to huge pages. Its owner unmaps it; views are handed out
    elsewhere.
    """

    def __init__(self, num_bytes: int, use: tuple[int, str | None]) -> None:
        self.use = use
        """Bytes of the segments it is cut into, and the kind of device it gets registered with."""
        self._pid = os.getpid()
        self._touch: Touch | None = None
        self.num_bytes = round_up(num_bytes, PAGE_BYTES)
        self.touched_bytes = 0
        """Bytes from the start that were written at some time, and so are committed."""
        self._mapped_bytes = self.num_bytes + HUGE_PAGE_BYTES
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = _libc.mmap(None, self._mapped_bytes, protection, flags | _MAP_NORESERVE, -1, 0)
        if base == _MAP_FAILED:
            raise CapacityError(
                f"reserving {self._mapped_bytes} bytes of addresses: "
                f"{os.strerror(ctypes.get_errno())}; lower "
                "max_tokens or raise the limit of address space (ulimit -v)"
            )
        self._base = base
        self.address = round_up(base, HUGE_PAGE_BYTES)
        _libc.madvise(base, self._mapped_bytes, _MADV_DONTFORK)
        # Where huge pages are on for everyone, the first byte of a small segment would commit 2
        # MiB.
        _libc.madvise(base, self._mapped_bytes, _MADV_NOHUGEPAGE)
        numa.interleave(base, self._mapped_bytes)
        self._huge_bytes = 0
        self._registrations: list[tuple[Accelerator, int]] = []
        self.registration_ends: list[int] = []
        """Where each registration ends, ascending, from the start on without gaps; multiples of the
        page.
        """

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that mapped it: nothing is mapped here."""
        return os.getpid() != self._pid

    @property
    def registered_bytes(self) -> int:
        """Bytes from the start that are registered."""
        return self.registration_ends[-1] if self.registration_ends else 0

    @property
    def committed_bytes(self) -> int:
        """Bytes of the pages that hold the touched bytes, at most: whole huge ones where the kernel
        may take these.
        """
        if self.touched_bytes > self._huge_bytes:
            return round_up(self.touched_bytes, PAGE_BYTES)
        return min(round_up(self.touched_bytes, HUGE_PAGE_BYTES), self._huge_bytes)

    def touch(self, end: int, owner: object) -> Touch:
        """Begin to commit the pages from the last registration up to byte `end`.

        Args:
            owner: keeps the mapping alive as long as somebody holds it.
        """
        start, end = self.registered_bytes, round_up(end, PAGE_BYTES)
        touch = self._touch
        if touch is None or touch.start != start or touch.end < end:
            if touch is not None:  # it may write zeros, so must end before anybody writes there
                touch.wait()
            self.touched_bytes = max(self.touched_bytes, end)
            self._touch = touch = Touch(self.address, start, end, owner)
        return touch

    def register(self, accelerator: Accelerator, end: int) -> None:
        """Register the bytes from the last registration's end up to `end`, which is rounded up to a
        page.

        Raises:
            CapacityError: the system refuses; what was registered before stays so.
        """
        end, count = round_up(end, PAGE_BYTES), len(self.registration_ends)
        start = self.registered_bytes
        self._unregister_from(count)  # what Ctrl-C may have left of a release
        try:
            accelerator.register(self.address + start, end - start)
            self._registrations.append((accelerator, self.address + start))
            self.registration_ends.append(end)
        except CapacityError:
            raise
        except BaseException:  # Ctrl-C strikes when the call, which takes seconds, is done
            accelerator.unregister(self.address + start)
            del self._registrations[count:], self.registration_ends[count:]
            raise

    def unregister(self) -> None:
        """Undo every registration; a forked child inherited none."""
        self.registration_ends.clear()
        self._unregister_from(0)

    def release(self, end: int) -> None:
        """Undo the registrations that begin at byte `end` or later, and give their pages back. No
        view of those may be alive.
        """
        kept = [0, *self.registration_ends][:-1]
        num_kept = sum(start < end for start in kept)
        del self.registration_ends[num_kept:]
        self._unregister_from(num_kept)
        if self._touch is not None:
            self._touch.wait()
            self._touch = None
        start, touched = self.registered_bytes, round_up(self.touched_bytes, PAGE_BYTES)
        if touched > start:
            _libc.madvise(self.address + start, touched - start, _MADV_DONTNEED)
            self.touched_bytes = start

    def _unregister_from(self, count: int) -> None:
        while len(self._registrations) > count and not self.is_inherited:
            accelerator, address = self._registrations[-1]
            accelerator.unregister(address)  # which may be done twice, but must not be left out
            self._registrations.pop()

    def advise_huge(self, end: int) -> None:
        """Let the pages up to byte `end` (a multiple of the huge page) be huge ones."""
        end = min(end, self.num_bytes)
        if end > self._huge_bytes:
            _libc.madvise(self.address + self._huge_bytes, end - self._huge_bytes, _MADV_HUGEPAGE)
            self._huge_bytes = end

    def resident_bytes(self) -> int:
        """Bytes of this mapping that are in memory now."""
        pages = ctypes.create_string_buffer(self.num_bytes // PAGE_BYTES)
        _libc.mincore(self.address, self.num_bytes, pages)
        return PAGE_BYTES * sum(page & 1 for page in pages.raw)

    def unmap(self) -> None:
        """Give the addresses back, registrations first. No view may be alive.

        In a forked child the range is not mapped, or is something else's by now; so it is after the
        first call.
        """
        self.unregister()
        num_bytes, self._mapped_bytes = self._mapped_bytes, 0
        if num_bytes and not self.is_inherited:
            _libc.munmap(self._base, num_bytes)


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def available_bytes() -> int:
    """Host memory that may still be committed: what the machine or its container has left, less a
    reserve.

    `SPARSEKV_HOST_MEMORY` (bytes, or with a unit such as `120GiB`) replaces the machine's own
    figure of its total, for virtual machines whose memory grows only as it is used.
    """
    memory = psutil.virtual_memory()
    available = memory.available + _machine_bytes(memory.total) - memory.total
    left = control_groups.memory_left()
    return max(min(available, available if left is None else left) - RESERVED_BYTES, 0)


def total_bytes() -> int:
    """Host memory that this process could have if nobody else used any: the machine's, as above, or
    what its container allows.
    """
    total, limit = _machine_bytes(psutil.virtual_memory().total), control_groups.memory_limit()
    return total if limit is None else min(total, limit)


def check_available(num_bytes: int, what: str) -> None:
    """Raise before `num_bytes` more are committed for `what`.

    Raises:
        CapacityError: the machine would run out.
    """
    if num_bytes > (available := available_bytes()):
        raise CapacityError(
            f"{what}: needs {num_bytes / 2**30:.2f} GiB more of host memory, "
            f"{available / 2**30:.2f} GiB may be used; "
            "lower the context, the batch or max_tokens, or free memory"
        )


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `32GiB`, `32G` (both binary), `32GB` (decimal) or `34359738368`.

    Raises:
        LayoutError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B|)\s*", text, re.IGNORECASE)
    if match is None:
        raise LayoutError(
            f"{text!r} is not a size; write bytes or a number with a unit, as in 32GiB"
        )
    number, prefix, suffix = match.groups()
    base = 1000 if prefix and suffix.lower() == "b" else 1024
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def _machine_bytes(total: int) -> int:
    """The machine's memory: `total`, or what the environment says instead."""
    told = os.environ.get("SPARSEKV_HOST_MEMORY")
    return parse_bytes(told) if told else total
