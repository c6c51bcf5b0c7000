"""The CPU's part of split attention as jobs of the native library, beside the accelerator.

The query goes to registered memory and a flag starts the jobs; the caller's stream waits for their
flags before it takes the results. Python waits for nothing.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sparsekv.attention.host import HostCalls, Partial, Question
from sparsekv.device import Event
from sparsekv.errors import SparseKVError
from sparsekv.format.views import KVView
from sparsekv.kernels.dispatch import Flag, Job, JobStatus, partial_attention_jobs
from sparsekv.regions import Registrar

_MOST_BYTES = 64 << 20
"""Of registered buffers: longer prompts are attended by calls."""
_NUM_FLAGS = 64
"""One to start the jobs, and one for the end of each."""


@dataclass(slots=True)
class _InFlight:
    """What must have ended before the buffers may be freed."""

    begun: list[Job] = field(default_factory=list)
    """Not awaited by a stream yet: their flag may never be set."""
    awaited: deque[Job] = field(default_factory=deque)
    taken: Event | None = None
    """When the last results were taken."""


class HostJobs:
    """The jobs of one cache, one layer after the other, all on one stream or on streams that wait
    for each other. What failed is raised by the next call; until then its results are NaN.
    """

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._accelerator = registrar.accelerator
        self._in_flight = _InFlight()
        self._flags = torch.empty(0)
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
        self._drop_begun()
        self._raise_failed()
        submit = partial_attention_jobs()
        room = _Room(question.query.shape, len(parts), parts[0].value.shape[-1])
        mask_size = 0 if question.key_mask is None else question.key_mask.numel()
        if (
            submit is None
            or question.mask is not None
            or question.query.dtype == torch.float64
            or len(parts) >= _NUM_FLAGS
            or 4 * room.size > _MOST_BYTES
            or not self._make_room(room.size, mask_size)
        ):
            return HostCalls().begin(question, parts)
        stream = self._accelerator.current_stream()
        room.query(self._device).copy_(question.query)
        # A job that does not get to its end leaves these as they are.
        self._device[room.lse_start : room.out_start].fill_(torch.nan)
        stream.copy_to_host(self._host[: room.out_start], self._device[: room.out_start])
        key_mask = None if question.key_mask is None else self._sent_mask(question.key_mask)
        self._turn += 1
        for i, part in enumerate(parts):
            out, lse = room.result(self._host, i)
            job = submit(
                room.query(self._host),
                part.key,
                part.value,
                part.positions,
                question.softmax_scale,
                row_table=part.row_table,
                query_start=question.query_start,
                key_mask=key_mask,
                out=out,
                lse=lse,
                wait=(Flag(self._flags, 0), self._turn),
                done=(Flag(self._flags, 1 + i), self._turn),
            )
            self._in_flight.begun.append(job)
        stream.write_flag(self._flags[0], self._turn)
        return partial(self._finish, room)

    def synchronize(self) -> None:
        """Return when no job runs and all results are taken."""
        self._drop_begun()
        if self._in_flight.taken is not None:
            self._in_flight.taken.synchronize()
        self._let_go_of_ended()

    def _finish(self, room: _Room) -> list[Partial]:
        stream, in_flight = self._accelerator.current_stream(), self._in_flight
        # Each of these flags has a job whose start lies before it on this stream.
        for i in range(room.num_parts):
            stream.wait_flag(self._flags[1 + i], self._turn)
        results = slice(room.lse_start, room.size)
        stream.copy_from_host(self._device[results], self._host[results])
        in_flight.taken = stream.record()
        in_flight.awaited.extend(in_flight.begun)
        in_flight.begun.clear()
        return [room.result(self._device, i) for i in range(room.num_parts)]

    def _drop_begun(self) -> None:
        """End what a failed step has begun, and wait for no flag of it."""
        begun = self._in_flight.begun
        while begun:
            begun[-1].cancel()
            with suppress(SparseKVError):
                begun[-1].wait()
            begun.pop()

    def _raise_failed(self) -> None:
        self._let_go_of_ended()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _let_go_of_ended(self) -> None:
        awaited = self._in_flight.awaited
        while awaited and awaited[0].status != JobStatus.UNENDED:
            try:
                awaited[0].wait()
            except SparseKVError as error:
                self._error = error
            awaited.popleft()

    def _make_room(self, size: int, mask_size: int) -> bool:
        """Have buffers of so many elements; False where the system does not register them."""
        if (flags := self._larger(self._flags, _NUM_FLAGS, torch.int32)) is None:
            return False
        self._flags = flags
        if (host := self._larger(self._host, size, torch.float32)) is None:
            return False
        self._host = host
        if (mask := self._larger(self._mask, mask_size, torch.bool)) is None:
            return False
        self._mask = mask
        if host.numel() > self._device.numel():
            self._device = self._accelerator.empty((host.numel(),), torch.float32)
        return True

    def _larger(self, buffer: Tensor, size: int, dtype: torch.dtype) -> Tensor | None:
        """The buffer, or one of at least `size` elements."""
        if size <= buffer.numel():
            return buffer
        larger = self._registrar.buffer((1 << (size - 1).bit_length(),), dtype)
        self.synchronize()  # jobs may use the one that is let go of
        return larger

    def _sent_mask(self, key_mask: Tensor) -> Tensor:
        host = self._mask[: key_mask.numel()].view(key_mask.shape)
        self._accelerator.current_stream().copy_to_host(host, key_mask.contiguous())
        return host


@dataclass(frozen=True, slots=True)
class _Room:
    """How a buffer of float32 is used: the query, each part's lse, each part's out."""

    shape: torch.Size
    num_parts: int
    head_dim_v: int

    @property
    def num_rows(self) -> int:
        return self.shape[:-1].numel()

    @property
    def lse_start(self) -> int:
        return self.shape.numel()

    @property
    def out_start(self) -> int:
        return self.lse_start + self.num_parts * self.num_rows

    @property
    def size(self) -> int:
        return self.out_start + self.num_parts * self.num_rows * self.head_dim_v

    def query(self, memory: Tensor) -> Tensor:
        return memory[: self.lse_start].view(self.shape)

    def result(self, memory: Tensor, part_idx: int) -> Partial:
        """(batch, num_heads, num_queries, head_dim_v) and (batch, num_heads, num_queries)."""
        lses = memory[self.lse_start : self.out_start].view(-1, *self.shape[:-1])
        outs = memory[self.out_start : self.size].view(-1, *self.shape[:-1], self.head_dim_v)
        return outs[part_idx], lses[part_idx]


def _end(pid: int, in_flight: _InFlight) -> None:
    if os.getpid() != pid:
        return
    for job in in_flight.begun:
        job.cancel()
    if in_flight.taken is not None:
        in_flight.taken.synchronize()
