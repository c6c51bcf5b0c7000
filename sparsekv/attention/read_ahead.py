"""Whether it pays to copy a layer's first chunks before its query is there.

Copies wait in line with those of everybody else who uses the bus, which reading in place does not:
beside another one's copies, chunks that were asked for early come late.
"""

from __future__ import annotations

from statistics import median

_ENOUGH = 9
"""Layers that are judged together: others' copies come and go."""
_LATE, _SOON = 1.5, 1.1
"""Times as long as reading the same in place would take: from where on chunks are not worth their
wait, and below which they are again.
"""


class ReadAhead:
    """Judges by what a few layers' chunks took, beside what these layers read in place.

    Attributes:
        pays: whether to go on; where it does not, a layer now and then is to be tried.
    """

    def __init__(self) -> None:
        self.pays = True
        self._ratios: list[float] = []

    def note(self, ahead_s: float, in_place_s: float) -> None:
        """Of one layer.

        Args:
            ahead_s: a token's part of the wait for the chunks, and of attention to them; seconds.
            in_place_s: that of a token that was read in place.
        """
        if in_place_s <= 0:  # of a clock that jumped
            return
        self._ratios.append(ahead_s / in_place_s)
        if len(self._ratios) < _ENOUGH:
            return
        self.pays = median(self._ratios) < (_LATE if self.pays else _SOON)
        self._ratios.clear()
