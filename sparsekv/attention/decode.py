"""One new token of each sequence attends to a layer, launched with little more than calls into C.

What a layer's step needs is prepared in its second step, and used as long as what it names stays
where it is: the window, the views of host memory, the kind of the query. Whatever is not of that
kind, and each first step, is split attention's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sparsekv.attention.host import HostAttention, HostCalls
from sparsekv.attention.host_jobs import HostJobs, Room
from sparsekv.attention.read_ahead import ReadAhead
from sparsekv.attention.stopwatch import Stopwatch
from sparsekv.attention.timings import Timings
from sparsekv.device import Stream
from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry, KVView, joined
from sparsekv.kernels.dispatch import DecodeOps, PreparedAttentionJob, decode_ops_for
from sparsekv.regions import LayerParts, PingPong, Registrar, Window
from sparsekv.regions.ping_pong import Chunk

Views = tuple[KVView, ...]

_CHUNKS_AHEAD = 2
"""Of a layer's pinned region, copied before its query is there: both ping-pong buffers."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The way to the CPU and back, for all layers with as many unpinned views."""

    room: Room
    store: Callable[..., None]
    """Takes the query to where the CPU finds it."""
    merge: Callable[..., None]
    """Adds what the CPU has found to what the accelerator has."""


@dataclass(slots=True)
class _Rest:
    """Attention to the last part of a layer's pinned region: where it lies, or chunk by chunk."""

    views: Views = ()
    attends: list[Any] = field(default_factory=list)
    first_chunk: int | None = None
    """Of those that are copied; None: it is read where it lies."""
    num_tokens: int = 0
    """Of a sequence."""
    num_bytes: int = 0


@dataclass(slots=True)
class _Layer:
    """What is prepared for one layer, and for what."""

    kind: tuple[Any, ...]
    """Of queries."""
    window: Window
    attend: Any = None
    pinned: Views = ()
    chunks: tuple[Chunk, ...] = ()
    """Of it: as many as are copied, ahead or at all."""
    num_ahead: int = 0
    whole: _Rest = field(default_factory=_Rest)
    """All of it."""
    after_ahead: _Rest = field(default_factory=_Rest)
    """What comes after the chunks that are copied ahead."""
    unpinned: Views = ()
    answer: _Answer | None = None
    job: PreparedAttentionJob | None = None


