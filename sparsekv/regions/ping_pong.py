"""Two accelerator buffers through which the pinned region passes, a chunk of one layer at a time.
Copies only.
"""

from __future__ import annotations

from torch import Tensor

from sparsekv.device import Accelerator
from sparsekv.format import KVView, PartitionSpec
from sparsekv.regions.stack import split_elements


class PingPong:
    """Two buffers of `ping_pong_tokens` tokens of one layer; they grow only with the number of
    rows.
    """

    def __init__(self, accelerator: Accelerator, spec: PartitionSpec) -> None:
        self._accelerator = accelerator
        self._spec = spec
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated; 0 before the first chunk."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers or ())

    @property
    def segments_per_chunk(self) -> int:
        """Segments that one buffer holds."""
        return self._spec.ping_pong_tokens // self._spec.segment_tokens

    def load(self, turn: int, view: KVView) -> KVView:
        """Copy a chunk of whole segments into buffer `turn` % 2, which must have no reader left.

        Args:
            view: at most `segments_per_chunk` consecutive slots of a host region.
        Returns:
            The same view on the accelerator, valid until that buffer is loaded again.
        """
        geometry, segment_size = self._spec.geometry, self._spec.segment_tokens
        num_segments, rows, heads = view.key.shape[:3]
        # A slot starts with its first key, so the keys' view gives the whole slot: one contiguous
        # copy each.
        per_slot = rows * heads * segment_size * geometry.elements_per_token
        host = view.key.as_strided((num_segments, per_slot), (view.key.stride(0), 1))
        target = self._buffer(turn % 2, rows)[:num_segments, :per_slot]
        self._accelerator.copy_from_host(target, host)
        elements = target.unflatten(1, (rows, heads, segment_size * geometry.elements_per_token))
        key, value = split_elements(elements, geometry, segment_size)
        return KVView(key, value, view.positions, view.row_table)

    def _buffer(self, index: int, rows: int) -> Tensor:
        geometry, spec = self._spec.geometry, self._spec
        per_slot = rows * geometry.num_kv_heads * spec.segment_tokens * geometry.elements_per_token
        if self._buffers is None or self._buffers[0].shape[1] < per_slot:
            shape = (self.segments_per_chunk, per_slot)
            empty = self._accelerator.empty
            self._buffers = (empty(shape, geometry.dtype), empty(shape, geometry.dtype))
        return self._buffers[index]
