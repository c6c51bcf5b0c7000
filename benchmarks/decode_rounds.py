"""Steps timed in turn with the ceilings that they are held to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from types import TracebackType

import torch

from benchmarks.ceilings import BusCeiling, ReadCeiling, filled_buffer, measuring_bytes
from benchmarks.machine_pass import MachinePass
from benchmarks.results import Row
from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import library

_QUICK_BYTES = 8 << 20


class StepCeilings:
    """What memory and bus give: reading alone, host to GPU alone, both together.

    Use as a context manager. Without CUDA only reading is measured.

    Args:
        num_threads: threads that read; as many as attend.
        is_quick: read a small buffer.
    """

    def __init__(self, num_threads: int, is_quick: bool) -> None:
        self._num_threads = num_threads
        self._buffer = filled_buffer(_QUICK_BYTES if is_quick else measuring_bytes())
        self._read = ReadCeiling(num_threads, self._buffer.span)
        self._bus = BusCeiling() if torch.cuda.is_available() else None
        self._stack = ExitStack()

    def __enter__(self) -> StepCeilings:
        if self._bus is not None:
            self._stack.enter_context(self._bus)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def measure(self) -> Row:
        """GB/s by name, of one round."""
        found: Row = {"ceiling_read_gbs": self._read.measure()}
        if self._bus is not None:
            h2d, read = self._bus.h2d_while_reading(self._num_threads, self._buffer.span)
            found["ceiling_h2d_gbs"] = self._bus.h2d()
            found["ceiling_both_read_gbs"], found["ceiling_both_h2d_gbs"] = read, h2d
            found["ceiling_gbs"] = read + h2d
        return found

    def pass_of(self, read_bytes: int, copied_bytes: int) -> MachinePass:
        """The machine's own time for a step of so many bytes; to be used before this is closed."""
        return MachinePass(self._num_threads, read_bytes, copied_bytes, self._bus)


@contextmanager
def attending_threads(wanted: int | None) -> Iterator[int]:
    """Let the library attend with so many threads, its own number if None; how many there are."""
    if wanted is not None:
        library.set_num_threads(wanted)
    try:
        yield cpu.backend().num_threads
    finally:
        if wanted is not None:
            library.set_num_threads(None)


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Seconds from an idle device until all that `step` began is done."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Return when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    steps: Sequence[Callable[[], object]], device: torch.device, rounds: int, warm_up: int = 2
) -> list[list[float]]:
    """Seconds of each step in each round, in which all have their turn; `warm_up` do not count."""
    samples: list[list[float]] = [[] for _ in steps]
    for i in range(warm_up + rounds):
        for step, kept in zip(steps, samples, strict=True):
            seconds = seconds_of(step, device)
            if i >= warm_up:
                kept.append(seconds)
    return samples


def medians(samples: Sequence[Row]) -> Row:
    """Medians by name."""
    return {name: median(sample[name] for sample in samples) for name in samples[0]}