class DecodeAttention:
    """Attends for one cache; not for several threads at a time.

    Attributes:
        host: what attends on the CPU, for split attention too.
        timings: what recent steps took, to be taken from there.
        reads_ahead: copy a layer's first chunks before its query is there, while that pays; not so
            where a step's time is to be that of all it reads, its window too.
    """

    def __init__(
        self,
        registrar: Registrar,
        ping_pong: PingPong,
        geometry: KVGeometry,
        *,
        reads_in_place: bool = True,
    ) -> None:
        self._accelerator = registrar.accelerator
        self._ping_pong = ping_pong
        self._bytes_per_token = geometry.bytes_per_token_per_layer
        self.timings = Timings()
        self.reads_ahead = True
        self._reads_in_place = reads_in_place
        cpu, gpu = self.timings.cpu, self.timings.gpu
        self._read_ahead = ReadAhead()
        self._stopwatch = Stopwatch(self._accelerator, geometry.num_layers, gpu, self._read_ahead)
        self._host = HostJobs(registrar, cpu) if self._accelerator.has_flags else None
        self.host: HostAttention = self._host or HostCalls(cpu)
        self._ops = decode_ops_for(self._accelerator.device)
        self._layers: dict[int, _Layer] = {}
        self._answers: dict[int, _Answer] = {}
        self._chunk_attends: dict[tuple[int, int], Any] = {}
        self._kind: tuple[Any, ...] = ()
        self._softmax_scale = 0.0
        self._step_began: float | None = None
        self._lse = self._workspace = torch.empty(0)

    @property
    def reads_in_place(self) -> bool:
        """Whether the accelerator attends to the pinned region where it lies, but for what is
        copied ahead; or all of it is copied.
        """
        return self._reads_in_place

    @reads_in_place.setter
    def reads_in_place(self, value: bool) -> None:
        self._reads_in_place = value
        self._forget()

    def synchronize(self) -> None:
        """Return when host memory is not read any more; nothing of it is held afterwards."""
        self.host.synchronize()
        self._forget()

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        softmax_scale: float,
        parts: LayerParts,
        upcoming: tuple[int, Views],
    ) -> Tensor | None:
        """Attention of the newest token to all that a layer holds; None: not prepared for it, and
        nothing has been done.

        Args:
            query: (batch, num_heads, 1, head_dim) on the accelerator.
            softmax_scale: factor of the scores.
            parts: what the layer holds.
            upcoming: the layer that attends after this one, and its pinned views: their first
                chunks are copied as soon as this one does not use the bus any more.

        Returns:
            (batch, num_heads, 1, head_dim_v) float32.

        Raises:
            SparseKVError: an earlier step's job failed.
        """
        layer, window, ops = self._layers.get(layer_idx), parts.window, self._ops
        if ops is None or not parts.num_in_window or len(window.key) > 1 or query.stride(3) != 1:
            return None
        kind = query.shape, query.stride(), query.dtype, query.data_ptr() % 16, softmax_scale
        if kind != self._kind:
            self._begin_anew(kind, query)
        if layer_idx == 0:
            self._note_step()
        if layer is None or layer.window is not window or kind != layer.kind:
            self._layers[layer_idx] = _Layer(kind, window)
            return None
        if parts.unpinned and not self._can_ask(ops, layer, query, parts.unpinned):
            return None
        if layer.attend is None:
            layer.attend = self._prepared(ops, query, _whole(window), False)
        if layer.pinned is not parts.pinned:
            self._prepare_pinned(ops, layer, query, parts.pinned)
        stream = self._asked(layer, query, parts) if parts.unpinned else None
        out = query.new_empty((*query.shape[:3], window.value.shape[4]), dtype=torch.float32)
        is_timed = self._stopwatch.is_due(layer_idx)
        if is_timed and not self.reads_ahead:
            self._stopwatch.start(with_caller=True)
        layer.attend(query, 0, parts.num_in_window, out)
        if is_timed and self.reads_ahead:
            self._stopwatch.start()
        rest = self._after_ahead(ops, layer, query, out)
        if is_timed and rest is layer.after_ahead:
            self._stopwatch.lap(layer.whole.num_tokens - rest.num_tokens)
        if rest.first_chunk is None:
            for attend in rest.attends:
                attend(query, 0, None, out)
            self._accelerator.h2d_bytes += rest.num_bytes
        else:
            self._attend_to_chunks(ops, layer, rest.first_chunk, len(layer.chunks), query, out)
        if is_timed and rest.num_tokens:
            self._stopwatch.stop(rest.num_tokens)
        self._load_ahead(*upcoming)
        if stream is not None:
            self._take(layer, out, stream)
        return out

    def _note_step(self) -> None:
        now = perf_counter()
        if self._step_began is not None:
            self.timings.steps.note(1, now - self._step_began)
        self._step_began = now

    # The CPU's part

    def _can_ask(self, ops: DecodeOps, layer: _Layer, query: Tensor, unpinned: Views) -> bool:
        """Whether the CPU's part can be a job; prepares it."""
        host = self._host
        if host is None:
            return False
        host.look_back()
        answer = self._answers.get(len(unpinned))
        if answer is None or not host.is_current(answer.room):
            room = host.room(query.shape, unpinned)
            if room is None:
                return False
            self._answers[len(unpinned)] = answer = self._prepared_answer(ops, query, room)
        if layer.unpinned is not unpinned or layer.answer is not answer:
            layer.job = answer.room.job(unpinned, self._softmax_scale)
            layer.unpinned, layer.answer = unpinned, answer
        return True

    def _prepared_answer(self, ops: DecodeOps, query: Tensor, room: Room) -> _Answer:
        stored = room.query_in(room.memory)
        found = room.results_in(room.memory)
        out = query.new_empty(found[0].shape[1:], dtype=torch.float32)
        return _Answer(
            room=room,
            store=ops.PreparedAppend(query, None, stored, None),
            merge=ops.PreparedMerge([(out, self._lse)], out=out, lse=self._lse, others=found),
        )

    def _asked(self, layer: _Layer, query: Tensor, parts: LayerParts) -> Stream:
        """The CPU begins when the stream that is returned, the caller's, has got here."""
        assert self._host is not None
        assert layer.answer is not None
        assert layer.job is not None
        stream = self._accelerator.current_stream()
        layer.answer.store(query, None, 0)
        self._host.start(stream, layer.job, parts.num_tokens - 1)
        return stream

    def _take(self, layer: _Layer, out: Tensor, stream: Stream) -> None:
        """Merge what the CPU has found into `out`."""
        assert self._host is not None
        assert layer.answer is not None
        room = layer.answer.room
        self._host.wait(stream)
        layer.answer.merge(out)
        self._host.take(stream)
        self._accelerator.d2h_bytes += 4 * room.lse_start
        self._accelerator.h2d_bytes += 4 * (room.size - room.lse_start)

    # The accelerator's part

    def _begin_anew(self, kind: tuple[Any, ...], query: Tensor) -> None:
        """Forget what was prepared for queries of another kind, and what is timed of them."""
        self._forget()
        self._stopwatch.drop()
        self._kind = kind
        self._softmax_scale = kind[-1]
        self._lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        self._workspace = self._lse[:0]

    def _forget(self) -> None:
        self._layers.clear()
        self._answers.clear()
        self._chunk_attends.clear()

    def _prepared(self, ops: DecodeOps, query: Tensor, view: KVView, is_carried: bool) -> Any:
        """Attention to one view: alone, or added to what `out` and the lse hold already."""
        size = ops.workspace_numel(query, view.key, view.value)
        if size > self._workspace.numel():
            self._workspace = query.new_empty(size, dtype=torch.float32)
        table = view.row_table
        shape = (*query.shape[:3], view.value.shape[4])
        return ops.PreparedAttention(
            query,
            view.key,
            view.value,
            self._softmax_scale,
            out=query.new_empty(shape, dtype=torch.float32),
            lse=self._lse,
            workspace=self._workspace,
            row_table=None if table is None else table.to(query.device),
            is_carried=is_carried,
        )

    def _after_ahead(self, ops: DecodeOps, layer: _Layer, query: Tensor, out: Tensor) -> _Rest:
        """Attend to the chunks that were copied ahead, if they were; what is left to attend to."""
        num_ahead = layer.num_ahead
        if not num_ahead or not all(map(self._ping_pong.holds, layer.chunks[:num_ahead])):
            return layer.whole
        self._attend_to_chunks(ops, layer, 0, num_ahead, query, out)
        return layer.after_ahead

    def _attend_to_chunks(
        self, ops: DecodeOps, layer: _Layer, begin: int, end: int, query: Tensor, out: Tensor
    ) -> None:
        """One after the other; of those that are copied now, the next one is copied meanwhile."""
        for i in range(begin, end):
            if layer.whole.first_chunk is not None:
                self._ping_pong.load(*layer.chunks[i : i + 2])
            view = self._ping_pong.take(layer.chunks[i])
            self._of_chunk(ops, query, view)(query, 0, None, out)

    def _of_chunk(self, ops: DecodeOps, query: Tensor, view: KVView) -> Any:
        """Attention to a chunk in one of the two buffers, whichever layer it is of."""
        kind = view.key.data_ptr(), view.key.shape[0]
        attend = self._chunk_attends.get(kind)
        if attend is None:
            self._chunk_attends[kind] = attend = self._prepared(ops, query, view, True)
        return attend

    def _load_ahead(self, layer_idx: int, pinned: Views) -> None:
        """Copy a layer's first chunks, once what the caller has enqueued is done: then the bus is
        free, and it stays so until that layer's query is there.
        """
        layer = self._layers.get(layer_idx)
        if not self.reads_ahead or layer is None or layer.pinned is not pinned:
            return
        if self._read_ahead.pays or self._stopwatch.is_first(layer_idx):
            self._ping_pong.load(*layer.chunks[: layer.num_ahead])

    def _prepare_pinned(self, ops: DecodeOps, layer: _Layer, query: Tensor, pinned: Views) -> None:
        is_plain = all(view.row_table is None for view in pinned)
        is_copied = is_plain and not self.reads_in_place
        most = None if is_copied else _CHUNKS_AHEAD if is_plain else 0
        layer.chunks = tuple(islice(self._ping_pong.chunks(pinned), most))
        layer.num_ahead = min(len(layer.chunks), _CHUNKS_AHEAD)
        num_ahead = sum(len(chunk.view.key) for chunk in layer.chunks[: layer.num_ahead])
        rests = (
            (layer.whole, 0, pinned),
            (layer.after_ahead, layer.num_ahead, _without(pinned, num_ahead)),
        )
        for rest, first_chunk, views in rests:
            rest.first_chunk = first_chunk if is_copied else None
            rest.num_tokens = sum(view.num_tokens for view in views)
            rest.num_bytes = self._bytes_per_token * sum(
                view.num_tokens * view.batch_size for view in views
            )
            if not is_copied:
                self._prepare_in_place(ops, rest, query, joined(views))
        layer.pinned = pinned

    def _prepare_in_place(self, ops: DecodeOps, rest: _Rest, query: Tensor, views: Views) -> None:
        is_plain = all(view.row_table is None for view in (*rest.views, *views))
        try:
            if not is_plain or len(views) != len(rest.attends):
                raise LayoutError("more or fewer than before")
            for attend, view in zip(rest.attends, views, strict=True):
                attend.attend_to(view.key, view.value)
        except LayoutError:
            rest.attends = [self._prepared(ops, query, view, True) for view in views]
        rest.views = views


def _without(views: Views, num_segments: int) -> Views:
    """All but the first segments."""
    kept = []
    for view in views:
        count = len(view.key)
        if num_segments < count:
            kept.append(view.segments(num_segments, count))
        num_segments = max(0, num_segments - count)
    return tuple(kept)


def _whole(window: Window) -> KVView:
    """All of a window, filled or not."""
    return KVView(window.key, window.value, torch.zeros(1, dtype=torch.int64))
