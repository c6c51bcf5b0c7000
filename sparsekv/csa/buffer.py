"""Entries that stay on the accelerator and only grow at their end: index keys, HCA entries."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.device import Accelerator


class GrowingBuffer:
    """(batch, entries, dim) with room for what is expected, or half as many again when full."""

    def __init__(
        self, accelerator: Accelerator, batch_size: int, dim: int, dtype: torch.dtype
    ) -> None:
        self._accelerator = accelerator
        self._storage = accelerator.empty((batch_size, 0, dim), dtype)
        self._length = 0
        self.expected = 0
        """Entries to make room for when it next grows."""

    def __len__(self) -> int:
        return self._length

    @property
    def entries(self) -> Tensor:
        """(batch, entries, dim) view of what was appended."""
        return self._storage[:, : self._length]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self._storage.numel() * self._storage.element_size()

    def append(self, new: Tensor) -> None:
        """Add (batch, n, dim) entries; they are converted to the buffer's dtype."""
        length = self._length + new.shape[1]
        if length > self._storage.shape[1]:
            batch, capacity, dim = self._storage.shape
            storage = self._accelerator.empty(
                (batch, max(length, self.expected, capacity + capacity // 2), dim),
                self._storage.dtype,
            )
            storage[:, : self._length] = self.entries
            self._storage = storage
        self._storage[:, self._length : length] = new
        self._length = length

    def truncate(self, length: int) -> None:
        """Keep the first `length` entries."""
        self._length = min(self._length, length)

    def select_rows(self, indices: Tensor) -> GrowingBuffer:
        """A buffer with the entries of sequences `indices`, in that order."""
        _, capacity, dim = self._storage.shape
        dtype = self._storage.dtype
        other = GrowingBuffer(self._accelerator, len(indices), dim, dtype)
        other._storage = self._accelerator.empty((len(indices), capacity, dim), dtype)
        other._storage[:, : self._length] = self.entries.index_select(0, indices)
        other._length, other.expected = self._length, self.expected
        return other
