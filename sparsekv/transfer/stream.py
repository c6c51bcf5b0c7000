"""Streaming the pinned region through the ping-pong buffers, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparsekv.format import KVView
from sparsekv.regions import PingPong


def stream(ping_pong: PingPong, views: Sequence[KVView]) -> Iterator[KVView]:
    """Yield the views on the accelerator, chunk by chunk; each is valid until the second one after
    it is asked for.
    """
    turn = 0
    for view in views:
        for first in range(0, view.key.shape[0], ping_pong.segments_per_chunk):
            yield ping_pong.load(turn, _slots(view, first, first + ping_pong.segments_per_chunk))
            turn += 1


def _slots(view: KVView, first: int, last: int) -> KVView:
    table = None if view.row_table is None else view.row_table[first:last]
    return KVView(view.key[first:last], view.value[first:last], view.positions[first:last], table)
