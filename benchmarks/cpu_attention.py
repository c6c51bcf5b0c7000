"""Measure decode attention on the CPU, over keys and values where the library keeps them.

For each number of threads and each model's shape: GB/s of keys and values, in each instruction set
that this machine has, and over blocks in random order, beside the read ceiling of the same memory
in the same rounds. At the highest number of threads also torch's own attention, over contiguous
keys and values, the torch ops that stand in where there is no native library, and the best
instruction set in calls of less memory. Last, errors against float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from torch import Tensor

from benchmarks.attention_checks import checks
from benchmarks.attention_error import errors
from benchmarks.attention_shapes import SHAPES, WINDOW_SIZE, KVMemory, Shape, Turns
from benchmarks.attention_ways import (
    Way,
    in_place,
    native_ways,
    random_blocks_way,
    torch_ways,
)
from benchmarks.buffer import HUGE_PAGE_BYTES
from benchmarks.ceilings import ReadCeiling, filled_buffer, measuring_bytes
from benchmarks.command import finish, parser, print_table, progress, run
from benchmarks.machine import available_bytes
from benchmarks.results import Row
from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import library

_ROWS, _QUICK_ROWS = 16, 2
_QUICK_BYTES = 16 << 20
_CALL_SECONDS, _QUICK_CALL_SECONDS = 0.08, 0.001
_MOST_BYTES = 4 << 30
"""Worth a call of some 30 ms on 16 fast cores."""
_CALLS, _QUICK_CALLS = tuple(mib << 20 for mib in (64, 256, 1024)), (1 << 20,)
"""Bytes of shorter calls: some 8K to 128K tokens of a Qwen3 layer in all."""
_ERROR_TOKENS, _QUICK_ERROR_TOKENS = 8192, 512


class Rounds:
    """Ways measured in turn over the same memory, each call long enough to be timed.

    Args:
        memory: keys and values.
        num_threads: threads of the library, of torch, and of the ceiling.
        call_seconds: what a call should take; slow ways attend to fewer segments.
    """

    def __init__(self, memory: KVMemory, num_threads: int, call_seconds: float) -> None:
        self._memory = memory
        self._num_threads = num_threads
        self._call_seconds = call_seconds
        self._turns = Turns(memory.span.num_bytes)
        self._ceiling = ReadCeiling(num_threads, memory.span)

    def measure(self, ways: Sequence[Way], rounds: int) -> list[Row]:
        """One row for each way."""
        counts = [self._segments_worth_a_call(way) for way in ways]
        return self._rows("rate", ways, counts, rounds)

    def measure_calls(self, way: Way, sizes: Sequence[int], rounds: int) -> list[Row]:
        """One row for each number of bytes that a call reads, or the fewest that hold them."""
        num_segments = self._memory.num_segments
        counts = [min(-(-size // self._memory.segment_bytes), num_segments) for size in sizes]
        return self._rows("call", [way] * len(counts), counts, rounds)

    def _rows(
        self, kind: str, ways: Sequence[Way], counts: Sequence[int], rounds: int
    ) -> list[Row]:
        ceiling: list[float] = []
        samples: list[list[float]] = [[] for _ in ways]
        for _ in range(rounds):
            ceiling.append(self._ceiling.measure(self._turns.next_byte))
            for way, count, kept in zip(ways, counts, samples, strict=True):
                kept.append(self._bytes(count) / self._time(way, count) / 1e9)
        return [
            {"kind": kind, **self._row(way, count, kept, ceiling)}
            for way, count, kept in zip(ways, counts, samples, strict=True)
        ]

    def _segments_worth_a_call(self, way: Way) -> int:
        """How many segments a call takes; the memory is not left cold, nor the way untried."""
        count = 1
        while True:
            seconds = self._time(way, count)
            fitting = int(count * self._call_seconds / seconds)
            if fitting < 2 * count or count == self._memory.num_segments:
                return max(1, min(fitting, self._memory.num_segments))
            count = min(fitting, 8 * count, self._memory.num_segments)

    def _time(self, way: Way, count: int) -> float:
        """Seconds of one call, over segments that were not read lately."""
        if way.isa is not None:
            library.set_isa(way.isa)
        first = self._turns.take(self._bytes(count), self._memory.segment_bytes)
        call = way.prepare(first // self._memory.segment_bytes, count)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def _bytes(self, count: int) -> int:
        return count * self._memory.segment_bytes

    def _row(self, way: Way, count: int, samples: list[float], ceiling: list[float]) -> Row:
        return {
            "shape": self._memory.shape.name,
            "way": way.name,
            "num_threads": self._num_threads,
            "gbs": median(samples),
            "ceiling_gbs": median(ceiling),
            "fraction": median(samples) / median(ceiling),
            "call_bytes": self._bytes(count),
            "rows": self._memory.rows,
            "tokens": count * WINDOW_SIZE,
            "memory_bytes": self._memory.span.num_bytes,
            "samples": samples,
            "ceiling_samples": ceiling,
        }


def error_rows(memory: KVMemory, query: Tensor, tokens: int) -> Iterator[Row]:
    """Errors of each instruction set against float64."""
    count = min(tokens // WINDOW_SIZE, memory.num_segments)
    key, value = memory.segments(0, count)
    for way in native_ways(memory, query):
        library.set_isa(way.isa)
        out, lse = in_place(cpu.partial_attention, memory, query, 0, count)()
        relative, of_lse = errors(out, lse, query, key, value, memory.shape.softmax_scale)
        yield {
            "kind": "error",
            "shape": memory.shape.name,
            "way": way.name,
            "tokens": count * WINDOW_SIZE,
            "relative_error": relative,
            "lse_error": of_lse,
        }


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows: shapes within numbers of threads, then errors."""
    is_quick = arguments.quick
    buffer = filled_buffer(_QUICK_BYTES if is_quick else _buffer_bytes())
    shapes = [SHAPES[name] for name in arguments.shapes]
    memories = [KVMemory(buffer, shape, _QUICK_ROWS if is_quick else _ROWS) for shape in shapes]
    queries = [_query(memory.shape, memory.rows) for memory in memories]
    seconds = _QUICK_CALL_SECONDS if is_quick else _CALL_SECONDS
    most = max(arguments.threads)
    rows: list[Row] = []
    torch_threads = torch.get_num_threads()
    try:
        with progress("attention", (len(arguments.threads) + 1) * len(shapes)) as advance:
            for num_threads in arguments.threads:
                library.set_num_threads(num_threads)
                torch.set_num_threads(num_threads)
                for memory, query in zip(memories, queries, strict=True):
                    ways = [*native_ways(memory, query), random_blocks_way(memory, query)]
                    if num_threads == most:
                        ways += torch_ways(memory, query)
                    here = Rounds(memory, num_threads, seconds)
                    rows += here.measure(ways, arguments.rounds)
                    if num_threads == most:
                        sizes = _QUICK_CALLS if is_quick else _CALLS
                        rows += here.measure_calls(ways[0], sizes, arguments.rounds)
                    advance()
            for memory, query in zip(memories, queries, strict=True):
                tokens = _QUICK_ERROR_TOKENS if is_quick else _ERROR_TOKENS
                rows += error_rows(memory, query, tokens)
                advance()
    finally:
        library.set_isa(None)
        library.set_num_threads(None)
        torch.set_num_threads(torch_threads)
    return rows


