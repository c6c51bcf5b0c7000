"""Zero-copy views of keys and values: the one thing kernels and attention read.

Letters: N segments, R physical rows, B batch (logical rows), H kv heads, W tokens of a segment, D
    head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVView:
    """Keys and values of consecutive slots of one region, where they lie."""

    key: Tensor
    """(num_segments, rows, num_kv_heads, tokens, head_dim), last dimension contiguous."""
    value: Tensor
    """(num_segments, rows, num_kv_heads, tokens, head_dim_v); with shared K and V a view of `key`.
    """
    positions: Tensor
    """(num_segments,) int64 on the CPU: position in the sequence of each segment's first token."""
    row_table: Tensor | None = None
    """(num_segments, batch) int64 on the CPU, logical row -> physical row; None: row b is row b."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence in this view."""
        return self.key.shape[0] * self.key.shape[3]

    @property
    def batch_size(self) -> int:
        """Logical rows."""
        return self.key.shape[1] if self.row_table is None else self.row_table.shape[1]

    def segments(self, first: int, last: int) -> KVView:
        """The segments from `first` on, before `last`."""
        table = None if self.row_table is None else self.row_table[first:last]
        return KVView(
            self.key[first:last], self.value[first:last], self.positions[first:last], table
        )

    def to(self, device: torch.device) -> KVView:
        """The same view with keys and values on `device` (itself if they are there already)."""
        if self.key.device == device:
            return self
        return KVView(self.key.to(device), self.value.to(device), self.positions, self.row_table)


def joined(views: Sequence[KVView]) -> tuple[KVView, ...]:
    """The same slots in fewer views: those that follow one another in one piece of memory become
    one. For readers that need not stop where a registration ends.
    """
    found: list[KVView] = []
    for view in views:
        if found and _follows(view, found[-1]):
            view = _and(found.pop(), view)
        found.append(view)
    return tuple(found)


def _follows(view: KVView, last: KVView) -> bool:
    """Whether the slots of `view` stand right after those of `last`."""
    stride = last.key.stride(0)
    end = last.key.storage_offset() + last.key.shape[0] * stride
    return (
        view.row_table is None
        and last.row_table is None
        and view.key.storage_offset() == end
        and view.key.untyped_storage().data_ptr() == last.key.untyped_storage().data_ptr()
        and view.key.stride() == last.key.stride()
        and view.key.shape[1:] == last.key.shape[1:]
    )


def _and(first: KVView, second: KVView) -> KVView:
    count = first.key.shape[0] + second.key.shape[0]
    key, value = (
        tensor.as_strided((count, *tensor.shape[1:]), tensor.stride())
        for tensor in (first.key, first.value)
    )
    return KVView(key, value, torch.cat((first.positions, second.positions)))


@dataclass(frozen=True, slots=True)
class LayerViews:
    """Everything one layer attends to, by region."""

    window: tuple[KVView, ...]
    """On the accelerator: the window and, when new tokens overflow it, those tokens as a second
    part.
    """
    unpinned: tuple[KVView, ...]
    """In host memory, for the CPU to attend where it lies."""
    pinned: tuple[KVView, ...]
    """In registered host memory, for the GPU to stream or read."""

    @property
    def parts(self) -> tuple[KVView, ...]:
        """All views, in no particular order of positions."""
        return self.unpinned + self.pinned + self.window

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence over all regions."""
        return sum(part.num_tokens for part in self.parts)
