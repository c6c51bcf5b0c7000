"""Lending: in a step the CPU may attend to pinned segments too, where they lie. Nothing moves; only
who reads them changes.

The oldest are lent. What is left to the accelerator are then the same runs less some slots at their
beginning, for copies as well as for reading in place; and what has just left the window, and may be
under way to its slot still, is lent last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsekv.checks import check_share
from sparsekv.errors import LayoutError
from sparsekv.format import KVView, joined

HostViews = tuple[tuple[KVView, ...], tuple[KVView, ...]]
"""Of the unpinned stack, and of the pinned one."""

_HALF = 0.5 + 1e-9
"""As the router rounds: a step at the share of the placement borrows nothing."""


@dataclass(frozen=True, slots=True)
class Readers:
    """A layer's host memory by who attends to it in a step."""

    cpu: tuple[KVView, ...]
    """All that is unpinned, and what is borrowed."""
    accelerator: tuple[KVView, ...]
    """The rest of what is pinned, in order."""
    num_borrowed: int
    """Tokens of a sequence that are pinned and that the CPU attends to."""


def check_step_share(share: float | None, placed_share: float) -> None:
    """Raise LayoutError unless a step's CPU share is a number from that of the placement to 1, or
    None.
    """
    if share is None:
        return
    check_share("step_share", share)
    if share < placed_share:
        raise LayoutError(
            f"step_share={share!r}: must be at least {placed_share}, the share at which segments "
            "are placed: the accelerator cannot borrow what is unpinned; place less there"
        )


def num_lent(num_unpinned: int, num_pinned: int, share: float | None) -> int:
    """How many pinned segments the CPU borrows to attend to that part of all segments, to the
    nearest whole one; None: no part is asked for.
    """
    if share is None:
        return 0
    wanted = math.floor(share * (num_unpinned + num_pinned) + _HALF)
    return max(wanted - num_unpinned, 0)


def lend(views: HostViews, count: int) -> Readers:
    """Who attends to what in a step in which the CPU borrows so many pinned segments."""
    unpinned, pinned = views
    if not count:
        return Readers(unpinned, pinned, 0)
    borrowed: list[KVView] = []
    rest: list[KVView] = []
    for view in pinned:
        taken = min(count, view.key.shape[0])
        count -= taken
        if taken:
            borrowed.append(view.segments(0, taken))
        if taken < view.key.shape[0]:
            rest.append(view.segments(taken, view.key.shape[0]))
    num_borrowed = sum(view.num_tokens for view in borrowed)
    return Readers(unpinned + joined(borrowed), tuple(rest), num_borrowed)
