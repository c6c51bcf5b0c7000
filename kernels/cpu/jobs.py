"""Jobs: operations that wait for a flag in memory and then run on the library's threads.

No Python runs between the flag and the result, and a running job does not hold the GIL. A job
writes a status word and another flag when it ends, whichever way it ends, so that a device which
waits for that flag never waits for ever. `prepared_job` has those of a decode step.
"""

import ctypes
import enum
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekv.errors import CacheStateError, CapacityError, LayoutError, SparseKVError
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu.gather import copy_call, error_of_copy
from sparsekv.kernels.cpu.library import backend, native_library
from sparsekv.kernels.cpu.partial_attention import (
    check_inputs,
    check_scale,
    check_tensor,
    check_visibility,
    error_of,
    is_contiguous_at_last,
    native_call,
)

__all__ = [
    "Flag",
    "Job",
    "JobStatus",
    "Signal",
    "cancel_jobs",
    "check_in_place",
    "job_library",
    "start",
    "submit_copies",
    "submit_partial_attention",
]

_NO_THREAD = 8
_SLICE_SECONDS = 0.05  # Python looks for signals between waits of this length

# Tensors that jobs use, with what the library writes of them: a number, 0 until there is a job.
# They are here before the library has them, and leave only after it has said that the job ended,
# whatever interrupts Python meanwhile.
_in_use: dict[int, tuple[Any, ...]] = {}


class JobStatus(enum.IntEnum):
    """Values of a status word."""

    UNENDED = 0
    """Waiting or running."""
    DONE = 1
    FAILED = 2
    CANCELLED = 3
    """Before it began: nothing was written but status and flag."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One word of a contiguous int32 tensor in the CPU's memory, which may be shared or pinned.

    Values are unsigned and wrap around at 2^32.
    """

    words: Tensor
    index: int = 0

    def __post_init__(self) -> None:
        words = self.words
        check_tensor("words", words)
        if words.dtype != torch.int32 or not words.is_contiguous():
            raise LayoutError(
                f"flags in {words.dtype} with strides {words.stride()}: must be int32, contiguous; "
                "make them so"
            )
        if not isinstance(self.index, int) or not 0 <= self.index < words.numel():
            raise LayoutError(f"flag {self.index!r} of {words.numel()}: must be one of them")

    @property
    def address(self) -> int:
        return self.words.data_ptr() + 4 * self.index

    @property
    def value(self) -> int:
        """The word now; what was written before it was set is read after it."""
        return int(job_library().sparsekv_load_flag(self.address))

    def set(self, value: int) -> None:
        """Write value % 2^32, after all that was written before.

        Raises:
            LayoutError: it is no whole number.
        """
        _check_whole(value)
        job_library().sparsekv_store_flag(self.address, value % 2**32)


class Signal(ctypes.Structure):
    """struct sparsekv_signal of api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("wait", "done", "status", "ran", "unless_done")),
        ("num_unless_done", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("wait_value", "done_value")),
    )


class _Room(ctypes.Structure):
    """What the library writes of one job."""

    _fields_ = (
        ("number", ctypes.c_int64),  # 0: it has no such job
        *((name, ctypes.c_int64) for name in ("began_ns", "ended_ns")),
    )


_RAN_OFFSET = _Room.began_ns.offset


class Job:
    """A submitted operation; made by the functions that submit.

    A job that is dropped while it waits is cancelled; one that runs is waited for; one that the
    library has not is none. So no memory is
    freed that a job uses, no forgotten job is left waiting, and the exit of the interpreter hangs
    on none.
    """

    def __init__(
        self,
        room: _Room,
        results: tuple[Tensor, ...],
        error_of: Callable[[int], SparseKVError],
    ) -> None:
        self._room = room
        self._results = results
        self._error_of = error_of
        self.drop = weakref.finalize(self, _release, room)

    @property
    def _number(self) -> int:
        number: int = self._room.number
        return number

    @property
    def status(self) -> JobStatus:
        """How the job ended, or that it has not.

        Raises:
            CacheStateError: the job belongs to the process that this one was forked from.
        """
        return self._look(0.0)[0]

    @property
    def seconds(self) -> float | None:
        """For how long the job ran, without its wait for the flag; None: it has not ended, or never
        ran.
        """
        room = self._room
        ended_ns = room.ended_ns  # is written after the other
        return 1e-9 * (ended_ns - room.began_ns) if ended_ns else None

    def wait(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """Results of the job, once it is done; can be interrupted, which leaves the job as it is.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: the job has not ended by then; it goes on.
            CapacityError: the job failed for want of memory.
            LayoutError: the job failed for another reason.
            CacheStateError: the job was cancelled, or belongs to the process that this one was
                forked from.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE_SECONDS if end is None else end - time.monotonic()
            status, error = self._look(min(left, _SLICE_SECONDS))
            if status != JobStatus.UNENDED:
                break
            if left <= 0:
                raise TimeoutError(
                    f"job {self._number} has not ended after {timeout} s: set its flag, wait "
                    "longer, or cancel it"
                )
        if status == JobStatus.CANCELLED:
            raise CacheStateError(
                f"job {self._number} was cancelled: it has no results; submit it again"
            )
        if status == JobStatus.FAILED:
            raise self._error_of(error)
        return self._results

    def cancel(self) -> None:
        """End the job as cancelled if it has not begun, else let it complete; returns at once.

        Raises:
            CacheStateError: the job belongs to the process that this one was forked from.
        """
        self._check(job_library().sparsekv_job_cancel(self._number))

    def _look(self, seconds: float) -> tuple[JobStatus, int]:
        status, error = ctypes.c_int32(), ctypes.c_int32()
        places = ctypes.byref(status), ctypes.byref(error)
        self._check(job_library().sparsekv_job_wait(self._number, seconds, *places))
        return JobStatus(status.value), error.value

    def _check(self, code: int) -> None:
        if code != 0:
            raise CacheStateError(
                f"job {self._number} belongs to the process that this one was forked from: submit "
                "it again here"
            )


