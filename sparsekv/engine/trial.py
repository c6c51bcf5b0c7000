"""A change of a step's share, kept where steps do not get longer by it.

The costs are what each engine takes for its part. Where steps wait for something else, as they do
where two caches share both engines and take turns, the share that the costs advise may be worse.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

_WORTH = 1.02
"""A step's share stays unless another one promises to make the step this much shorter: what is
prepared and read ahead for one is of no use for another.
"""
_LONGER = 1.03
"""Of the median of a few steps: more than it scatters by mostly."""
_STEPS, _SETTLING = 3, 3
"""That are compared before and after, and that are left out between: the first ones at another
share prepare what they need, and times of earlier ones become known in them.
"""
_HELD = 64
"""Steps for which a share that was returned to is held."""


@dataclass(frozen=True, slots=True)
class _Change:
    share: float
    """Before it."""
    seconds: float
    """Of a step, likewise."""
    gain: float
    """What it promised."""


class Trial:
    """Decides the share of each step by what the costs advise and by how long steps are."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_STEPS)
        """Of the latest steps at the share in use."""
        self._num_settling = 0
        self._is_timed = False
        """Whether the last step was."""
        self._change: _Change | None = None
        """That is on trial."""
        self._worth = _WORTH
        self._num_held = 0

    def note(self, seconds: float) -> None:
        """What a whole step took, before its next share is asked for."""
        self._is_timed = True
        if self._num_settling:
            self._num_settling -= 1
        else:
            self._times.append(seconds)

    def next_share(self, current: float, wanted: float, gain: float) -> float:
        """The share of the next step; asked once after each.

        Args:
            current: that of the last one.
            wanted: the best one by the costs.
            gain: by these, how many times as long a step is at the current one.
        """
        if self._num_held:
            self._num_held -= 1
            if not self._num_held:
                self._worth = _WORTH
        is_timed, self._is_timed = self._is_timed, False
        if not is_timed:  # then nothing tells how a change turns out
            self._change = None
            return self._changed(wanted) if gain > self._worth else current
        if len(self._times) < _STEPS:
            return current
        seconds = median(self._times)
        change, self._change = self._change, None
        if change is not None and seconds > _LONGER * change.seconds:
            # As good a promise is not believed for a while, a better one is.
            self._worth, self._num_held = 1 + 2 * (change.gain - 1), _HELD
            return self._changed(change.share)
        if gain <= self._worth:
            return current
        self._change = _Change(current, seconds, gain)
        return self._changed(wanted)

    def _changed(self, share: float) -> float:
        self._times.clear()
        self._num_settling = _SETTLING
        return share
