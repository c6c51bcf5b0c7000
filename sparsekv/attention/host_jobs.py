"""The CPU's part of split attention as jobs of the native library, beside the accelerator.

The query goes to registered memory and a flag starts the job; the caller's stream waits for the
job's flag before it takes the results. Python waits for nothing.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sparsekv.attention.host import HostCalls, Partial, Question
from sparsekv.attention.timings import Recent
from sparsekv.device import Stream
from sparsekv.errors import SparseKVError
from sparsekv.format.views import KVView
from sparsekv.kernels.dispatch import (
    Flag,
    Job,
    JobStatus,
    PreparedAttentionJob,
    attention_jobs,
)
from sparsekv.regions import Registrar

_NUM_FLAGS = 64
_MOST_BYTES = 64 << 20
"""Of registered buffers: longer prompts are attended by calls."""


_Asked = tuple[Job, int]
"""And how many keys one query is asked about; 0: several queries are."""


@dataclass(slots=True)
class _InFlight:
    """What must have ended before the buffers may be freed."""

    begun: list[_Asked] = field(default_factory=list)
    """Not awaited by a stream yet: their flag may never be set."""
    awaited: deque[_Asked] = field(default_factory=deque)
    taker: Stream | None = None
    """Where the last results are taken."""


class HostJobs:
    """The jobs of one cache, one layer after the other, all on one stream or on streams that wait
    for each other. What failed is raised by the next call; until then its results are NaN.

    `begin` does it all; a decode step takes its parts: `room`, `start`, `wait` and `take`.

    Args:
        registrar: where registered memory comes from.
        timings: where it is noted how long jobs of one query ran.
    """

    def __init__(self, registrar: Registrar, timings: Recent) -> None:
        self._registrar = registrar
        self._timings = timings
        self._accelerator = registrar.accelerator
        self._in_flight = _InFlight()
        self._flags: list[tuple[Flag, Tensor]] = []
        """Of the library, and of streams: the first starts jobs; of the others each has one job in
        turn for its end, so that a job that is cancelled sets no flag of another one.
        """
        self._turn = 0
        self._error: SparseKVError | None = None
        self._host = torch.empty(0)
        self._device = torch.empty(0)
        self._mask = torch.empty(0)
        weakref.finalize(self, _end, os.getpid(), self._in_flight)

    def begin(self, question: Question, parts: Sequence[KVView]) -> Callable[[], list[Partial]]:
        """As HostAttention has it. Masks and float64 are for calls, as is what is too large, and
        what finds no registered memory.

        Raises:
            SparseKVError: an earlier job failed.
            CapacityError: no addresses for the buffers, or no memory for a job.
        """
        self.look_back()
        is_for_calls = question.mask is not None or question.query.dtype == torch.float64
        room = None if is_for_calls else self.room(question.query.shape, parts)
        if room is None or not self._has_mask_room(question.key_mask):
            return HostCalls(self._timings).begin(question, parts)
        if self._device.numel() < room.size:
            self._device = self._accelerator.empty((self._host.numel(),), torch.float32)
        stream, device = self._accelerator.current_stream(), self._device[: room.size]
        room.query_in(device).copy_(question.query)
        stream.copy_to_host(room.memory[: room.lse_start], device[: room.lse_start])
        key_mask = None if question.key_mask is None else self._sent_mask(question.key_mask)
        self.start(stream, room.job(parts, question.softmax_scale, key_mask), question.query_start)
        return partial(self._finish, room, device)

    def synchronize(self) -> None:
        """Return when no job runs and all results are taken."""
        self._drop_begun()
        _wait_for_taker(self._in_flight)
        self._let_go_of_ended()

    # The parts of a step, in this order

    def look_back(self) -> None:
        """Drop what a failed step has begun.

        Raises:
            SparseKVError: an earlier job failed.
        """
        self._drop_begun()
        self._let_go_of_ended()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def room(self, shape: torch.Size, parts: Sequence[KVView]) -> Room | None:
        """Registered memory for a query (batch, num_heads, num_queries, head_dim) and for what
        the CPU finds in `parts`; the same as before, unless it has to be larger.

        Returns:
            None: too much, or the system registers none, or there is no native library.
        Raises:
            CapacityError: no addresses left.
        """
        room = Room(self._host, shape, len(parts), parts[0].value.shape[-1])
        if attention_jobs() is None or 4 * room.size > _MOST_BYTES:
            return None
        if not self._flags:
            flags = self._registrar.make_flags()
            if flags is not None:
                words = flags[0, :_NUM_FLAGS]
                self._flags = [(Flag(words, i), word) for i, word in enumerate(words)]
        host = self._larger(self._host, room.size, torch.float32)
        if not self._flags or host is None:
            return None
        self._host = host
        return replace(room, memory=host)

    def is_current(self, room: Room) -> bool:
        """Whether the room is still where the CPU answers."""
        return room.memory is self._host

    def start(self, stream: Stream, job: PreparedAttentionJob, query_start: int) -> None:
        """Let the CPU begin once the work of `stream` so far is done, which stores the query."""
        self._turn += 1
        (begin, word), (end, _) = self._flags[0], self._flag_of_turn()
        begun, num_keys = self._in_flight.begun, job.num_keys if job.num_queries == 1 else 0
        job.submit(
            query_start,
            (begin, self._turn),
            (end, self._turn),
            lambda submitted: begun.append((submitted, num_keys)),
        )
        stream.write_flag(word, self._turn)

    def wait(self, stream: Stream) -> None:
        """Let `stream` wait for the results. The start of their job lies before that on it."""
        stream.wait_flag(self._flag_of_turn()[1], self._turn)

    def take(self, stream: Stream) -> None:
        """Note that the work of `stream` so far has taken the results."""
        in_flight = self._in_flight
        in_flight.taker = stream
        in_flight.awaited.extend(in_flight.begun)
        in_flight.begun.clear()

    def _flag_of_turn(self) -> tuple[Flag, Tensor]:
        return self._flags[1 + self._turn % (len(self._flags) - 1)]

    def _finish(self, room: Room, device: Tensor) -> list[Partial]:
        stream = self._accelerator.current_stream()
        self.wait(stream)
        stream.copy_from_host(device[room.lse_start :], room.memory[room.lse_start : room.size])
        self.take(stream)
        return list(zip(*room.results_in(device), strict=True))

    def _drop_begun(self) -> None:
        """End what a failed step has begun, and wait for no flag of it."""
        begun = self._in_flight.begun
        while begun:
            job, _ = begun[-1]
            job.drop()
            begun.pop()

    def _let_go_of_ended(self) -> None:
        awaited = self._in_flight.awaited
        while awaited:
            job, num_tokens = awaited[0]
            if not job.drop.alive:  # what interrupted `take` left it among those begun, too
                awaited.popleft()
                continue
            status = job.status
            if status == JobStatus.UNENDED:
                return
            if status != JobStatus.DONE:
                try:
                    job.wait()
                except SparseKVError as error:
                    self._error = error
            elif num_tokens and self._timings.is_wanted and (seconds := job.seconds) is not None:
                self._timings.note(num_tokens, seconds)
            awaited.popleft()

    def _larger(self, buffer: Tensor, size: int, dtype: torch.dtype) -> Tensor | None:
        """The buffer, or one of at least `size` elements."""
        if size <= buffer.numel():
            return buffer
        larger = self._registrar.buffer((1 << (size - 1).bit_length(),), dtype)
        self.synchronize()  # jobs may use the one that is let go of
        return larger

    def _has_mask_room(self, key_mask: Tensor | None) -> bool:
        size = 0 if key_mask is None else key_mask.numel()
        mask = self._larger(self._mask, size, torch.bool)
        if mask is not None:
            self._mask = mask
        return mask is not None

    def _sent_mask(self, key_mask: Tensor) -> Tensor:
        host = self._mask[: key_mask.numel()].view(key_mask.shape)
        self._accelerator.current_stream().copy_to_host(host, key_mask.contiguous())
        return host


@dataclass(frozen=True, slots=True)
class Room:
    """How float32 memory is used: the query, each part's lse, each part's out."""

    memory: Tensor
    """Registered."""
    shape: torch.Size
    num_parts: int
    head_dim_v: int

    @property
    def lse_start(self) -> int:
        return self.shape.numel()

    @property
    def out_start(self) -> int:
        return self.lse_start + self.num_parts * self.shape[:-1].numel()

    @property
    def size(self) -> int:
        return self.out_start + self.num_parts * self.shape[:-1].numel() * self.head_dim_v

    def query_in(self, memory: Tensor) -> Tensor:
        """The query where `memory` is used so."""
        return memory[: self.lse_start].view(self.shape)

    def results_in(self, memory: Tensor) -> Partial:
        """(num_parts, batch, num_heads, num_queries, head_dim_v) and the same without the last."""
        rows = (self.num_parts, *self.shape[:-1])
        out = memory[self.out_start : self.size].view(*rows, self.head_dim_v)
        return out, memory[self.lse_start : self.out_start].view(rows)

    def job(
        self, parts: Sequence[KVView], softmax_scale: float, key_mask: Tensor | None = None
    ) -> PreparedAttentionJob:
        """What attends to `parts` on the CPU, as many as there is room for."""
        out, lse = self.results_in(self.memory)
        prepare = attention_jobs()
        assert prepare is not None
        return prepare(
            self.query_in(self.memory),
            [(part.key, part.value, part.positions, part.row_table) for part in parts],
            softmax_scale,
            out=out,
            lse=lse,
            key_mask=key_mask,
        )


def _end(pid: int, in_flight: _InFlight) -> None:
    if os.getpid() != pid:
        return
    for job, _ in in_flight.begun:
        job.drop()
    _wait_for_taker(in_flight)


def _wait_for_taker(in_flight: _InFlight) -> None:
    taker, in_flight.taker = in_flight.taker, None
    if taker is not None:
        taker.record().synchronize()