Keep = Callable[[Job], None]
"""Takes a job where it can be found to be dropped, whatever interrupts Python: the frames of an
error that somebody keeps would keep it too, waiting for a flag that others use.
"""


def submit_partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    softmax_scale: float,
    *,
    row_table: Tensor | None = None,
    query_start: int = 0,
    key_mask: Tensor | None = None,
    key_start: Tensor | None = None,
    sliding_window: int | None = None,
    blocks: BlockLists | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    wait: tuple[Flag, int] | None = None,
    done: tuple[Flag, int] | None = None,
    status: Flag | None = None,
) -> Job:
    """Partial attention as a job, whose results are (out, lse).

    positions, row_table and key_start are copied now. All else is read after the flag was set,
    where it lies: nothing is converted, and wrong block lists make the job fail. Jobs start in the
    order in which they become ready, and may run at the same time: one that reads what another
    writes must wait for its flag.

    Args:
        query: as for partial_attention, and float32 with a contiguous last dimension.
        key_mask: as for partial_attention, and with a contiguous last dimension.
        blocks: as for partial_attention, and contiguous.
        out: (batch, num_heads, num_queries, head_dim_v) float32, contiguous; None: a new tensor.
        lse: (batch, num_heads, num_queries) float32, contiguous; None: a new tensor.
        wait: flag and value: the job starts when int32(flag - value) >= 0; None: at once.
        done: flag and the value that it gets when the job ends, after the status.
        status: word that is UNENDED from now on and gets another JobStatus when the job ends.

    Raises:
        LayoutError: a dtype, device, shape or stride breaks a rule, or there is no native library;
            nothing has been submitted.
        CapacityError: no memory or no thread for the job.
    """
    library = job_library()
    check_inputs(query, key, value, positions, row_table, key_mask, key_start)
    check_scale(softmax_scale)
    check_visibility(query, key, query_start, sliding_window, blocks)
    uses = [query, key, value]
    check_in_place("query", query, torch.float32, is_contiguous_at_last(query))
    if key_mask is not None:
        check_in_place("key_mask", key_mask, torch.bool, is_contiguous_at_last(key_mask))
        uses.append(key_mask)
    if blocks is not None:
        for name, table in (("indices", blocks.indices), ("num_blocks", blocks.num_blocks)):
            check_in_place(name, table, torch.int64, table.is_contiguous())
            uses.append(table)
    shape = (*query.shape[:3], value.shape[-1])
    out = _room("out", out, shape)
    lse = _room("lse", lse, shape[:3])
    call = native_call(
        query,
        key,
        value,
        positions.contiguous(),
        softmax_scale,
        out,
        lse,
        row_table=None if row_table is None else row_table.contiguous(),
        query_start=query_start,
        key_mask=key_mask,
        key_start=None if key_start is None else key_start.contiguous(),
        sliding_window=sliding_window,
        blocks=blocks,
    )
    signal = _signal(wait, done, status)
    flags = [word[0] for word in (wait, done) if word is not None] + ([status] if status else [])
    return start(
        lambda *places: library.sparsekv_submit_partial_attention(ctypes.byref(call), 1, *places),
        signal,
        (out, lse),
        (*uses, *(flag.words for flag in flags)),
        functools.partial(error_of, call=call),
    )


