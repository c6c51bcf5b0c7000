"""At which step of a window a layer registers what comes next.

Registering stops launches, so no step should do much of it: the layers take turns over the window's
steps, and are done a little before the window is full.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """What one layer registers while one window fills."""

    num_segments: int
    """Segments placed before this window."""
    num_rows: int
    is_reserved: bool
    """Whether the tokens so far are among those that somebody has asked for."""
    start: int
    """Tokens in the window when decoding of it began."""
    needed: int
    """Segments of this window that are to be pinned, as far as one can tell."""
    wanted: int
    """Segments to have room for in the end, where registering more at once pays."""

    def is_of(self, num_segments: int, num_rows: int, is_reserved: bool) -> bool:
        """Whether it was made for such a window."""
        now = (num_segments, num_rows, is_reserved)
        return (self.num_segments, self.num_rows, self.is_reserved) == now

    def num_due(self, fill: int, window_size: int, layer_idx: int, num_layers: int) -> int:
        """Segments for which this layer should have room once its window holds `fill` tokens."""
        last = window_size - window_size // 8
        steps = (last if self.start < last else window_size) - self.start
        turns = -(-(fill - self.start + 1) * self.needed * num_layers // max(steps, 1))
        return min(max(-(-(turns - layer_idx) // num_layers), 0), self.needed)
