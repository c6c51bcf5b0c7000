"""The way of evicted windows from the accelerator to their slots, beside the computation.

What goes to registered slots is copied there. What goes to others passes a ring of registered
buffers, from which the native library's threads put it in place once steps have made flags, and a
thread of Python's before and without it; where the system registers none, the caller waits for its
copy. Copies only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sparsekv.device import Event
from sparsekv.errors import SparseKVError
from sparsekv.format import PartitionSpec
from sparsekv.kernels.dispatch import Flag, Job, copy_jobs
from sparsekv.regions.registration import Registrar
from sparsekv.regions.window import window_shape

_MOST_BOUNCES = 4
"""Windows that may wait for the host: enough for it to work while the next ones are copied."""
_MOST_BEHIND = 2
"""Layers of a prompt that may wait for their copies, and keep their keys and values meanwhile: the
accelerator always has one more to compute, however long the caller waits for the one before it.
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """When what was sent is there."""

    copied: Event
    """It has left the accelerator: registered slots are filled."""
    placed: tuple[Event, ...]
    """The host has put the rest in its slots."""

    def synchronize(self) -> None:
        self.copied.synchronize()
        for placed in self.placed:
            placed.synchronize()


Pairs = list[tuple[Tensor, Tensor]]
"""Slots, and the registered memory that holds what goes there."""


@dataclass(slots=True)
class _Placing:
    """Jobs that put in place what has left the accelerator at `copied`."""

    copied: Event
    jobs: list[tuple[Job, Pairs]]

    def synchronize(self) -> None:
        self.copied.synchronize()
        while self.jobs:
            job, pairs = self.jobs[-1]
            try:
                job.wait()
            except SparseKVError:  # it has not begun, and never will
                _put(pairs)
            self.jobs.pop()


@dataclass(slots=True)
class _Bounce:
    """Registered host memory of one window, and when it was emptied last."""

    elements: Tensor
    index: int
    """Of its flag, which is set to the turn in which it was filled."""
    emptied: Event | None = None


class Outbox:
    """One stream out of the accelerator. Everything that was sent arrives in the order of sending,
    also if the sender failed midway.
    """

    def __init__(self, registrar: Registrar, spec: PartitionSpec) -> None:
        self._accelerator = registrar.accelerator
        self.stream = self._accelerator.new_stream()
        self._registrar = registrar
        self._spec = spec
        self._ring: list[_Bounce] = []
        self._ring_rows: int | None = None
        self._is_whole = False
        """Whether no more buffers are to be made for the ring."""
        self._turn = 0
        self._behind: deque[Event] = deque()

    def is_ready(self, num_rows: int) -> bool:
        """Whether `prepare` has nothing to do."""
        return self._ring_rows == num_rows and self._is_whole

    def prepare(self, num_rows: int, most: int = _MOST_BOUNCES) -> None:
        """Register buffers for windows of `num_rows`, as many as the system allows, at most so many
        in this call.
        """
        if self._ring_rows != num_rows:
            self.synchronize()
            self._ring, self._ring_rows, self._is_whole = [], num_rows, False
        shape, dtype = window_shape(self._spec, num_rows), self._spec.geometry.dtype
        while most and not self._is_whole:
            most -= 1
            if (elements := self._registrar.buffer(shape, dtype)) is not None:
                self._ring.append(_Bounce(elements, len(self._ring)))
            self._is_whole = elements is None or len(self._ring) == _MOST_BOUNCES

    def retry(self) -> None:
        """Ask again for what the system has refused to register."""
        self._is_whole = len(self._ring) == _MOST_BOUNCES

    def follow(self, event: Event | None = None) -> None:
        """Let what is sent from here on wait for an event; None: for the caller's work so far."""
        self.stream.wait(event or self._accelerator.current_stream().record())

    def keep_up(self) -> None:
        """Return when what was sent before the last such call has left the accelerator: prompts of
        no more than two layers take its memory at a time.
        """
        self._behind.append(self.stream.record())
        if len(self._behind) == _MOST_BEHIND:
            self._behind.popleft().synchronize()

    def send(self, source: Tensor, targets: Sequence[tuple[Tensor, bool]]) -> None:
        """Copy the segments of one window to their slots.

        Args:
            source: (segments, rows, num_kv_heads, segment_size * elements) on the accelerator.
            targets: views of consecutive slots, together as many as there are segments, and whether
                they are registered.
        """
        first, others = 0, []
        for target, is_registered in targets:
            taken = source[first : first + len(target)]
            first += len(target)
            if is_registered:
                self.stream.copy_to_host(target, taken)
            else:
                others.append((target, taken))
        if others:
            self._send_by_host(others, source)

    def arrival(self) -> Arrival:
        """When everything sent so far is there."""
        placed = (bounce.emptied for bounce in self._ring)
        return Arrival(self.stream.record(), tuple(event for event in placed if event is not None))

    def synchronize(self) -> None:
        """Return when everything sent so far is there."""
        self.arrival().synchronize()

    def _send_by_host(self, others: list[tuple[Tensor, Tensor]], window: Tensor) -> None:
        bounce = self._next_bounce(window)
        if bounce is None:
            for target, taken in others:
                self.stream.copy_to_host(target, taken)
            return
        pairs: Pairs = []
        first = 0
        for target, taken in others:
            passing = bounce.elements[first : first + len(taken)]
            first += len(taken)
            self.stream.copy_to_host(passing, taken)
            pairs.append((target, passing))
        bounce.emptied = self._place(bounce, pairs)

    def _place(self, bounce: _Bounce, pairs: Pairs) -> Event:
        """Have the host put in place what is on its way into `bounce`."""
        submit, words = copy_jobs(), self._registrar.flags
        if submit is None or words is None:
            return self.stream.then(partial(_put, pairs))
        flag = Flag(words[1], bounce.index)
        jobs: list[tuple[Job, Pairs]] = []
        for target, passing in pairs:
            # Many tokens a head: the threads share them.
            cut = passing.shape[1], self._spec.segment_tokens * passing.shape[2], -1
            views = (tensor.view(len(passing), *cut) for tensor in (passing, target))
            jobs.append((submit(*views, wait=(flag, self._turn)), [(target, passing)]))
        self.stream.write_flag(flag.words[flag.index], self._turn)
        return _Placing(self.stream.record(), jobs)

    def _next_bounce(self, window: Tensor) -> _Bounce | None:
        self.prepare(window.shape[1])
        if not self._ring:
            return None
        bounce = self._ring[self._turn % len(self._ring)]
        self._turn += 1
        if bounce.emptied is not None:
            bounce.emptied.synchronize()
        return bounce


def _put(pairs: Pairs) -> None:
    for target, passing in pairs:
        target.copy_(passing)
