"""What every accelerator offers: memory, streams, and registered host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsekv.device.stream import Stream, TimedEvent


class Accelerator(ABC):
    """Memory, streams and copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.h2d_bytes = 0
        self.d2h_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the accelerator, ordered by the caller's stream."""
        # What is made under inference_mode could never be written to outside it.
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def copy_to_host(self, host: Tensor, source: Tensor) -> None:
        """Copy accelerator memory into any host memory of the same shape, in the order of the
        caller's stream; returns when the bytes are there.
        """
        host.copy_(source)
        self.d2h_bytes += source.numel() * source.element_size()

    def copy_from_host(self, target: Tensor, host: Tensor) -> None:
        """Copy any host memory into accelerator memory; as `copy_to_host`."""
        target.copy_(host)
        self.h2d_bytes += host.numel() * host.element_size()

    @property
    @abstractmethod
    def has_flags(self) -> bool:
        """Whether streams can write and await flags."""

    @property
    @abstractmethod
    def has_queue(self) -> bool:
        """Whether what is enqueued is done while the caller goes on, and not before it does."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream to which the calling thread's torch operations go."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream beside the others."""

    @abstractmethod
    def timed_event(self) -> TimedEvent:
        """An event to be recorded by streams; to be made once and used often."""

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory and map it, so that the accelerator can read and write it at full
        speed.

        Raises:
            CapacityError: the system refuses; nothing is registered then and no error is left
                behind.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`, if that was done; must come before the memory is unmapped."""
