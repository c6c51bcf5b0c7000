"""The segments of one layer in one CPU region, in the order in which they were placed.

A stack grows at its end and is cut from its end; nothing in between ever moves. Slots of equal size
that follow one another in one mapping, and in one registration where the region is registered, form
a run, which is viewed as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.device import Accelerator
from sparsekv.format import KVGeometry, KVView
from sparsekv.regions.memory import HUGE_PAGE_BYTES, round_up
from sparsekv.regions.pool import Lease, RegionPool

_ALIGNMENT = 64
_WASTE_LIMIT = 32
"""A huge page may be partly empty if that is under one part in 32 of what the stack holds."""


@dataclass(slots=True)
class Run:
    """Equal slots, one after the other."""

    lease: Lease
    start: int
    num_rows: int
    stride: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.stride


class SegmentStack:
    """A growing sequence of segments; slot i holds the i-th segment placed in this region.

    Args:
        pool: where mappings come from.
        geometry: what a token stores.
        segment_size: tokens of a segment.
        accelerator: with which a subclass registers the memory; None: with none.
    """

    def __init__(
        self,
        pool: RegionPool,
        geometry: KVGeometry,
        segment_size: int,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._pool = pool
        self._geometry = geometry
        self._segment_size = segment_size
        self._accelerator = accelerator
        self._runs: list[Run] = []
        self._leases: list[Lease] = []
        self.reserved_segments = 16
        """Segments to take addresses for at once."""

    def __len__(self) -> int:
        return sum(run.count for run in self._runs)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots, padding between them included."""
        return sum(run.count * run.stride for run in self._runs)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The mappings in use."""
        return tuple(self._leases)

    def slot_bytes(self, num_rows: int) -> int:
        """Bytes from one slot of `num_rows` rows to the next."""
        row_bytes = self._segment_size * self._geometry.bytes_per_token_per_layer
        return round_up(num_rows * row_bytes, _ALIGNMENT)

    def bytes_to_commit(self, num_segments: int, num_rows: int) -> int:
        """Bytes that `push` would newly commit, at most."""
        needed = num_segments * self.slot_bytes(num_rows)
        if self._runs:
            return max(
                needed - max(self._runs[-1].lease.mapping.touched_bytes - self._runs[-1].end, 0), 0
            )
        return max(needed - (self._leases[0].mapping.touched_bytes if self._leases else 0), 0)

    def push(self, num_segments: int, num_rows: int) -> None:
        """Add uninitialised slots at the end.

        Raises:
            CapacityError: no addresses left; the stack is as before then.
        """
        length = len(self)
        try:
            while num_segments:
                num_segments -= self._extend(num_segments, num_rows)
        except BaseException:
            self.truncate(length)
            raise

    def truncate(self, length: int) -> None:
        """Drop slots from the end until `length` are left; the next ones reuse their memory."""
        excess = len(self) - length
        while excess > 0:
            run = self._runs[-1]
            dropped = min(run.count, excess)
            run.count -= dropped
            excess -= dropped
            if not run.count:
                self._runs.pop()

    def segment(self, slot: int) -> Tensor:
        """(rows, num_kv_heads, segment_size * elements) view of one slot: each row and head is one
        run of keys, then values.
        """
        (run,) = self.slots(slot, 1)
        return run[0]

    def slots(self, first: int, count: int) -> list[Tensor]:
        """(segments, rows, num_kv_heads, segment_size * elements) views of `count` slots from
        `first` on, in order, as few as there can be.
        """
        views = []
        for run in self._runs:
            if count and first < run.count:
                taken = min(run.count - first, count)
                views.append(self._elements(run)[first : first + taken])
                first, count = 0, count - taken
            else:
                first -= run.count
        assert not count, f"{count} slots beyond the end"
        return views

    def runs(self) -> list[Tensor]:
        """The whole stack as (segments, rows, num_kv_heads, segment_size * elements) views, in
        order.
        """
        return [self._elements(run) for run in self._runs]

    def views(self, positions: list[int], row_tables: list[Tensor | None]) -> tuple[KVView, ...]:
        """The first slots, run by run, as many as there are positions.

        Args:
            positions: position in the sequence of each slot's first token.
            row_tables: each slot's logical row -> physical row; None where that is the identity.
        """
        views, first = [], 0
        for run in self._runs:
            last = min(first + run.count, len(positions))
            if first == last:
                break
            elements = self._elements(run)[: last - first]
            key, value = split_elements(elements, self._geometry, self._segment_size)
            rows = row_tables[first:last]
            table = None
            if any(r is not None for r in rows):
                identity = torch.arange(run.num_rows)
                table = torch.stack([identity if r is None else r for r in rows])
            views.append(KVView(key, value, torch.tensor(positions[first:last]), table))
            first = last
        return tuple(views)

    def _elements(self, run: Run) -> Tensor:
        heads, dtype = self._geometry.num_kv_heads, self._geometry.dtype
        per_head = self._segment_size * self._geometry.elements_per_token
        flat = run.lease.tensor(
            run.start, (run.count, run.num_rows * heads * per_head), run.stride, dtype
        )
        return flat.unflatten(1, (run.num_rows, heads, per_head))  # [N, R, H, W * (D + Dv)]

    def _extend(self, num_segments: int, num_rows: int) -> int:
        """Add some slots, as many as lie in one piece; how many."""
        stride = self.slot_bytes(num_rows)
        last = self._runs[-1] if self._runs else None
        lease = last.lease if last else None
        start, count = (
            self._place(lease, last.end, stride, num_segments) if last and lease else (0, 0)
        )
        while not count:
            lease = self._next_lease(lease, num_segments, stride)
            start, count = self._place(lease, 0, stride, num_segments)
        assert lease is not None
        mapping, end = lease.mapping, start + count * stride
        mapping.advise_huge(self._huge_end(end, self.used_bytes + count * stride))
        mapping.touched_bytes = max(mapping.touched_bytes, end)
        joins = (
            last is not None
            and (last.lease, last.end, last.stride, last.num_rows)
            == (lease, start, stride, num_rows)
            and start not in mapping.registration_ends
        )
        if joins and last is not None:
            last.count += count
        else:
            self._runs.append(Run(lease, start, num_rows, stride, count))
        return count

    def _place(self, lease: Lease, start: int, stride: int, num_segments: int) -> tuple[int, int]:
        """Where slots fit from byte `start` of a mapping on, and how many in one piece, 0 if
        none.
        """
        return start, max(min(num_segments, (lease.mapping.num_bytes - start) // stride), 0)

    def _next_lease(self, lease: Lease | None, num_segments: int, stride: int) -> Lease:
        """The mapping after `lease`: one that slots were cut from before, or a new one."""
        following = self._leases.index(lease) + 1 if lease else 0
        if following == len(self._leases):
            self._take_addresses(num_segments, stride)
        return self._leases[following]

    def _take_addresses(self, num_segments: int, stride: int) -> None:
        """One more mapping, of as many addresses again as are in use."""
        wanted = max(num_segments, self.reserved_segments, len(self))
        self._leases.append(self._pool.lease(wanted * stride, stride, self._accelerator))

    @staticmethod
    def _huge_end(end: int, used_bytes: int) -> int:
        """Up to where huge pages may go once `end` bytes of a mapping, and `used_bytes` in all, are
        used.
        """
        above = round_up(end, HUGE_PAGE_BYTES)
        if (above - end) * _WASTE_LIMIT <= used_bytes:
            return above
        return end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def split_elements(elements: Tensor, geometry: KVGeometry, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys (..., tokens, head_dim) and values (..., tokens, head_dim_v) of runs (..., tokens *
    elements), zero-copy.
    """
    key = elements[..., : tokens * geometry.head_dim].unflatten(-1, (tokens, geometry.head_dim))
    if geometry.shared_kv:
        return key, key[..., : geometry.value_dim]
    return key, elements[..., tokens * geometry.head_dim :].unflatten(
        -1, (tokens, geometry.value_dim)
    )
