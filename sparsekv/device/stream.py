"""A stream: work that the accelerator does in the order in which it was enqueued.

Streams know nothing of each other: what one writes and another reads is ordered by events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from sparsekv.device.accelerator import Accelerator


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Return when everything before it is done."""


class TimedEvent(Protocol):
    """A point in a stream's work that tells when it was reached; `Stream.record_time` says which,
    any number of times.
    """

    def has_come(self) -> bool:
        """Whether everything before it is done; waits for nothing."""

    def seconds_since(self, earlier: TimedEvent) -> float:
        """The time between two events of one accelerator that have come."""


class Stream(ABC):
    """One queue of work. Enqueueing returns at once; the tensors that it names must stay as they
    are, and alive, until the work is done.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def copy_to_host(self, host: Tensor, source: Tensor) -> None:
        """Copy accelerator memory into registered host memory of the same shape and dtype.

        Each must be contiguous but for its first dimension, and lie in one registration as far as
        one copy reaches: all of it where both are contiguous, an item of the first dimension
        otherwise. Host memory that is not registered is copied too, but the call waits for it.
        """
        for into, taken in _pieces(host, source):
            self._to_host(into, taken)
        self._accelerator.d2h_bytes += source.numel() * source.element_size()

    def copy_from_host(self, target: Tensor, host: Tensor) -> None:
        """Copy registered host memory into accelerator memory; rules as in `copy_to_host`."""
        for into, taken in _pieces(target, host):
            self._from_host(into, taken)
        self._accelerator.h2d_bytes += host.numel() * host.element_size()

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy within accelerator memory, whatever the strides. Memory of torch's that is let go of
        meanwhile is not used again before the copy is done.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event after all work so far."""

    @abstractmethod
    def record_time(self, event: TimedEvent) -> None:
        """Let an event of `Accelerator.timed_event` come after all work so far, and not before."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let the work that follows begin when `event`, of whatever stream, has come."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all work so far is done; functions of `then` may still run."""

    @abstractmethod
    def then(self, function: Callable[[], None]) -> Event:
        """Call a function on the host when all work so far is done, and after earlier ones.

        The stream goes on meanwhile. The function may run on another thread, and may not raise. It
        keeps what it refers to alive until then.
        """

    @abstractmethod
    def write_flag(self, flag: Tensor, value: int) -> None:
        """Set an int32 of registered host memory once all work so far is done, and seen to be."""

    @abstractmethod
    def wait_flag(self, flag: Tensor, value: int) -> None:
        """Let the work that follows begin when an int32 of registered host memory is at least
        `value`. Whoever sets it must be certain to do so: until then the stream stands still.
        """

    @abstractmethod
    def _to_host(self, host: Tensor, source: Tensor) -> None:
        """Enqueue one copy of contiguous memory."""

    @abstractmethod
    def _from_host(self, target: Tensor, host: Tensor) -> None:
        """Enqueue one copy of contiguous memory."""


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    assert target.shape == source.shape, f"{target.shape} from {source.shape}"
    assert target.dtype == source.dtype, f"{target.dtype} from {source.dtype}"
    if target.numel() == 0:
        return
    if target.is_contiguous() and source.is_contiguous():
        yield target, source
        return
    for into, taken in zip(target, source, strict=True):
        assert into.is_contiguous(), f"strides {into.stride()}"
        assert taken.is_contiguous(), f"strides {taken.stride()}"
        yield into, taken
