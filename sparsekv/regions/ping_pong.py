"""Two accelerator buffers through which the pinned region passes, a chunk of one layer at a time.
Copies only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from sparsekv.device import Accelerator, Event
from sparsekv.format import KVView, PartitionSpec
from sparsekv.regions.stack import split_elements


@dataclass(frozen=True, slots=True)
class _Place:
    """A chunk in one of the buffers: what is copied to where, and the view of it there."""

    buffer: Tensor
    view: KVView
    target: Tensor
    host: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive slots of a layer's pinned region."""

    owner: tuple[KVView, ...]
    """The views that it is a part of: another tuple as soon as the layer has changed."""
    index: int
    """Its number among theirs."""
    view: KVView
    after: Event | None
    """When its bytes are in host memory; None: they are."""
    places: dict[int, _Place] = field(default_factory=dict, compare=False)
    """Where it has been, by buffer."""

    def is_same(self, other: Chunk) -> bool:
        """Whether both name the same bytes."""
        return self.owner is other.owner and self.index == other.index


@dataclass(frozen=True, slots=True)
class _Loaded:
    chunk: Chunk
    view: KVView
    buffer_idx: int
    ready: Event


class PingPong:
    """Two buffers of `ping_pong_tokens` tokens of one layer; they grow only with the number of
    rows.
    """

    def __init__(self, accelerator: Accelerator, spec: PartitionSpec) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream()
        self._spec = spec
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._ahead: deque[_Loaded] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes allocated; 0 before the first chunk."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers or ())

    @property
    def segments_per_chunk(self) -> int:
        """Segments that one buffer holds."""
        return self._spec.ping_pong_tokens // self._spec.segment_tokens

    def chunks(self, views: tuple[KVView, ...], after: Event | None = None) -> Iterator[Chunk]:
        """A layer's pinned views in pieces that one buffer holds each.

        Args:
            views: what is named as their owner.
            after: when their bytes are there; None: they are.
        """
        size, index = self.segments_per_chunk, 0
        for view in views:
            for first in range(0, view.key.shape[0], size):
                yield Chunk(views, index, view.segments(first, first + size), after)
                index += 1

    def holds(self, chunk: Chunk) -> bool:
        """Whether it is loaded, or being loaded, and not taken."""
        return any(loaded.chunk.is_same(chunk) for loaded in self._ahead)

    def take(self, chunk: Chunk) -> KVView:
        """The chunk on the accelerator, for work that is enqueued on the caller's stream before the
        next chunk is loaded or taken.
        """
        loaded = None
        while loaded is None or not loaded.chunk.is_same(chunk):
            if not self._ahead:
                self.load(chunk)
            loaded = self._ahead.popleft()  # what was loaded for a past that has changed goes too
        self._accelerator.current_stream().wait(loaded.ready)
        return loaded.view

    def load(self, *chunks: Chunk) -> None:
        """Begin to copy chunks into buffers, once the caller's work so far is done with these.

        Chunks are taken in the order in which they are loaded. Nothing is done for those that are
        loaded already.

        Args:
            chunks: at most two, of at most `segments_per_chunk` slots each.
        """
        has_waited = False
        for chunk in chunks:
            if self.holds(chunk):
                continue
            if not has_waited:
                self._stream.wait(self._accelerator.current_stream().record())
                has_waited = True
            self._load(chunk)

    def _load(self, chunk: Chunk) -> None:
        if len(self._ahead) == 2:
            self._ahead.popleft()
        in_use = {loaded.buffer_idx for loaded in self._ahead}
        buffer_idx = 1 if 0 in in_use else 0
        place = self._place(chunk, buffer_idx)
        if chunk.after is not None:
            self._stream.wait(chunk.after)
        self._stream.copy_from_host(place.target, place.host)
        self._ahead.append(_Loaded(chunk, place.view, buffer_idx, self._stream.record()))

    def synchronize(self) -> None:
        """Return when nothing is being loaded."""
        self._stream.synchronize()

    def _place(self, chunk: Chunk, buffer_idx: int) -> _Place:
        """Made once, since steps load the same chunks."""
        view, known = chunk.view, chunk.places.get(buffer_idx)
        buffer = self._buffer(buffer_idx, view.key.shape[1])
        if known is not None and known.buffer is buffer:
            return known
        geometry, segment_size = self._spec.geometry, self._spec.segment_tokens
        num_segments, rows, heads = view.key.shape[:3]
        # A slot starts with its first key, so the keys' view gives the whole slot: one contiguous
        # copy each.
        per_slot = rows * heads * segment_size * geometry.elements_per_token
        host = view.key.as_strided((num_segments, per_slot), (view.key.stride(0), 1))
        target = buffer[: num_segments * per_slot].view(-1, per_slot)
        elements = target.unflatten(1, (rows, heads, segment_size * geometry.elements_per_token))
        key, value = split_elements(elements, geometry, segment_size)
        there = KVView(key, value, view.positions, view.row_table)
        chunk.places[buffer_idx] = place = _Place(buffer, there, target, host)
        return place

    def _buffer(self, index: int, rows: int) -> Tensor:
        geometry, spec = self._spec.geometry, self._spec
        per_slot = rows * geometry.num_kv_heads * spec.segment_tokens * geometry.elements_per_token
        num_elements = self.segments_per_chunk * per_slot
        if self._buffers is None or self._buffers[0].numel() < num_elements:
            empty = self._accelerator.empty
            self._buffers = (
                empty((num_elements,), geometry.dtype),
                empty((num_elements,), geometry.dtype),
            )
        return self._buffers[index]
