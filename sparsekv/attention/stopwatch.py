"""How long the accelerator's part of a step takes: in some of its layers, by events around it."""

from __future__ import annotations

from sparsekv.attention.timings import Recent
from sparsekv.device import Accelerator

_FIRST_LAYER = 2
"""The layers before it are not like the others: what they read ahead had all the time of the
model's last layers, of its head and of the choice of a token.
"""
_EVERY = 3
"""One layer in so many, others in each step: enough times to judge a change after a few steps. At
least one a step.
"""
_MOST_UNREAD = 64
"""Times; where the caller is further ahead of the accelerator, layers are left out."""


class Stopwatch:
    """Times one layer in three, others in each step; not for several threads at a time.

    What a step took is read in a later one, if the events have come by then: nothing waits.

    Args:
        accelerator: whose streams are timed.
        num_layers: of a step; they are attended to in order, from 0.
        timings: where a time is noted; nothing is timed before it is wanted there.
    """

    def __init__(self, accelerator: Accelerator, num_layers: int, timings: Recent) -> None:
        self._accelerator = accelerator
        self._timings = timings
        self._stride = max(min(_EVERY, num_layers - _FIRST_LAYER), 1)
        self._num_steps = 0
        self._events = [
            (accelerator.timed_event(), accelerator.timed_event()) for _ in range(_MOST_UNREAD)
        ]
        self._num_tokens = [0] * _MOST_UNREAD
        self._num_timed = self._num_read = 0
        """So far; the events are used in turn."""

    def is_due(self, layer_idx: int) -> bool:
        """Whether this layer is to be timed; asked for each layer of a step, in order, once."""
        if layer_idx == 0:
            self._read()
            self._num_steps += 1
        if not self._timings.is_wanted or self._num_timed - self._num_read == _MOST_UNREAD:
            return False
        return layer_idx >= _FIRST_LAYER and (layer_idx + self._num_steps) % self._stride == 0

    def start(self) -> None:
        """The work of the caller's stream from here on is timed."""
        begin, _ = self._events[self._num_timed % _MOST_UNREAD]
        self._accelerator.current_stream().record_time(begin)

    def stop(self, num_tokens: int) -> None:
        """Up to here, for so many tokens of a sequence."""
        slot = self._num_timed % _MOST_UNREAD
        self._num_tokens[slot] = num_tokens
        self._accelerator.current_stream().record_time(self._events[slot][1])
        self._num_timed += 1

    def drop(self) -> None:
        """Forget the times that are not known yet."""
        self._num_read = self._num_timed

    def _read(self) -> None:
        while self._num_read < self._num_timed:
            slot = self._num_read % _MOST_UNREAD
            begin, end = self._events[slot]
            if not end.has_come():
                return
            self._timings.note(self._num_tokens[slot], end.seconds_since(begin))
            self._num_read += 1
