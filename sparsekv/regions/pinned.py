"""The pinned region's stack: its slots are cut from registered memory only, and none crosses from
one registration into the next (a DMA across both fails, even where they touch).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sparsekv.format import KVGeometry
from sparsekv.regions.pool import Lease, RegionPool
from sparsekv.regions.registration import Registrar, RegistrationRefused
from sparsekv.regions.stack import SegmentStack

CHUNK_BYTES = 16 << 20
"""Most that is registered at once while decoding, a larger segment excepted: kernels cannot be
launched meanwhile, 0.8 ms on an H200's host.
"""
_BULK_BYTES = 1 << 30
"""Most that is registered at once before or between forwards. Some kernels refuse 2 GiB in one
call, and a driver that is busy for minutes stalls other processes.
"""


class PinnedStack(SegmentStack):
    """A stack in registered memory. What is registered beyond its last slot is room for the next.

    Args:
        registrar: registers for the whole cache.
    """

    def __init__(
        self, pool: RegionPool, geometry: KVGeometry, segment_size: int, registrar: Registrar
    ) -> None:
        super().__init__(pool, geometry, segment_size, registrar.accelerator)
        self._registrar = registrar

    @property
    def registered_bytes(self) -> int:
        """Bytes registered, those of slots and those of room."""
        return sum(lease.mapping.registered_bytes for lease in self._leases)

    def room(self, num_rows: int) -> int:
        """Segments that `push` can add without registering anything."""
        stride = self.slot_bytes(num_rows)
        return sum(
            (end - max(start, begin)) // stride
            for lease, start in self._ahead()
            for begin, end in _pieces(lease)
            if end > start
        )

    def push(self, num_segments: int, num_rows: int) -> None:
        """Add uninitialised slots at the end, registering what there is no room for.

        Raises:
            CapacityError: no addresses left, or registration refused; the stack is as before then.
        """
        self.prepare(num_segments, num_rows)
        super().push(num_segments, num_rows)

    def prepare(self, num_segments: int, num_rows: int) -> None:
        """Register at once what `num_segments` more need.

        Raises:
            CapacityError: no addresses left.
            RegistrationRefused: not even one segment more; what was registered before stays so.
        """
        stride = self.slot_bytes(num_rows)
        while (short := num_segments - self.room(num_rows)) > 0:
            lease = self._with_space(short, stride)
            if lease is not None:
                self._register(lease, self._chunk(lease, short, stride, _BULK_BYTES), stride)

    def prepare_chunk(self, num_segments: int, num_rows: int) -> None:
        """Go one step towards room for `num_segments` more, of at most `CHUNK_BYTES` or one
        segment: let other threads commit the pages of a chunk, or register it once they are there.

        Raises:
            As `prepare`.
        """
        stride = self.slot_bytes(num_rows)
        short = num_segments - self.room(num_rows)
        lease = self._with_space(short, stride) if short > 0 else None
        if lease is None:
            return
        count = self._chunk(lease, short, stride, CHUNK_BYTES)
        end = lease.mapping.registered_bytes + count * stride
        self._advise(lease, end)
        if lease.touch(end).is_done:
            self._register(lease, count, stride)

    def release(self) -> None:
        """Undo the registrations beyond the last slot, and give their pages back."""
        for lease, start in self._ahead():
            lease.mapping.release(start)

    def _ahead(self) -> Iterator[tuple[Lease, int]]:
        """The mappings that the next slots come from, and their first free byte."""
        last = self._runs[-1] if self._runs else None
        first = self._leases.index(last.lease) if last else 0
        for i, lease in enumerate(self._leases[first:]):
            yield lease, last.end if last and i == 0 else 0

    def _with_space(self, num_segments: int, stride: int) -> Lease | None:
        """The mapping in which the next registration lies. None: addresses were taken, in memory
        that may have been registered before.
        """
        for lease, _ in self._ahead():
            if lease.mapping.registered_bytes + stride <= lease.mapping.num_bytes:
                return lease
        self._take_addresses(num_segments, stride)
        return None

    @staticmethod
    def _chunk(lease: Lease, num_segments: int, stride: int, most_bytes: int) -> int:
        """How many segments to register at once."""
        space = (lease.mapping.num_bytes - lease.mapping.registered_bytes) // stride
        return min(num_segments, space, max(most_bytes // stride, 1))

    def _register(self, lease: Lease, count: int, stride: int) -> None:
        """Register the next `count` segments of a mapping, or fewer if so many are refused."""
        start = lease.mapping.registered_bytes
        self._advise(lease, start + count * stride)
        while True:
            try:
                return self._registrar.register(lease, start + count * stride)
            except RegistrationRefused:
                if count == 1:
                    raise
                count //= 2

    def _advise(self, lease: Lease, end: int) -> None:
        """Let pages up to `end` be huge ones before they are touched."""
        lease.mapping.advise_huge(self._huge_end(end, end))

    def _place(self, lease: Lease, start: int, stride: int, num_segments: int) -> tuple[int, int]:
        """As in any stack, in registered memory only."""
        for begin, end in _pieces(lease):
            if max(start, begin) + stride <= end:
                return max(start, begin), min(num_segments, (end - max(start, begin)) // stride)
        return start, 0


def _pieces(lease: Lease) -> list[tuple[int, int]]:
    """First and last byte of each registration of a mapping, in order."""
    return list(itertools.pairwise([0, *lease.mapping.registration_ends]))
