"""What this machine's memory gives its processors when nothing is computed.

Nothing of the product is imported: the loops are in memory_ceilings.c, compiled when first used.
Other benchmarks measure ceilings between their own rows, on the same memory and number of threads:

    ceiling = ReadCeiling(num_threads, buffer.span)
    for _ in range(rounds):
        ceilings.append(ceiling.measure())
        ...
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buffer import Buffer, Span
from benchmarks.machine import cpus_one_per_core

PIECE_BYTES = 1 << 20
"""What a thread takes at a time; the last ones to finish are late by less than a thousandth."""

_SOURCE = Path(__file__).parent / "memory_ceilings.c"
_FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread")
_READ, _READ_PREFETCH, _WRITE, _WRITE_STREAM, _COPY_MEMCPY, _COPY_STREAM, _FILL = range(7)


@dataclass(frozen=True, slots=True)
class ReadCeiling:
    """Reading: plain loads, and loads with software prefetch; the better counts.

    Attributes:
        num_threads: threads, each pinned to a core of its own.
        span: what is read.
    """

    num_threads: int
    span: Span

    def measure(self, start: int = 0) -> float:
        """Bytes per nanosecond (GB/s) of one pass in each way, the better.

        A pass goes from byte `start`, rounded down to a piece, to the end, and on from the first
        byte. Who goes on from `start` too finds what was read longest ago, and is in no cache.
        """
        return max(self._pass(_READ, start), self._pass(_READ_PREFETCH, start))

    def seconds(self) -> float:
        """Of one pass, from the first byte, with software prefetch as a ReadLoad has it."""
        return self.span.num_bytes / self._pass(_READ_PREFETCH, 0) / 1e9

    def _pass(self, kind: int, start: int) -> float:
        return _gbs(kind, self.num_threads, self.span.address, self.span, start=start)


@dataclass(frozen=True, slots=True)
class WriteCeiling:
    """Writing: glibc's memset, and non-temporal stores; the better counts.

    Attributes:
        num_threads: threads, each pinned to a core of its own.
        span: what is overwritten.
    """

    num_threads: int
    span: Span

    def measure(self) -> float:
        """GB/s of one pass in each way, the better."""
        return max(
            _gbs(kind, self.num_threads, self.span.address, self.span)
            for kind in (_WRITE, _WRITE_STREAM)
        )


@dataclass(frozen=True, slots=True)
class CopyCeiling:
    """Copying, in bytes copied: glibc's memcpy, and non-temporal stores.

    Attributes:
        num_threads: threads, each pinned to a core of its own.
        target: where to; as large as the source.
        source: where from.
    """

    num_threads: int
    target: Span
    source: Span

    def measure(self) -> float:
        """GB/s of the better way."""
        return max(self.memcpy(), self.stream())

    def memcpy(self) -> float:
        """GB/s of glibc's memcpy, in one call for each thread or in pieces; the better."""
        share = -(-self.source.num_bytes // self.num_threads // 256) * 256
        return max(self._pass(_COPY_MEMCPY, share), self._pass(_COPY_MEMCPY, PIECE_BYTES))

    def stream(self) -> float:
        """GB/s of vector loads and non-temporal stores."""
        return self._pass(_COPY_STREAM, PIECE_BYTES)

    def _pass(self, kind: int, piece: int) -> float:
        return _gbs(kind, self.num_threads, self.target.address, self.source, piece)


class ReadLoad:
    """Threads that read `span` over and over while the body of a `with` statement runs.

    Args:
        num_threads: threads, each pinned to a core of its own.
        span: what is read.
    """

    def __init__(self, num_threads: int, span: Span) -> None:
        self._stop = ctypes.c_int32(0)
        self._bytes = ctypes.c_uint64(0)
        self._thread = threading.Thread(target=self._read, args=(num_threads, span))

    @property
    def bytes_read(self) -> int:
        """Bytes read up to now, counted piece by piece."""
        return self._bytes.value

    def __enter__(self) -> ReadLoad:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.value = 1
        self._thread.join()

    def _read(self, num_threads: int, span: Span) -> None:
        stop, done = ctypes.byref(self._stop), ctypes.byref(self._bytes)
        _run(_READ_PREFETCH, num_threads, span.address, span, PIECE_BYTES, stop, done)


def fill(span: Span, num_threads: int | None = None) -> None:
    """Write random numbers: as bfloat16 1/8 to 2 in size, of either sign; the same each time.

    Args:
        span: what is overwritten, and committed if it was not.
        num_threads: threads; None: one for each processor.
    """
    threads = num_threads or len(cpus_one_per_core())
    # The source of this loop is the number of its first byte.
    _run(_FILL, threads, span.address, Span(0, span.num_bytes), PIECE_BYTES)


def filled_buffer(num_bytes: int) -> Buffer:
    """A buffer of random numbers."""
    buffer = Buffer(num_bytes)
    fill(buffer.span)
    return buffer


def read_sum(
    span: Span, num_threads: int, *, prefetch: bool, isa: int | None = None, start: int = 0
) -> int:
    """The sum of the 64-bit words of `span`, modulo 2^64: evidence that all of it is read."""
    kind = _READ_PREFETCH if prefetch else _READ
    _, total = _run(kind, num_threads, span.address, span, PIECE_BYTES, isa=isa, start=start)
    return total


def _gbs(
    kind: int, threads: int, target: int, source: Span, piece: int = PIECE_BYTES, start: int = 0
) -> float:
    seconds, _ = _run(kind, threads, target, source, piece, start=start)
    return source.num_bytes / seconds / 1e9


def _run(
    kind: int,
    num_threads: int,
    target: int,
    source: Span,
    piece: int,
    stop: Any = None,
    bytes_done: Any = None,
    isa: int | None = None,
    start: int = 0,
) -> tuple[float, int]:
    """Seconds and sum of one call of the loops, with the GIL released."""
    if source.address % 64 or target % 64 or source.num_bytes % 256 or not source.num_bytes:
        raise ValueError(
            f"{source} to {target}: addresses must be multiples of 64, the bytes of 256, not 0"
        )
    library = _library()
    cpus = _assigned(cpus_one_per_core(), num_threads)
    total = ctypes.c_uint64()
    seconds = library.ceilings_run(
        kind,
        library.ceilings_best_isa() if isa is None else isa,
        target,
        source.address,
        source.num_bytes,
        piece,
        start // piece,
        (ctypes.c_int32 * num_threads)(*cpus),
        num_threads,
        stop,
        bytes_done,
        ctypes.byref(total),
    )
    if seconds < 0:
        raise RuntimeError(f"{num_threads} threads could not be started: use fewer")
    return seconds, total.value


def _assigned(cpus: Sequence[int], num_threads: int) -> list[int]:
    """A processor for each thread; they share when there are too few."""
    return [cpus[i % len(cpus)] for i in range(num_threads)]


@functools.cache
def _library() -> Any:
    """The loops, compiled."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="ceilings-") as folder:
        path = Path(folder) / "ceilings.so"
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        library = ctypes.CDLL(str(path))
    pointers, sizes = [ctypes.c_void_p] * 2, [ctypes.c_size_t] * 3
    library.ceilings_run.argtypes = [
        *[ctypes.c_int] * 2,
        *pointers,
        *sizes,
        ctypes.c_void_p,
        ctypes.c_int,
        *[ctypes.c_void_p] * 3,
    ]
    library.ceilings_run.restype = ctypes.c_double
    return library


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if path := shutil.which(name) if name else None:
            return path
    raise RuntimeError("no C compiler (looked for $CC, cc, gcc, clang): install one")
