"""Measure decode attention on the GPU: over its own memory, and over host memory in place.

For each model's shape: GB/s of keys and values for whole rows, random blocks of 64 tokens and
pieces of about 1 KB, beside a copy inside the GPU and a copy from host to GPU in the same rounds;
and microseconds of a short step: append, attention to one window, merge with another part. All are
the prepared launches of a decode step, and the GPU's time alone: it begins when all are queued.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

import torch
from torch import Tensor

from benchmarks.attention_shapes import SHAPES, WINDOW_SIZE, KVMemory, Shape
from benchmarks.buffer import Buffer, Span
from benchmarks.ceilings import BusCeiling, filled_buffer, hbm_copy_gbs
from benchmarks.command import finish, parser, print_table, progress, run
from benchmarks.gpu_launches import Launches, attention_launches, step_launches
from benchmarks.gpu_timing import timed
from benchmarks.results import Check, Row
from sparsekv.kernels.block_lists import BlockLists

_ROWS, _QUICK_ROWS = 16, 2
_GPU_BYTES, _HOST_BYTES, _QUICK_BYTES = 4 << 30, 2 << 30, 16 << 20
_GPU_CALL_BYTES, _HOST_CALL_BYTES = 1 << 30, 256 << 20
_CALLS = 16
_STEPS, _STEP_LAYERS = 64, 32
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

    def launches(self) -> Launches:
        """Attention to one layer after the other; what host memory holds is added to what the GPU
        has found.
        """
        query, blocks = _query(self.memory), None
        if self.block_size is not None:
            existing = self.count * WINDOW_SIZE // self.block_size
            heads = (self.memory.rows, self.memory.shape.num_kv_heads)
            chosen = torch.rand(*heads, existing, device="cuda").argsort(-1)[..., : existing // 2]
            blocks = BlockLists(
                indices=chosen.sort(-1).values.contiguous(),
                num_blocks=torch.full(heads, existing // 2, device="cuda"),
                block_size=self.block_size,
            )
        is_carried = self.place == "host"
        return attention_launches(
            self.memory, query, self.count, blocks=blocks, is_carried=is_carried
        )


def _query(memory: KVMemory) -> Tensor:
    shape = (memory.rows, memory.shape.num_heads, 1, memory.shape.head_dim)
    return torch.randn(shape, device="cuda").bfloat16()


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
    launches = [way.launches() for way in measured]
    for each in launches:
        timed(each)  # loads the kernels
    samples: list[list[float]] = [[] for _ in measured]
    issues: list[list[float]] = [[] for _ in measured]
    ceilings: dict[str, list[float]] = {"gpu": [], "host": []}
    for _ in range(rounds):
        ceilings["gpu"].append(hbm_copy_gbs())
        ceilings["host"].append(bus.h2d())
        for way, each, kept, issued in zip(measured, launches, samples, issues, strict=True):
            seconds, issue_seconds = timed(list(islice(cycle(each), _CALLS)))
            kept.append(_CALLS * way.call_bytes / seconds / 1e9)
            issued.append(1e6 * issue_seconds / _CALLS)
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
            "issue_us": median(issued),
            "samples": kept,
        }
        for way, kept, issued in zip(measured, samples, issues, strict=True)
    ]


def measure_step(shape: Shape, device: Buffer, rounds: int, rows: int) -> Row:
    """Microseconds of a short step: for the host to issue it, and for the GPU to do it."""
    memory = KVMemory(device, shape, rows)
    query = _query(memory)
    key, value = (tensor[0, :, :, :1].clone() for tensor in memory.segments(0, 1))
    found = torch.randn(1, *query.shape[:3], shape.head_dim_v)
    launches = step_launches(
        memory,
        query,
        (key, None if shape.shared_kv else value),
        torch.empty(query.shape, dtype=torch.float32).pin_memory(),
        (found.pin_memory(), found[..., 0].contiguous().pin_memory()),
        min(_STEP_LAYERS, memory.num_segments),
    )
    steps = list(islice(cycle(launches), _STEPS))
    timed(steps)  # loads the kernels
    seconds, issue_seconds = zip(*(timed(steps) for _ in range(rounds)), strict=True)
    samples = [1e6 * s / _STEPS for s in seconds]
    return {
        "kind": "step",
        "shape": shape.name,
        "rows": rows,
        "issue_us": 1e6 * median(issue_seconds) / _STEPS,
        "step_us": median(samples),
        "samples": samples,
    }


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
    num_rows = _QUICK_ROWS if arguments.quick else _ROWS
    with (
        registered(filled_buffer(sizes[1])) as host,
        BusCeiling(4 if arguments.quick else 24) as bus,
        progress("attention on the GPU", len(shapes)) as advance,
    ):
        for shape in shapes:
            buffers = {"gpu": device, "host": host}
            rows += measure_rates(shape, buffers, bus, arguments.rounds, arguments.quick)
            rows.append(measure_step(shape, device, arguments.rounds, num_rows))
            advance()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    made = parser(__doc__, rounds=5)
    made.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    arguments = made.parse_args(argv)
    rows = measure(arguments)
    names = ("shape", "place", "pieces", "gbs", "ceiling_gbs", "fraction", "issue_us")
    lines = [[row[name] for name in names] for row in rows if row["kind"] == "rate"]
    print_table(
        "attention on the GPU",
        ("shape", "keys in", "pieces", "GB/s", "copy GB/s", "fraction", "us to issue"),
        lines,
    )
    of_step = ("shape", "rows", "issue_us", "step_us")
    lines = [[row[name] for name in of_step] for row in rows if row["kind"] == "step"]
    print_table("a short step", ("shape", "rows", "us to issue", "us"), lines)
    finish("gpu_attention", rows, checks, arguments)


if __name__ == "__main__":
    run(main)
