"""How much is registered ahead of need, and what becomes of it when the system refuses more: all
layers together, because a segment is in the same region in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv.format import Placement
from sparsekv.regions.layer import LayerStore
from sparsekv.regions.memory import PAGE_BYTES
from sparsekv.regions.pinned import PinnedStack
from sparsekv.regions.registration import Registrar, RegistrationRefused

_MIN_PAGES = 32
"""Registrations end at pages: in fewer of them the rounding would be more than one part in 32."""


def wanted_room(
    stack: PinnedStack, num_rows: int, needed: int, expected: int | None, is_reserved: bool
) -> int:
    """Segments to have room for, so that the memory registered stays near what is asked.

    Args:
        needed: segments of the present window.
        expected: segments that will ever be needed, at most; None: nobody knows.
        is_reserved: whether somebody asked for those.
    """
    # Large pieces are copied faster, but generation may end at any token: what nobody asked for
    # is one part in 20 of what is there, at most.
    growth = len(stack) // (4 if is_reserved else 20)
    fewest = -(-_MIN_PAGES * PAGE_BYTES // stack.slot_bytes(num_rows))
    wanted = max(needed, growth, fewest)
    return wanted if expected is None else min(wanted, expected)


def grant(
    layers: Sequence[LayerStore],
    registrar: Registrar,
    placement: Placement,
    num_pinned: int,
    num_rows: int,
) -> int:
    """Register room for `num_pinned` more segments in every layer, or for as many as the system
    allows.

    Returns:
        How many.
    """
    behind = [layer.num_unreached(placement) for layer in layers]
    if registrar.is_refused:
        rooms = [layer.pinned.room(num_rows) for layer in layers]
        return max(min(num_pinned, *(r - b for r, b in zip(rooms, behind, strict=True))), 0)
    while True:
        try:
            for layer, count in zip(layers, behind, strict=True):
                layer.pinned.prepare(count + num_pinned, num_rows)
            return num_pinned
        except RegistrationRefused as error:
            registrar.give_up(error)
            # Some layers have what others lack; nothing shall be locked that nobody uses.
            release(layers)
            if not num_pinned:
                return 0
            num_pinned //= 2


def release(layers: Sequence[LayerStore]) -> None:
    """Give back what every layer has registered ahead."""
    for layer in layers:
        layer.pinned.release()