def _buffer_bytes() -> int:
    """Over four last-level caches, and some calls' worth where that much memory is to spare."""
    spare = available_bytes() // 8 // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return max(measuring_bytes(), min(spare, _MOST_BYTES))


def _query(shape: Shape, rows: int) -> Tensor:
    """(rows, num_heads, 1, head_dim), wide enough for scores that prefer some keys to others."""
    generator = torch.Generator().manual_seed(0)
    query = 3.0 * torch.randn(rows, shape.num_heads, 1, shape.head_dim, generator=generator)
    return query.to(torch.bfloat16)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__, rounds=7)
    options.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=list(SHAPES),
        help="shapes to measure (default: all)",
    )
    arguments = options.parse_args(argv)
    rows = measure(arguments)
    lines = [
        (r["shape"], r["way"], r["num_threads"], r["gbs"], r["ceiling_gbs"], r["fraction"])
        for r in rows
        if r["kind"] == "rate"
    ]
    columns = ("shape", "way", "threads", "GB/s", "read ceiling", "fraction")
    print_table("attention on the CPU", columns, lines)
    found = [
        (r["shape"], r["way"], f"{r['relative_error']:.1e}", f"{r['lse_error']:.1e}")
        for r in rows
        if r["kind"] == "error"
    ]
    print_table("errors against float64", ("shape", "way", "out", "lse"), found)
    finish("cpu_attention", rows, checks, arguments)


if __name__ == "__main__":
    run(main)
