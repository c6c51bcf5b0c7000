"""Measure decode attention on the GPU: over its own memory, and over host memory in place.

For each model's shape: GB/s of keys and values for whole rows, random blocks of 64 tokens and
pieces of about 1 KB, beside a copy inside the GPU and a copy from host to GPU in the same rounds;
and microseconds of a short step: append, attention to one window, merge with another part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.attention_shapes import SHAPES, WINDOW_SIZE, KVMemory, Shape, Turns
from benchmarks.buffer import Buffer, Span
from benchmarks.ceilings import BusCeiling, filled_buffer, hbm_copy_gbs
from benchmarks.command import finish, parser, print_table, progress, run
from benchmarks.results import Check, Row
from sparsekv.kernels.block_lists import BlockLists

_ROWS, _QUICK_ROWS = 16, 2
_GPU_BYTES, _HOST_BYTES, _QUICK_BYTES = 4 << 30, 2 << 30, 16 << 20
_GPU_CALL_BYTES, _HOST_CALL_BYTES = 1 << 30, 256 << 20
_CALLS = 4
_STEPS, _QUICK_STEPS = 300, 10
_PIECE_BYTES = 1024

# Fractions of the copy beside it: place, shape (None: each), pieces, at least.
_TARGETS = (
    ("gpu", "qwen3", "rows", 0.80),
    ("gpu", "mixtral", "rows", 0.80),
    ("host", None, "rows", 0.88),
    ("host", None, "blocks", 0.88),
    ("host", None, "pieces", 0.80),
)
_STEP_US = 40.0


class GpuBuffer(Buffer):
    """Memory of the GPU instead, filled with finite bfloat16 numbers."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._bytes.view(torch.bfloat16).normal_()
        self.span = Span(self._bytes.data_ptr(), num_bytes)

    def tensor(self) -> Tensor:
        """All of it, as a tensor of bytes."""
        return self._bytes


@contextmanager
def registered(buffer: Buffer) -> Iterator[Buffer]:
    """Within, the buffer is registered with the GPU."""
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(buffer.span.address, buffer.span.num_bytes, 0))
    if code != 0:
        raise RuntimeError(f"registering memory with the GPU failed with error {code}")
    try:
        yield buffer
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(buffer.span.address)


