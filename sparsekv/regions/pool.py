"""Mappings that outlive a cache: touching and registering 50 GB takes seconds, so the next cache
reuses them.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from sparsekv.device import Accelerator
from sparsekv.regions.memory import Mapping, available_bytes
from sparsekv.regions.touch import Touch


class Lease:
    """A mapping in use; it returns to its pool when the lease and all views of it are gone."""

    def __init__(self, pool: RegionPool, mapping: Mapping) -> None:
        self.mapping = mapping
        # The buffer, not the lease, decides: a tensor that someone still holds keeps its bytes in
        # place.
        self._buffer = (ctypes.c_char * mapping.num_bytes).from_address(mapping.address)
        weakref.finalize(self._buffer, pool._take_back, mapping).atexit = False
        # What is made under inference_mode could never be written to outside it.
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def touch(self, end: int) -> Touch:
        """Begin to commit the mapping's pages from its last registration up to byte `end`."""
        return self.mapping.touch(end, self._buffer)

    def tensor(
        self, offset: int, shape: tuple[int, int], stride: int, dtype: torch.dtype
    ) -> Tensor:
        """A (count, elements) view of items `stride` bytes apart from byte `offset` on; both fit
        the dtype.
        """
        typed = self._bytes.view(dtype)
        return typed.as_strided(shape, (stride // dtype.itemsize, 1), offset // dtype.itemsize)


class RegionPool:
    """Idle mappings, by use: the segments they were cut for, and whether they are registered.

    Leases may end on any thread and in the middle of any call, so returning one only appends to a
    queue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Mapping] = []
        self._returned: deque[Mapping] = deque()
        self._mappings: list[Mapping] = []
        self._closed = False
        _POOLS.add(self)

    def lease(self, num_bytes: int, segment_bytes: int, accelerator: Accelerator | None) -> Lease:
        """Addresses for at least `num_bytes`, for segments of `segment_bytes`, registered or to be
        so if an accelerator is given.

        Registrations end between segments, so mappings go only to segments of the same size again.
        Idle ones cut for another size are given back to the system, and all that do not fit once
        new memory is short: they were counted as free.

        Raises:
            CapacityError: the system has no addresses left.
        """
        use = (segment_bytes, None if accelerator is None else accelerator.device.type)
        with self._lock:
            self._collect()
            self._drop([m for m in self._idle if m.is_inherited])
            fitting = [m for m in self._idle if m.use == use and m.num_bytes >= num_bytes]
            if fitting:
                # The one most of which is committed already.
                mapping = max(fitting, key=lambda m: m.touched_bytes)
                self._idle.remove(mapping)
            else:
                short = num_bytes > available_bytes()
                self._drop([m for m in self._idle if short or m.use[0] != segment_bytes])
                mapping = Mapping(1 << (num_bytes - 1).bit_length(), use)
                self._mappings.append(mapping)
        return Lease(self, mapping)

    def idle_bytes(self) -> int:
        """Committed bytes of idle mappings: what the next cache gets without new memory."""
        with self._lock:
            self._collect()
            return sum(mapping.touched_bytes for mapping in self._idle)

    def trim(self) -> None:
        """Give every idle mapping back to the system."""
        with self._lock:
            self._collect()
            self._drop(list(self._idle))

    def close(self) -> None:
        """Trim, now and whenever a lease ends from here on."""
        self._closed = True
        self.trim()

    def _take_back(self, mapping: Mapping) -> None:
        self._returned.append(mapping)
        if self._closed and self._lock.acquire(blocking=False):
            try:
                self._collect()
                self._drop(list(self._idle))
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())

    def _drop(self, mappings: list[Mapping]) -> None:
        for mapping in mappings:
            self._idle.remove(mapping)
            self._mappings.remove(mapping)
            mapping.unmap()

    def _unregister_all(self) -> None:
        for mapping in self._mappings:
            mapping.unregister()

    def __del__(self) -> None:
        # Nobody holds a lease any more: each would keep the pool alive.
        self._collect()
        self._drop(list(self._idle))


_POOLS: weakref.WeakSet[RegionPool] = weakref.WeakSet()


def _unregister_at_exit() -> None:
    for pool in _POOLS:
        pool._unregister_all()


# At exit finalizers run in the reverse of the order in which they were made: this one, made before
# any cache, after all of them have waited for their copies.
weakref.finalize(RegionPool, _unregister_at_exit)
