"""Simulated accelerators whose side streams are slow, each in its own way, within what events and
flags allow: a result that depends on the way is a race.
"""

import math
import random
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

from sparsekv.device import SimulatedAccelerator, SimulatedStream
from sparsekv.errors import CapacityError

_DEVICE = "simulated-device"


class LateStream(SimulatedStream):
    """Does nothing before somebody waits for it, and then no more than is waited for."""

    def __init__(self, accelerator):
        super().__init__(accelerator)
        self._operations = deque()
        self._functions = deque()
        self._num_done = self._num_called = 0

    def record(self):
        return _LateEvent(self._work, self._num_done + len(self._operations))

    def synchronize(self):
        self.record().synchronize()

    def then(self, function):
        self._functions.append((self.record(), function))
        return _LateEvent(self._call, self._num_called + len(self._functions))

    def _enqueue(self, operation):
        self._operations.append(operation)

    def _work(self, count):
        while self._num_done < count:
            self._operations[0]()  # stays in line if Ctrl-C strikes here
            self._operations.popleft()
            self._num_done += 1

    def _call(self, count):
        while self._num_called < count:
            event, function = self._functions[0]
            event.synchronize()
            function()
            self._functions.popleft()
            self._num_called += 1


class _LateEvent:
    def __init__(self, reach, count):
        self._reach = reach
        self._count = count

    def synchronize(self):
        self._reach(self._count)


class DelayedStream(SimulatedStream):
    """Works on a thread of its own, each time after a random delay."""

    def __init__(self, accelerator):
        super().__init__(accelerator)
        self._random = random.Random(accelerator.seed)
        self._device = ThreadPoolExecutor(1, thread_name_prefix=_DEVICE)
        self._host = ThreadPoolExecutor(1)
        self._errors = []
        self._last = self._device.submit(int)

    def record(self):
        return _FutureEvent(self._last, self._errors)

    def synchronize(self):
        # A finalizer may run on this thread, which cannot wait for itself; what is not done yet
        # keeps its tensors alive here.
        if not threading.current_thread().name.startswith(_DEVICE):
            self.record().synchronize()

    def then(self, function):
        event = self.record()

        def run():
            event.synchronize()
            self._slowly(function)

        return _FutureEvent(self._host.submit(run), self._errors)

    def _enqueue(self, operation):
        self._last = self._device.submit(self._slowly, operation)

    def _slowly(self, operation):
        time.sleep(self._random.choice([0, 0, 2e-4, 2e-3]))
        try:
            operation()
        except BaseException as error:
            self._errors.append(error)
            raise


class _FutureEvent:
    def __init__(self, future, errors):
        self._future = future
        self._errors = errors

    def synchronize(self):
        self._future.result()
        assert not self._errors, self._errors


class LateAccelerator(SimulatedAccelerator):
    """Side streams do nothing before somebody waits for them."""

    def new_stream(self):
        return LateStream(self)


class MeteredAccelerator(LateAccelerator):
    """Late, and knows how much of its memory is held, by tensors and by what is yet to be done."""

    def __init__(self):
        super().__init__()
        self.held_bytes = self.peak_bytes = 0

    def empty(self, shape, dtype):
        block = _Block(math.prod(shape) * dtype.itemsize)
        self.held_bytes += len(block)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(block, self._free, len(block))
        return torch.frombuffer(block, dtype=dtype).view(shape)

    def _free(self, num_bytes):
        self.held_bytes -= num_bytes


class _Block(bytearray):
    """Memory of one tensor; lives as long as any view of it."""


class RefusingAccelerator(LateAccelerator):
    """Late, registers no more than `most_bytes`, and sees when memory is given up too soon."""

    def __init__(self):
        super().__init__()
        self.most_bytes = None
        self.violations = []
        self._streams = []

    def new_stream(self):
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def register(self, address, num_bytes):
        total = sum(self.registered.values()) + num_bytes
        if self.most_bytes is not None and total > self.most_bytes:
            raise CapacityError("no more may be locked")
        super().register(address, num_bytes)

    def unregister(self, address):
        end = address + self.registered.get(address, 0)
        for stream in self._streams:
            for operation in stream._operations:
                for tensor in getattr(operation, "args", ()):
                    if isinstance(tensor, torch.Tensor) and address <= tensor.data_ptr() < end:
                        self.violations.append(operation)
        super().unregister(address)


class DelayedAccelerator(SimulatedAccelerator):
    """Side streams work on threads, after random delays."""

    def __init__(self, seed=0):
        super().__init__()
        self.seed = seed

    def new_stream(self):
        self.seed += 1
        return DelayedStream(self)


class LateOutbox(SimulatedAccelerator):
    """Of a cache's streams, the one in works at once, and the one out does nothing before somebody
    waits for it.
    """

    def __init__(self):
        super().__init__()
        self._num_streams = 0

    def new_stream(self):
        self._num_streams += 1
        return SimulatedStream(self) if self._num_streams == 1 else LateStream(self)


class LateCaller(SimulatedAccelerator):
    """The caller's own stream does nothing before somebody waits for it; side streams work at
    once.

    Only operations of the stream are late: what a test does to tensors itself is not.
    """

    def __init__(self):
        super().__init__()
        self._current = LateStream(self)

    def current_stream(self):
        return self._current


class BusyCaller(SimulatedAccelerator):
    """The caller's own stream works at once; while it is busy, not before somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.is_busy = False
        self.busy = LateStream(self)

    def current_stream(self):
        return self.busy if self.is_busy else super().current_stream()


ACCELERATORS = {
    "eager": SimulatedAccelerator,
    "late": LateAccelerator,
    "delayed": DelayedAccelerator,
}
