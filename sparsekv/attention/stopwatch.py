"""How long the accelerator's part of a step takes: in some of its layers, by events around it."""

from __future__ import annotations

import math
from time import perf_counter

from sparsekv.attention.read_ahead import ReadAhead
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
_CALLERS_PART = 0.125
"""Of a time, at most: one in which an idle accelerator waited longer for what the caller enqueued
says little of the accelerator.
"""
_MOST_UNREAD = 64
"""Times; where the caller is further ahead of the accelerator, layers are left out."""


class Stopwatch:
    """Times one layer in three, others in each step; not for several threads at a time.

    What a step took is read in a later one, if the events have come by then: nothing waits.

    Args:
        accelerator: whose streams are timed.
        num_layers: of a step; they are attended to in order, from 0.
        timings: where a time is noted; before it is wanted there, one layer a step is timed.
        read_ahead: what judges the chunks that are read ahead.
    """

    def __init__(
        self, accelerator: Accelerator, num_layers: int, timings: Recent, read_ahead: ReadAhead
    ) -> None:
        self._accelerator = accelerator
        self._timings = timings
        self._read_ahead = read_ahead
        self._stride = max(min(_EVERY, num_layers - _FIRST_LAYER), 1)
        self._num_steps = 0
        self._first = num_layers
        """Layer that is to be timed, of the step under way."""
        self._events = [
            tuple(accelerator.timed_event() for _ in range(3)) for _ in range(_MOST_UNREAD)
        ]
        """At the start, after what was read ahead, and at the end."""
        self._num_ahead = [0] * _MOST_UNREAD
        self._num_tokens = [0] * _MOST_UNREAD
        self._caller_s = [0.0] * _MOST_UNREAD
        self._began_s = 0.0
        """When the caller began to enqueue what is being timed."""
        self._num_timed = self._num_read = 0
        """So far; the events are used in turn."""

    def is_due(self, layer_idx: int) -> bool:
        """Whether this layer is to be timed; asked for each layer of a step, in order, once."""
        if layer_idx == 0:
            self._read()
            self._num_steps += 1
            self._first = _FIRST_LAYER + -(_FIRST_LAYER + self._num_steps) % self._stride
        if self._num_timed - self._num_read == _MOST_UNREAD or layer_idx < self._first:
            return False
        if not self._timings.is_wanted:
            return layer_idx == self._first
        return (layer_idx - self._first) % self._stride == 0

    def is_first(self, layer_idx: int) -> bool:
        """Whether this layer is the first one of the step under way that is to be timed."""
        return layer_idx == self._first

    def start(self, *, with_caller: bool = False) -> None:
        """The work of the caller's stream from here on is timed.

        Args:
            with_caller: a time counts even where it is mostly the caller's, who enqueues the work.
        """
        slot = self._num_timed % _MOST_UNREAD
        self._num_ahead[slot] = 0
        self._accelerator.current_stream().record_time(self._events[slot][0])
        self._began_s = math.inf if with_caller else perf_counter()

    def lap(self, num_tokens: int) -> None:
        """Up to here it was for so many tokens of a sequence that were read ahead; what follows is
        timed by itself.
        """
        slot = self._num_timed % _MOST_UNREAD
        self._num_ahead[slot] = num_tokens
        self._accelerator.current_stream().record_time(self._events[slot][1])
        self._began_s = perf_counter()

    def stop(self, num_tokens: int) -> None:
        """Up to here, for so many tokens of a sequence."""
        slot = self._num_timed % _MOST_UNREAD
        begin, lap, end = self._events[slot]
        is_ahead = not (lap if self._num_ahead[slot] else begin).has_come()
        if is_ahead or not self._accelerator.has_queue:
            self._caller_s[slot] = 0.0
        else:
            self._caller_s[slot] = perf_counter() - self._began_s
        self._num_tokens[slot] = num_tokens
        self._accelerator.current_stream().record_time(end)
        self._num_timed += 1

    def drop(self) -> None:
        """Forget the times that are not known yet."""
        self._num_read = self._num_timed

    def _read(self) -> None:
        while self._num_read < self._num_timed:
            slot = self._num_read % _MOST_UNREAD
            begin, lap, end = self._events[slot]
            if not end.has_come():
                return
            num_ahead, num_tokens = self._num_ahead[slot], self._num_tokens[slot]
            seconds = end.seconds_since(lap if num_ahead else begin)
            is_callers = self._caller_s[slot] > _CALLERS_PART * seconds
            self._timings.note(num_tokens, math.nan if is_callers else seconds)
            if num_ahead:
                ahead_s = lap.seconds_since(begin)
                self._read_ahead.note(ahead_s / num_ahead, seconds / num_tokens)
            self._num_read += 1
