"""Streaming the pinned region through the ping-pong buffers, in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sparsekv.device import Event
from sparsekv.format import KVView
from sparsekv.regions import PingPong


def stream(
    ping_pong: PingPong,
    views: tuple[KVView, ...],
    upcoming: tuple[KVView, ...] = (),
    after: Event | None = None,
) -> Iterator[KVView]:
    """Yield the views on the accelerator, chunk by chunk; each is valid, for work on the caller's
    stream, until the next is asked for. The next one is copied meanwhile.

    Args:
        views: what to stream, whole and in order.
        upcoming: what will probably be streamed after it: its first two chunks are copied as soon
            as the buffers are free.
        after: when the bytes of `upcoming` are there; None: they are.
    """
    line = list(ping_pong.chunks(views))
    num_chunks = len(line)
    line += islice(ping_pong.chunks(upcoming, after), 2)
    for i in range(num_chunks):
        for chunk in line[i : i + 2]:
            ping_pong.load(chunk)
        yield ping_pong.take(line[i])
    for chunk in line[num_chunks:]:
        ping_pong.load(chunk)