def submit_copies(
    copies: Sequence[tuple[Tensor, Tensor]],
    wait: tuple[Flag, int] | None = None,
    done: tuple[Flag, int] | None = None,
    keep: Keep | None = None,
) -> Job:
    """Copies of segments to their places, one after the other, as a job, whose results are the
    places; `copy_segment` of kernels.dispatch defines each.

    Args:
        copies: at least one source, read after the flag was set, and its place: both (rows,
            num_kv_heads, tokens, dim).
        wait, done: as `submit_partial_attention` has them.
        keep: as `start` has it.

    Raises:
        LayoutError: as there.
        CapacityError: no memory or no thread for the job.
    """
    library, calls = job_library(), [copy_call(*copy) for copy in copies]
    if not calls:
        raise LayoutError("0 copies: a job has at least one; give the segments")
    array = (type(calls[0]) * len(calls))(*calls)
    return start(
        functools.partial(library.sparsekv_submit_gather_blocks, array, len(calls)),
        _signal(wait, done, None),
        tuple(out for _, out in copies),
        (
            *(source for source, _ in copies),
            *(word[0].words for word in (wait, done) if word is not None),
        ),
        error_of_copy,
        keep,
    )


def cancel_jobs() -> None:
    """End all jobs of this process that have not begun, as cancelled."""
    job_library().sparsekv_cancel_jobs()


def start(
    submit: Callable[..., int],
    signal: Signal,
    results: tuple[Tensor, ...],
    uses: tuple[Tensor, ...],
    error_of: Callable[[int], SparseKVError],
    keep: Keep | None = None,
) -> Job:
    """The job that `submit`, a function of the library that takes a signal and room for a number,
    makes; `uses`: what it reads, flags too; `keep` is given the job before the library has it.

    Raises:
        SparseKVError: it makes none.
    """
    room = _Room()
    _in_use[id(room)] = (room, *results, *uses)
    job = Job(room, results, error_of)
    if keep is not None:
        keep(job)
    signal.ran = ctypes.addressof(room) + _RAN_OFFSET
    try:
        # Ctrl-C may strike when the library has the job, and before Python knows what it returned.
        code = submit(ctypes.byref(signal), ctypes.byref(room))
        if code == _NO_THREAD:
            raise CapacityError(
                "the system grants no thread to run jobs: allow more, or end others"
            )
        if code != 0:
            raise error_of(code)
    except BaseException:
        job.drop()
        raise
    return job


def _signal(
    wait: tuple[Flag, int] | None, done: tuple[Flag, int] | None, status: Flag | None
) -> Signal:
    for name, pair in (("wait", wait), ("done", done)):
        if pair is not None:
            _check_pair(name, pair)
    if status is not None:
        _check_flag("status", status)
    return Signal(
        wait=None if wait is None else wait[0].address,
        done=None if done is None else done[0].address,
        status=None if status is None else status.address,
        wait_value=0 if wait is None else wait[1] % 2**32,
        done_value=0 if done is None else done[1] % 2**32,
    )


def _check_pair(name: str, pair: tuple[Flag, int]) -> None:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise LayoutError(f"{name}={pair!r}: must be a flag and a value; give both as a tuple")
    _check_flag(name, pair[0])
    _check_whole(pair[1])


def _check_flag(name: str, flag: Flag) -> None:
    if not isinstance(flag, Flag):
        raise LayoutError(f"{name} has a {type(flag).__name__}: must be a Flag; make one")


def _check_whole(value: int) -> None:
    if not isinstance(value, int):
        raise LayoutError(f"a flag's value is {value!r}: must be a whole number; round it")


def _release(room: _Room) -> None:
    if room.number:
        # One call cancels, waits and forgets: nothing can come between.
        job_library().sparsekv_job_release(room.number)
    _in_use.pop(id(room), None)


def job_library() -> Any:
    """The library.

    Raises:
        LayoutError: there is none.
    """
    library = native_library()
    if library is None:
        raise LayoutError(
            f"jobs need the native library: {backend().reason}; use partial_attention instead"
        )
    return library


def check_in_place(name: str, tensor: Tensor, dtype: torch.dtype, is_contiguous: bool) -> None:
    """Raise unless a job can read `tensor` where it lies.

    Raises:
        LayoutError: it cannot.
    """
    if tensor.dtype != dtype or not is_contiguous:
        raise LayoutError(
            f"{name} is {tensor.dtype} with strides {tensor.stride()}: a job reads it in place, so "
            f"it must be {dtype} and contiguous; convert it before"
        )


def _room(name: str, given: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if given is None:
        return torch.empty(shape, dtype=torch.float32)
    check_tensor(name, given)
    if given.shape != shape or given.dtype != torch.float32 or not given.is_contiguous():
        raise LayoutError(
            f"{name} {tuple(given.shape)} of {given.dtype}: must be contiguous float32 of shape "
            f"{shape}; give such a tensor, or None"
        )
    return given
