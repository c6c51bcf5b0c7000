"""Ordinary memory that plays the accelerator, on machines without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparsekv.device.accelerator import Accelerator
from sparsekv.device.stream import Event, Stream, TimedEvent

_LOOK_AGAIN_S = 20e-6


class _Done:
    """An event of a stream that is never behind."""

    def synchronize(self) -> None:
        pass


class _SimulatedTimedEvent:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._time: float | None = None

    def forget(self) -> None:
        self._time = None

    def come(self) -> None:
        self._time = self._clock()

    def has_come(self) -> bool:
        return self._time is not None

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, _SimulatedTimedEvent)
        assert self._time is not None
        assert earlier._time is not None
        return self._time - earlier._time


class SimulatedStream(Stream):
    """Does everything at once, on the calling thread. That is one order a real stream may choose;
    tests replace `_enqueue`, `record`, `synchronize` and `then` to choose others.
    """

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._enqueue(partial(_copy, target, source))

    def record(self) -> Event:
        return _Done()

    def record_time(self, event: TimedEvent) -> None:
        assert isinstance(event, _SimulatedTimedEvent)
        event.forget()
        self._enqueue(event.come)

    def wait(self, event: Event) -> None:
        self._enqueue(event.synchronize)

    def synchronize(self) -> None:
        pass

    def then(self, function: Callable[[], None]) -> Event:
        function()
        return _Done()

    def write_flag(self, flag: Tensor, value: int) -> None:
        self._enqueue(partial(_write, flag, value))

    def wait_flag(self, flag: Tensor, value: int) -> None:
        self._enqueue(partial(_wait_until, flag, value))

    def _to_host(self, host: Tensor, source: Tensor) -> None:
        self.copy(host, source)

    def _from_host(self, target: Tensor, host: Tensor) -> None:
        self.copy(target, host)

    def _enqueue(self, operation: Callable[[], None]) -> None:
        operation()


class SimulatedAccelerator(Accelerator):
    """The CPU in the part of the accelerator.

    Attributes:
        clock: tells the seconds of timed events that are made later.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.registered: dict[int, int] = {}
        self.clock: Callable[[], float] = time.perf_counter

    @property
    def has_flags(self) -> bool:
        return True

    @property
    def has_queue(self) -> bool:
        return False

    def current_stream(self) -> Stream:
        return SimulatedStream(self)

    def new_stream(self) -> Stream:
        return SimulatedStream(self)

    def timed_event(self) -> TimedEvent:
        return _SimulatedTimedEvent(self.clock)

    def register(self, address: int, num_bytes: int) -> None:
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        self.registered.pop(address, None)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _write(flag: Tensor, value: int) -> None:
    flag.fill_((value + 2**31) % 2**32 - 2**31)


def _wait_until(flag: Tensor, value: int) -> None:
    # As the hardware compares: flags may wrap around.
    while (int(flag) - value) & 0x80000000:
        time.sleep(_LOOK_AGAIN_S)