@dataclass(frozen=True, slots=True)
class Way:
    """Attention to `count` segments of some memory, or to half of their blocks.

    Attributes:
        place: "gpu" or "host".
        pieces: "rows", "blocks" or "pieces".
        memory: keys and values.
        count: segments of a call.
        block_size: tokens of a block; None for whole rows.
    """

    place: str
    pieces: str
    memory: KVMemory
    count: int
    block_size: int | None

    @property
    def call_bytes(self) -> int:
        """Keys and values that a call reads."""
        return self.count * self.memory.segment_bytes // (1 if self.block_size is None else 2)

    def prepared(self) -> Callable[[int], object]:
        """A call of the attention kernel, from some segment on, that allocates nothing."""
        shape, rows, count = self.memory.shape, self.memory.rows, self.count
        query = torch.randn(rows, shape.num_heads, 1, shape.head_dim, device="cuda").bfloat16()
        blocks = None
        if self.block_size is not None:
            existing = count * WINDOW_SIZE // self.block_size
            heads = (rows, shape.num_kv_heads)
            chosen = torch.rand(*heads, existing, device="cuda").argsort(-1)[..., : existing // 2]
            blocks = BlockLists(
                indices=chosen.sort(-1).values.contiguous(),
                num_blocks=torch.full(heads, existing // 2, device="cuda"),
                block_size=self.block_size,
            )
        out = torch.empty(rows, shape.num_heads, 1, shape.head_dim_v, device="cuda")
        lse = torch.empty(rows, shape.num_heads, 1, device="cuda")
        room = _ops().workspace_numel(query, *self.memory.segments(0, 1))
        workspace = torch.empty(max(room, 1), device="cuda")
        positions = torch.arange(count) * WINDOW_SIZE

        def call(first: int) -> object:
            return _ops().partial_attention(
                query,
                *self.memory.segments(first, count),
                positions,
                shape.softmax_scale,
                query_start=count * WINDOW_SIZE - 1,
                blocks=blocks,
                out=out,
                lse=lse,
                workspace=workspace,
            )

        return call


def ways(shape: Shape, place: str, buffer: Buffer, quick: bool) -> list[Way]:
    """What is measured over one memory."""
    memory = KVMemory(buffer, shape, _QUICK_ROWS if quick else _ROWS)
    wanted = _GPU_CALL_BYTES if place == "gpu" else _HOST_CALL_BYTES
    count = max(1, min(wanted // memory.segment_bytes, memory.num_segments // 2))
    piece = max(1, _PIECE_BYTES // (2 * shape.head_dim))
    kinds = (("rows", None), ("blocks", 64), ("pieces", piece))
    return [Way(place, pieces, memory, count, block_size) for pieces, block_size in kinds]


def measure_rates(
    shape: Shape, buffers: dict[str, Buffer], bus: BusCeiling, rounds: int, quick: bool
) -> list[Row]:
    """One row for each way, and the copies beside them."""
    measured = [w for place, buffer in buffers.items() for w in ways(shape, place, buffer, quick)]
    calls = [way.prepared() for way in measured]
    turns = [Turns(way.memory.span.num_bytes) for way in measured]
    samples: list[list[float]] = [[] for _ in measured]
    ceilings: dict[str, list[float]] = {"gpu": [], "host": []}
    for i in range(1 + rounds):
        copies = {"gpu": hbm_copy_gbs(), "host": bus.h2d()}
        for way, call, turn, kept in zip(measured, calls, turns, samples, strict=True):
            gbs = _gbs(way, call, turn)
            if i:  # the first round compiles
                kept.append(gbs)
        for place, kept in ceilings.items():
            kept.append(copies[place])
    return [
        {
            "kind": "rate",
            "shape": shape.name,
            "place": way.place,
            "pieces": way.pieces,
            "block_size": way.block_size or 0,
            "gbs": median(kept),
            "ceiling_gbs": median(ceilings[way.place]),
            "fraction": median(kept) / median(ceilings[way.place]),
            "call_bytes": way.call_bytes,
            "rows": way.memory.rows,
            "tokens": way.count * WINDOW_SIZE,
            "samples": kept,
        }
        for way, kept in zip(measured, samples, strict=True)
    ]


def _gbs(way: Way, call: Callable[[int], object], turns: Turns) -> float:
    """GB/s over some calls, each over segments that were not read lately."""
    size = way.memory.segment_bytes
    firsts = [turns.take(way.count * size, size) // size for _ in range(_CALLS + 1)]
    call(firsts.pop())
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for segment in firsts:
        call(segment)
    last.record()
    last.synchronize()
    return _CALLS * way.call_bytes / first.elapsed_time(last) / 1e6


def measure_step(shape: Shape, device: Buffer, steps: int, rows: int) -> Row:
    """Microseconds of a step over one window: to issue it, and until it is done."""
    memory = KVMemory(device, shape, rows)
    key, value = memory.segments(0, 1)
    query = torch.randn(rows, shape.num_heads, 1, shape.head_dim, device="cuda").bfloat16()
    stored = torch.empty(query.shape, dtype=torch.float32).pin_memory()
    out = torch.empty(rows, shape.num_heads, 1, shape.head_dim_v, device="cuda")
    lse = torch.empty(rows, shape.num_heads, 1, device="cuda")
    other = (torch.randn(out.shape).pin_memory(), torch.randn(lse.shape).pin_memory())
    workspace = torch.empty(max(_ops().workspace_numel(query, key, value), 1), device="cuda")
    new_value = None if shape.shared_kv else value[0, :, :, :1].clone()
    new_key, window_value = key[0, :, :, :1].clone(), None if shape.shared_kv else value[0]
    append = _ops().PreparedAppend(
        new_key, new_value, key[0], window_value, query=query, stored_query=stored
    )
    attend = _ops().PreparedAttention(
        query, key, value, shape.softmax_scale, out=out, lse=lse, workspace=workspace
    )
    merge = _ops().PreparedMerge([(out, lse), other], out=out, lse=lse)

    def step() -> None:
        append(new_key, new_value, 7, query)
        attend(query, WINDOW_SIZE - 1)
        merge()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    done = time.perf_counter() - start
    return {
        "kind": "step",
        "shape": shape.name,
        "rows": rows,
        "issue_us": issued / steps * 1e6,
        "step_us": done / steps * 1e6,
    }


def _ops() -> ModuleType:
    """The kernels; imported when something is measured, since results are read without Triton."""
    from sparsekv.kernels import triton

    return triton


def checks(rows: Sequence[Row]) -> list[Check]:
    """Fractions of the copies, and the step; what was not measured is not checked."""
    found = []
    for place, shape, pieces, target in _TARGETS:
        for row in rows:
            is_it = row["kind"] == "rate" and (row["place"], row["pieces"]) == (place, pieces)
            if is_it and shape in (None, row["shape"]):
                copy = "the copy inside the GPU" if place == "gpu" else "the copy from the host"
                name = f"{row['shape']}, {pieces}, {place}: fraction of {copy}"
                found.append(Check(name=name, value=row["fraction"], target=target))
    for row in rows:
        if row["kind"] == "step":
            name = f"{row['shape']}, a short step: microseconds"
            value = row["step_us"]
            found.append(Check(name=name, value=value, target=_STEP_US, lower_is_better=True))
    return found


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows."""
    sizes = (_QUICK_BYTES, _QUICK_BYTES) if arguments.quick else (_GPU_BYTES, _HOST_BYTES)
    device: Buffer = GpuBuffer(sizes[0])
    rows: list[Row] = []
    shapes = [SHAPES[name] for name in arguments.shapes]
    steps = partial(
        measure_step,
        steps=_QUICK_STEPS if arguments.quick else _STEPS,
        rows=_QUICK_ROWS if arguments.quick else _ROWS,
    )
    with (
        registered(filled_buffer(sizes[1])) as host,
        BusCeiling(4 if arguments.quick else 24) as bus,
        progress("attention on the GPU", len(shapes)) as advance,
    ):
        for shape in shapes:
            buffers = {"gpu": device, "host": host}
            rows += measure_rates(shape, buffers, bus, arguments.rounds, arguments.quick)
            rows.append(steps(shape, device))
            advance()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    made = parser(__doc__, rounds=5)
    made.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    arguments = made.parse_args(argv)
    rows = measure(arguments)
    names = ("shape", "place", "pieces", "gbs", "ceiling_gbs", "fraction")
    lines = [[row[name] for name in names] for row in rows if row["kind"] == "rate"]
    print_table(
        "attention on the GPU",
        ("shape", "keys in", "pieces", "GB/s", "copy GB/s", "fraction"),
        lines,
    )
    of_step = ("shape", "rows", "issue_us", "step_us")
    lines = [[row[name] for name in of_step] for row in rows if row["kind"] == "step"]
    print_table("a short step", ("shape", "rows", "us to issue", "us"), lines)
    finish("gpu_attention", rows, checks, arguments)


if __name__ == "__main__":
    run(main)
