"""The way of evicted windows from the accelerator to their slots, beside the computation.

What goes to registered slots is copied there. What goes to others passes a ring of registered
buffers, from which the native library's threads put it in place once steps have made flags: the
stream itself waits for them before it fills a buffer again, and the caller for nothing. Before that
and without the library a thread of Python's puts it in place; where the system registers none, the
caller waits for its copy. Copies only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from sparsekv.device import Event, Stream
from sparsekv.errors import CacheStateError, SparseKVError
from sparsekv.format import PartitionSpec
from sparsekv.kernels.dispatch import Flag, Job, JobStatus, copy_jobs
from sparsekv.regions.registration import NUM_FLAGS, Registrar
from sparsekv.regions.window import window_shape

_MOST_BOUNCES = 4
"""Windows that may wait for the host: enough for it to work while the next ones are copied."""
_MOST_PLACINGS = NUM_FLAGS - _MOST_BOUNCES
"""Each has a flag of its own for its end: were it shared, one that is cancelled would tell that an
earlier one has ended.
"""
_MOST_BEHIND = 2
"""Layers of a prompt that may wait for their copies, and keep their keys and values meanwhile: the
accelerator always has one more to compute, however long the caller waits for the one before it.
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """When what was sent is there."""

    copied: Event
    """It has left the accelerator: registered slots are filled."""
    placed: tuple[Placing, ...]
    """The host has put the rest in its slots."""

    def synchronize(self) -> None:
        self.copied.synchronize()
        for placed in self.placed:
            placed.synchronize()


Pairs = list[tuple[Tensor, Tensor]]
"""Registered memory, and the slots where its contents go."""


class Placing(Protocol):
    """The host puts in place what lies in a bounce."""

    def is_done(self) -> bool:
        """Whether it has; waits for nothing."""

    def synchronize(self) -> None:
        """Return when it has."""

    def hold(self, stream: Stream) -> None:
        """Let what follows on `stream` begin when it has."""


class _PlacingByFunction:
    """A thread of Python's does."""

    def __init__(self, stream: Stream, pairs: Pairs) -> None:
        self._is_done = False
        self._event = stream.then(partial(self._run, pairs))

    def _run(self, pairs: Pairs) -> None:
        _put(pairs)
        self._is_done = True

    def is_done(self) -> bool:
        return self._is_done

    def synchronize(self) -> None:
        self._event.synchronize()

    def hold(self, stream: Stream) -> None:
        stream.wait(self._event)


@dataclass(slots=True)
class _PlacingByJob:
    """The native library's threads do."""

    pairs: Pairs
    filling: _Filling
    """The last one of its bounce, which is not held: it holds this."""
    done: tuple[Tensor, int]
    """The flag that the job sets, whichever way it ends, and to what."""
    job: Job | None = None
    copied: Event | None = None
    """The bounce is full; None: the sender has failed."""
    is_in_place: bool = False
    """Known to be."""

    def begin(self, job: Job) -> None:
        self.job = job

    def is_done(self) -> bool:
        if self.is_in_place or self.copied is None or self.job is None:
            return self.is_in_place
        return self.job.status == JobStatus.DONE

    def synchronize(self) -> None:
        if self.is_in_place or self.job is None:
            return
        if self.copied is None:
            self.job.drop()
            return
        self.copied.synchronize()
        try:
            self.job.wait()
        except SparseKVError as error:
            if self.filling.turn != self.done[1]:
                raise CacheStateError(
                    "a segment on its way to the unpinned region is lost, since the job that takes "
                    f"it there did not run ({error}): reset the cache"
                ) from error
            _put(self.pairs)
        self.is_in_place = True

    def hold(self, stream: Stream) -> None:
        stream.wait_flag(*self.done)


@dataclass(slots=True)
class _Filling:
    turn: int = 0
    """In which the bounce was filled, or will be."""


@dataclass(slots=True)
class _Bounce:
    """Registered host memory of one window."""

    elements: Tensor
    index: int
    """Of its flag, which is set to the turn in which it was filled."""
    last: _Filling = field(default_factory=_Filling)
    placing: Placing | None = None
    """Of what it holds; None: nothing yet."""


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
        self._placings: deque[Placing] = deque()
        """Those that may not be done, in the order of their turns."""
        self._unasked: list[Placing] = []
        """Those that no `arrival` has told of."""
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
        no more than two layers are being copied while the next one attends to itself.
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
        """When everything is there that was sent since the last such call."""
        placings, self._unasked = tuple(self._unasked), []
        return Arrival(self.stream.record(), placings)

    def synchronize(self) -> None:
        """Return when nothing is under way. What is lost is told to who waits for its arrival."""
        self.stream.synchronize()
        for placing in self._placings:
            with suppress(CacheStateError):
                placing.synchronize()
        self._placings.clear()
        self._unasked.clear()

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
            pairs.append((passing, target))
        bounce.placing = self._begin(bounce, pairs)
        self._unasked.append(bounce.placing)

    def _next_bounce(self, window: Tensor) -> _Bounce | None:
        """One that the stream may fill from here on; None: there is none."""
        self.prepare(window.shape[1])
        if not self._ring:
            return None
        while self._placings and (
            self._placings[0].is_done() or len(self._placings) == _MOST_PLACINGS
        ):
            with suppress(CacheStateError):
                self._placings[0].synchronize()
            self._placings.popleft()
        bounce = self._ring[self._turn % len(self._ring)]
        self._turn += 1
        if bounce.placing is not None:
            bounce.placing.hold(self.stream)
        bounce.last.turn = self._turn
        return bounce

    def _begin(self, bounce: _Bounce, pairs: Pairs) -> Placing:
        """Have the host put in place what is on its way into `bounce`."""
        submit, flags = copy_jobs(), self._registrar.flags
        if submit is None or flags is None:
            function = _PlacingByFunction(self.stream, pairs)
            self._placings.append(function)
            return function
        words, turn = flags[1], bounce.last.turn
        filled, done = bounce.index, _MOST_BOUNCES + turn % _MOST_PLACINGS
        copies = [tuple(map(self._as_tokens, pair)) for pair in pairs]
        placing = _PlacingByJob(pairs, bounce.last, (words[done], turn))
        self._placings.append(placing)
        submit(copies, (Flag(words, filled), turn), (Flag(words, done), turn), placing.begin)
        self.stream.write_flag(words[filled], turn)
        placing.copied = self.stream.record()
        return placing

    def _as_tokens(self, segments: Tensor) -> Tensor:
        """Many tokens a head: the threads share them."""
        count, rows, num_kv_heads, _ = segments.shape
        return segments.view(count, rows, num_kv_heads * self._spec.segment_tokens, -1)


def _put(pairs: Pairs) -> None:
    for passing, target in pairs:
        target.copy_(passing)
