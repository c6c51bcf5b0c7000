"""What the machine itself takes for the bytes of a decode step, with nothing of the product in it.

A shared machine's memory is not equally fast at all times. Measured in turn with a step, a pass
tells how much of the steps' unevenness is the machine's.
"""

from __future__ import annotations

from benchmarks.ceilings import BusCeiling, ReadCeiling, filled_buffer


class MachinePass:
    """Threads read what the CPU attends to; meanwhile the rest is copied from host to GPU.

    Without a bus the threads read all of it: the accelerator is simulated by the CPU.

    Args:
        num_threads: threads that read; as many as attend.
        read_bytes: of the CPU's share, a multiple of 256; so much memory is taken.
        copied_bytes: of the rest, a multiple of 256.
        bus: copies within its own registered memory; None without CUDA.
    """

    def __init__(
        self, num_threads: int, read_bytes: int, copied_bytes: int, bus: BusCeiling | None
    ) -> None:
        if bus is None:
            read_bytes, copied_bytes = read_bytes + copied_bytes, 0
        self._read = None
        if read_bytes:
            self._buffer = filled_buffer(read_bytes)
            self._read = ReadCeiling(num_threads, self._buffer.span.part(0, read_bytes))
        self._copied_bytes, self._bus = copied_bytes, bus

    def seconds(self) -> float:
        """Of one pass: the longer of reading and copying, which run at the same time.

        The start of the threads does not count: those that attend are there already.
        """
        copied = self._bus.begin_h2d(self._copied_bytes) if self._bus is not None else None
        reading = self._read.seconds() if self._read is not None else 0.0
        return max(reading, copied()) if copied is not None else reading
