"""The decode step with one of its parts replaced by what others do (arXiv:2609.14507, Figure 10).

The step is put together here from the library's public parts, so that one can be replaced while
all others stay; it is compared with itself as it is. What a replacement emulates:

- pageable source: as many bytes come from memory that is not registered;
- strided source: they are slices of one tensor allocated for the longest context, rows by kv heads
  by tokens; torch puts such a slice together in pageable memory before it copies it;
- rebuilt buffers: the bytes are put together anew, in page-locked memory, in every step;
- torch's kernel: torch's fused attention attends on the CPU, where the native library does else;
- share 0.5: the library's own step, where the share follows no measurement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from statistics import median

import torch
from torch import Tensor

from benchmarks.attention_shapes import Turns
from benchmarks.ceilings import filled_buffer
from benchmarks.decode_case import Case
from benchmarks.decode_rates import region_rates
from benchmarks.decode_rounds import StepCeilings, take_turns
from benchmarks.decode_sweep import WARM_UP
from benchmarks.decode_ways import RegionDecode
from benchmarks.results import Row
from sparsekv import merge_partials
from sparsekv.attention.host import Partial
from sparsekv.format import KVView, PartitionSpec
from sparsekv.kernels import cpu
from sparsekv.kernels.dispatch import partial_attention_for
from sparsekv.regions.stack import split_elements

LIBRARY, AS_IT_IS, FIXED_SHARE = "the library", "the step as it is", "share 0.5"
TORCH_KERNEL = "torch's kernel"
_LAYERS = 4

PartialAttention = Callable[..., Partial]

Source = Callable[[Tensor], Tensor]
"""From the elements of one segment in the pinned region to what is copied instead: as many, of any
shape and content.
"""


def ablations(case: Case, cpu_share: float, rounds: int, ceilings: StepCeilings) -> Iterator[Row]:
    """A row for each replacement, measured in turn over the same cache, and with the ceilings."""
    case = case.with_layers(_LAYERS)
    way = RegionDecode(case, cpu_share, 6 * (WARM_UP + rounds))
    fixed = RegionDecode(case, 0.5, WARM_UP + rounds)
    placed = {id(of): of.placed_bytes() for of in (way, fixed)}
    layer_bytes = case.kv_bytes // case.num_layers
    elsewhere = filled_buffer(layer_bytes).tensor()[:layer_bytes].view(torch.bfloat16)
    sources: dict[str, Source] = {
        AS_IT_IS: lambda host: host,
        "pageable source": PageableSource(elsewhere),
        "strided source": StridedSource(elsewhere, way.cache.spec),
        "rebuilt buffers": _rebuilt,
    }
    steps: dict[str, Callable[[], object]] = {LIBRARY: way.step, FIXED_SHARE: fixed.step}
    for name, source in sources.items():
        steps[name] = AblatedStep(case, way, Transfer(way.cache.spec, case.device, source)).run
    own = Transfer(way.cache.spec, case.device, sources[AS_IT_IS])
    steps[TORCH_KERNEL] = AblatedStep(case, way, own, attend_by_torch).run
    found: list[Row] = []
    turns = [*steps.values(), lambda: found.append(ceilings.measure())]
    samples = dict(zip(steps, take_turns(turns, case.device, rounds, WARM_UP), strict=False))
    for name, seconds in samples.items():
        of, share = (fixed, 0.5) if name == FIXED_SHARE else (way, cpu_share)
        base = samples[LIBRARY if name in (LIBRARY, FIXED_SHARE) else AS_IT_IS]
        yield {
            **case.known,
            "kind": "ablation",
            "way": name,
            "share": share,
            "relative_speed": median(base) / median(seconds),
            **region_rates(case, seconds, placed[id(of)], found[WARM_UP:]),
        }


def attend_by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    softmax_scale: float,
    *,
    query_start: int,
) -> Partial:
    """torch's own attention on the CPU over segments, all of them older than the one query.

    The query heads of a kv head are tokens, which is the fastest way to call it.

    Args:
        query: (batch, num_heads, 1, head_dim).
        key, value: (segments, batch, num_kv_heads, tokens, head_dim or head_dim_v).
    Returns:
        (batch, num_heads, 1, head_dim_v) and (batch, num_heads, 1), float32.
    """
    segments, batch, heads = key.shape[:3]
    folded = query.reshape(batch, heads, -1, query.shape[3]).repeat(segments, 1, 1, 1)
    outs, lses = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, key.flatten(0, 1), value.flatten(0, 1), scale=softmax_scale
    )
    lses = lses.unflatten(0, (segments, batch))
    weights = lses.softmax(0)[..., None]
    out = (outs.unflatten(0, (segments, batch)) * weights).sum(0)
    shape = query.shape[:3]
    return out.reshape(*shape, -1), lses.logsumexp(0).reshape(shape)


class PageableSource:
    """As many elements of memory that is not registered, never the same ones soon again."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._turns = Turns(memory.numel())

    def __call__(self, host: Tensor) -> Tensor:
        """As many elements as `host` has."""
        first = self._turns.take(host.numel(), 1)
        return self._memory[first : first + host.numel()]


