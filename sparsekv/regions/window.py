"""The newest tokens of one layer, on the accelerator, laid out as the segments they will become."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from sparsekv.device import Accelerator, Event
from sparsekv.errors import LayoutError
from sparsekv.format import PartitionSpec
from sparsekv.kernels.dispatch import DecodeOps, decode_ops_for
from sparsekv.regions.stack import split_elements


class Window:
    """Accelerator memory of `window_size` tokens. How full it is, its owner knows."""

    def __init__(self, accelerator: Accelerator, spec: PartitionSpec, batch_size: int) -> None:
        self._accelerator = accelerator
        self._copied: Event | None = None
        self._num_single = 0
        self._ops: DecodeOps | None = None
        self._append: Callable[..., None] | None = None
        self._segment_size = spec.segment_tokens
        self.elements = accelerator.empty(window_shape(spec, batch_size), spec.geometry.dtype)
        """(segments, rows, num_kv_heads, segment_size * elements)"""
        self.key, self.value = split_elements(self.elements, spec.geometry, spec.segment_tokens)
        """(segments, rows, num_kv_heads, tokens, dim)"""

    def leave(self, copied: Event) -> None:
        """Note that all of it is being copied until that event: what is written next waits."""
        self._copied = copied

    def write(self, start: int, key: Tensor, value: Tensor | None) -> None:
        """Put tokens (batch, num_kv_heads, tokens, dim) from token `start` on, on the caller's
        stream; None where V is part of K.
        """
        if self._copied is not None or not self._can_launch(key):
            self._copy(start, key, value)
            return
        if self._append is not None:
            with suppress(LayoutError):  # of other strides or alignment than before
                self._append(key, value, start)
                return
        assert self._ops is not None
        into = None if value is None else self.value[0]
        self._append = self._ops.PreparedAppend(key, value, self.key[0], into)
        self._append(key, value, start)

    def _can_launch(self, key: Tensor) -> bool:
        """Whether a launch that is prepared for single tokens is worth it: from the second one on,
        as windows of beams see one only.
        """
        if key.shape[2] != 1 or len(self.key) != 1:
            return False
        self._num_single += 1
        if self._num_single == 2:
            self._ops = decode_ops_for(key.device)
        return self._ops is not None

    def _copy(self, start: int, key: Tensor, value: Tensor | None) -> None:
        stream = self._accelerator.current_stream()
        if self._copied is not None:
            stream.wait(self._copied)
            self._copied = None
        done = 0
        while done < key.shape[2]:
            segment, first = divmod(start + done, self._segment_size)
            tokens = min(self._segment_size - first, key.shape[2] - done)
            into, taken = slice(first, first + tokens), slice(done, done + tokens)
            stream.copy(self.key[segment, :, :, into], key[:, :, taken])
            if value is not None:
                stream.copy(self.value[segment, :, :, into], value[:, :, taken])
            done += tokens

    def pieces(self, fill: int) -> list[tuple[int, Tensor, Tensor]]:
        """The first `fill` tokens: (first token, keys, values) of the full segments, then of the
        one that is partly full; keys (segments, rows, num_kv_heads, tokens, head_dim).
        """
        full, rest = divmod(fill, self._segment_size)
        pieces = []
        if full:
            pieces.append((0, self.key[:full], self.value[:full]))
        if rest:
            key, value = self.key[full : full + 1], self.value[full : full + 1]
            pieces.append((full * self._segment_size, key[:, :, :, :rest], value[:, :, :, :rest]))
        return pieces


def lay_out_windows(
    accelerator: Accelerator, spec: PartitionSpec, key: Tensor, value: Tensor | None
) -> Tensor | None:
    """Full windows of a prompt as their segments, on the caller's stream.

    Args:
        key: (rows, num_kv_heads, tokens, head_dim).
        value: (rows, num_kv_heads, tokens, head_dim_v); None where V is part of K.
    Returns:
        (windows, segments, rows, num_kv_heads, segment_size * elements) of the tokens that fill
        whole windows, from the first one on; None if there are too few.
    """
    num_windows = key.shape[2] // spec.window_size
    if num_windows == 0:
        return None
    shape = num_windows, *window_shape(spec, len(key))
    windows = accelerator.empty(shape, spec.geometry.dtype)
    into = split_elements(windows.flatten(0, 1), spec.geometry, spec.segment_tokens)
    stream = accelerator.current_stream()
    for target, tokens in zip(into, (key, value), strict=True):
        if tokens is not None:
            taken = tokens.narrow(2, 0, num_windows * spec.window_size)
            segments = taken.unflatten(2, (len(target), spec.segment_tokens))
            stream.copy(*_as_words(target, segments.permute(2, 0, 1, 3, 4)))
    return windows


def _as_words(*tensors: Tensor) -> list[Tensor]:
    """The same bytes in numbers of 8, if all of them can be read so: a copy takes fewer steps."""
    try:
        return [tensor.view(torch.int64) for tensor in tensors]
    except RuntimeError:  # of odd sizes, strides or offsets
        return list(tensors)


def window_shape(spec: PartitionSpec, num_rows: int) -> tuple[int, int, int, int]:
    """(segments, rows, num_kv_heads, segment_size * elements) of a window."""
    geometry = spec.geometry
    per_head = spec.segment_tokens * geometry.elements_per_token
    return spec.segments_per_window, num_rows, geometry.num_kv_heads, per_head
