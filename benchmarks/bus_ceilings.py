"""What the bus gives between registered host memory and the GPU, alone and while the CPU reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.buffer import Buffer, Span
from benchmarks.memory_ceilings import ReadLoad, fill

COPY_BYTES = 64 << 20
"""Of one copy: from this size on a copy runs at the full rate of the bus."""

_HOST_COPIES = 4  # pieces of host memory that copies take turns with
_LEAD = 8  # copies issued before time counts: the host must be there when it begins
_HBM_BYTES = 1 << 30
_LOAD_COPY_BYTES = 16 << 20
"""As a chunk of a cache. Copies of all streams seem to wait in one line: with 512 MiB of a load in
it a step of others took seconds, so two copies are there at a time.
"""


class BusCeiling:
    """Copies of 64 MiB between the current GPU and ordinary memory registered with it.

    Use as a context manager: registered memory must be released before it is unmapped.

    Args:
        num_copies: copies of one measurement.
    """

    def __init__(self, num_copies: int = 48) -> None:
        self._num_copies = num_copies
        self._buffer = Buffer(_HOST_COPIES * COPY_BYTES)
        fill(self._buffer.span)
        self._host = list(self._buffer.tensor().split(COPY_BYTES))
        self._device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()

    def __enter__(self) -> BusCeiling:
        span = self._buffer.span
        _check(torch.cuda.cudart().cudaHostRegister(span.address, span.num_bytes, 0))
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.cuda.synchronize()
        _check(torch.cuda.cudart().cudaHostUnregister(self._buffer.span.address))

    def h2d(self) -> float:
        """GB/s from host to GPU, with nothing else running."""
        return self._measure([(self._device, host) for host in self._host])[0]

    def d2h(self) -> float:
        """GB/s from GPU to host, with nothing else running."""
        return self._measure([(host, self._device) for host in self._host])[0]

    def h2d_while_reading(self, num_threads: int, span: Span) -> tuple[float, float]:
        """GB/s from host to GPU and GB/s of threads reading `span`, over the same interval."""
        with ReadLoad(num_threads, span) as load:
            return self._measure([(self._device, host) for host in self._host], load)

    def begin_h2d(self, num_bytes: int) -> Callable[[], float]:
        """Begin to copy so many bytes from host to GPU; what is returned waits for the end, and
        gives the seconds that the copies took.
        """
        first, last = _mark(), _mark()
        with torch.cuda.stream(self._stream):
            first.record()
            for i, done in enumerate(range(0, num_bytes, COPY_BYTES)):
                piece = slice(0, min(COPY_BYTES, num_bytes - done))
                source = self._host[i % len(self._host)]
                self._device[piece].copy_(source[piece], non_blocking=True)
            last.record()

        def seconds() -> float:
            last.synchronize()
            return first.elapsed_time(last) / 1e3

        return seconds

    def _measure(
        self, pairs: list[tuple[Tensor, Tensor]], load: ReadLoad | None = None
    ) -> tuple[float, float]:
        """GB/s of copies (target, source) in turn, and of the bytes that `load` reads meanwhile."""
        first, last = _mark(), _mark()
        with torch.cuda.stream(self._stream):
            for i in range(_LEAD + self._num_copies):
                if i == _LEAD:
                    first.record()
                target, source = pairs[i % len(pairs)]
                target.copy_(source, non_blocking=True)
            last.record()
        first.synchronize()
        begin, read = time.perf_counter(), load.bytes_read if load else 0
        last.synchronize()
        read, seconds = (load.bytes_read if load else 0) - read, time.perf_counter() - begin
        copied = self._num_copies * COPY_BYTES
        return copied / first.elapsed_time(last) / 1e6, read / seconds / 1e9


class BusLoad:
    """Copies from host to GPU, one after the other, while the body of a `with` statement runs.

    Args:
        bus: whose memory is copied; nothing else of it may be used meanwhile.
    """

    def __init__(self, bus: BusCeiling) -> None:
        self._bus = bus
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._copy)

    def __enter__(self) -> BusLoad:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _copy(self) -> None:
        """With one copy always waiting behind the one under way."""
        wait = self._begin()
        while not self._stop.is_set():
            wait_next = self._begin()
            wait()
            wait = wait_next
        wait()

    def _begin(self) -> Callable[[], float]:
        return self._bus.begin_h2d(_LOAD_COPY_BYTES)


def hbm_copy_gbs(num_copies: int = 16) -> float:
    """GB/s read plus GB/s written by copies of 1 GiB inside the GPU's memory."""
    source = torch.empty(_HBM_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    first, last = _mark(), _mark()
    first.record()
    for _ in range(num_copies):
        target.copy_(source)
    last.record()
    last.synchronize()
    return 2 * num_copies * _HBM_BYTES / first.elapsed_time(last) / 1e6


def _mark() -> torch.cuda.Event:
    """An event to wait for asleep: a host that spins would take a core from the readers."""
    return torch.cuda.Event(enable_timing=True, blocking=True)


def _check(code: Any) -> None:
    if int(code) != 0:
        raise RuntimeError(f"registering memory with the GPU failed with error {int(code)}")