class StridedSource:
    """A slice of tokens out of a tensor (rows, num_kv_heads, all tokens, elements)."""

    def __init__(self, memory: Tensor, spec: PartitionSpec) -> None:
        heads, elements = spec.geometry.num_kv_heads, spec.geometry.elements_per_token
        self._tensor = memory.view(spec.batch_size, heads, -1, elements)
        self._segment_tokens = spec.segment_tokens
        self._turns = Turns(self._tensor.shape[2])

    def __call__(self, host: Tensor) -> Tensor:
        """(rows, num_kv_heads, tokens of a segment, elements)"""
        first = self._turns.take(self._segment_tokens, 1)
        return self._tensor[:, :, first : first + self._segment_tokens]


def _rebuilt(host: Tensor) -> Tensor:
    is_cuda = torch.cuda.is_available()
    return torch.empty(host.shape, dtype=host.dtype, pin_memory=is_cuda).copy_(host)


class Transfer:
    """Two buffers on the accelerator through which a layer's pinned views pass, one ahead.

    Args:
        spec: the cut of the cache.
        device: the accelerator.
        source: where the bytes come from instead of the region.
    """

    def __init__(self, spec: PartitionSpec, device: torch.device, source: Source) -> None:
        self._spec, self._source = spec, source
        self._per_segment = spec.segment_bytes // spec.geometry.dtype.itemsize
        self._segments_per_chunk = spec.ping_pong_tokens // spec.segment_tokens
        size = self._segments_per_chunk * self._per_segment
        self._buffers = deque(
            torch.empty(size, dtype=spec.geometry.dtype, device=device) for _ in range(2)
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, views: Sequence[KVView]) -> Iterator[KVView]:
        """The views on the accelerator, chunk by chunk; each is used before the next is asked
        for, on the current stream.
        """
        chunks = self._chunks(views)
        under_way = deque(self._begin(chunk) for chunk in islice(chunks, 1))
        while under_way:
            for chunk in islice(chunks, 1):
                under_way.append(self._begin(chunk))
            view, ready = under_way.popleft()
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
            yield view

    def _chunks(self, views: Sequence[KVView]) -> Iterator[KVView]:
        for view in views:
            for first in range(0, view.key.shape[0], self._segments_per_chunk):
                part = slice(first, first + self._segments_per_chunk)
                yield KVView(view.key[part], view.value[part], view.positions[part])

    def _begin(self, chunk: KVView) -> tuple[KVView, torch.cuda.Event | None]:
        """Begin a copy into the buffer used least lately; the view there, and when it is."""
        count = chunk.key.shape[0]
        # A slot begins with its first key and is one piece.
        slots = chunk.key.as_strided((count, self._per_segment), (chunk.key.stride(0), 1))
        buffer, ready = self._buffers[0], None
        self._buffers.rotate()
        # Slot by slot: a copy must not cross from one registration into the next.
        pairs = list(zip(buffer.split(self._per_segment), slots, strict=False))
        if self._stream is None:
            self._copy(pairs)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())  # the buffer's last reader
            with torch.cuda.stream(self._stream):
                self._copy(pairs)
                ready = self._stream.record_event()
        rows, heads = chunk.key.shape[1:3]
        elements = buffer[: count * self._per_segment].view(count, rows, heads, -1)
        key, value = split_elements(elements, self._spec.geometry, self._spec.segment_tokens)
        return KVView(key, value, chunk.positions), ready

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, slot in pairs:
            host = self._source(slot)
            target.view(host.shape).copy_(host, non_blocking=True)


class AblatedStep:
    """One step of all layers, out of public parts.

    Args:
        case: what is decoded.
        way: holds the cache.
        load: brings pinned views to the accelerator.
        on_cpu: attends to the unpinned ones.
    """

    def __init__(
        self,
        case: Case,
        way: RegionDecode,
        load: Transfer,
        on_cpu: PartialAttention = cpu.partial_attention,
    ) -> None:
        self._cache, self._load, self._on_cpu = way.cache, load, on_cpu
        self._scale, self._num_layers = case.shape.softmax_scale, case.num_layers
        self._query, self._token = case.query(), case.new_token()

    def run(self) -> Tensor:
        """Append and attend, in every layer."""
        for layer_idx in range(self._num_layers):
            self._cache.append(layer_idx, *self._token)
            out = self._attend(layer_idx)
            self._cache.flush(layer_idx)
        return out

    def _attend(self, layer_idx: int) -> Tensor:
        views, query = self._cache.views(layer_idx), self._query
        newest = views.num_tokens - 1
        on_device = partial_attention_for(query.device)

        def attend(op: PartialAttention, part: KVView, query: Tensor) -> tuple[Tensor, Tensor]:
            return op(query, part.key, part.value, part.positions, self._scale, query_start=newest)

        cpu_query = query.cpu()
        parts = [attend(on_device, part, query) for part in views.window]
        parts += [attend(on_device, part, query) for part in self._load(views.pinned)]
        for part in views.unpinned:
            out, lse = attend(self._on_cpu, part, cpu_query)
            parts.append((out.to(query.device), lse.to(query.device)))
        return merge_partials(parts)[0]
