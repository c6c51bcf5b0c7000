"""Measure the gather of blocks into a staging buffer, and the copy of segments out of one.

For each number of threads and each size of pieces, GB/s of what is copied: by the library, and by
torch's index_select; beside the better of glibc's memcpy and a non-temporal copy of as many bytes,
contiguous, by as many threads, in the same rounds. Each call takes pieces that were not read
lately.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from benchmarks.attention_shapes import SHAPES, WINDOW_SIZE, KVMemory, Turns
from benchmarks.buffer import Buffer
from benchmarks.ceilings import CopyCeiling, filled_buffer, measuring_bytes
from benchmarks.command import finish, parser, print_table, progress, run
from benchmarks.gather_pieces import GatherPieces, numbers_of
from benchmarks.machine import llc_bytes
from benchmarks.results import Check, Row
from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import library

PIECE_BYTES = (16384, 4096, 1024)

_TARGETS = {16384: 0.90, 1024: 0.65}
_ROWS, _QUICK_ROWS = 16, 2
_QUICK_BYTES = 32 << 20
_CALL_BYTES = 256 << 20
_LEAST_CALLS = 5
"""Calls that the memory must hold, so that each takes other pieces."""

Way = tuple[str, int, Callable[[], object]]
"""Name, bytes and call of what is measured."""


def checks(rows: Sequence[Row]) -> list[Check]:
    """The gather's fractions of the best copy, at the highest number of threads."""
    most = max(row["num_threads"] for row in rows)
    return [
        Check(
            name=f"gather of {row['piece_bytes']} B pieces, {most} threads, of the best copy",
            value=row["fraction"],
            target=_TARGETS[row["piece_bytes"]],
        )
        for row in rows
        if (row["way"], row["num_threads"]) == ("gather", most) and row["piece_bytes"] in _TARGETS
    ]


class Rounds:
    """Ways measured in turn, and the copies they are held to between them.

    Args:
        num_threads: threads of the library, of torch, and of the ceilings.
        memory: keys and values.
        target: where to, in the ceilings; as large as a call.
    """

    def __init__(self, num_threads: int, memory: KVMemory, target: Buffer) -> None:
        self._num_threads = num_threads
        self._memory = memory
        self._target = target
        self._turns = Turns(memory.span.num_bytes)

    def measure(self, piece_bytes: int, ways: Sequence[Way], rounds: int) -> list[Row]:
        """One row for each way."""
        memcpy: list[float] = []
        stream: list[float] = []
        samples: list[list[float]] = [[] for _ in ways]
        for _ in range(rounds):
            memcpy.append(self._ceiling().memcpy())
            stream.append(self._ceiling().stream())
            for (_, num_bytes, call), kept in zip(ways, samples, strict=True):
                start = time.perf_counter()
                call()
                kept.append(num_bytes / (time.perf_counter() - start) / 1e9)
        best = max(median(memcpy), median(stream))
        return [
            {
                "way": name,
                "piece_bytes": piece_bytes,
                "num_threads": self._num_threads,
                "gbs": median(kept),
                "memcpy_gbs": median(memcpy),
                "stream_gbs": median(stream),
                "fraction": median(kept) / best,
                "call_bytes": num_bytes,
                "memory_bytes": self._memory.span.num_bytes,
                "last_level_caches": self._memory.span.num_bytes / (llc_bytes() or 1),
                "samples": kept,
                "memcpy_samples": memcpy,
                "stream_samples": stream,
            }
            for (name, num_bytes, _), kept in zip(ways, samples, strict=True)
        ]

    def _ceiling(self) -> CopyCeiling:
        num_bytes = self._target.span.num_bytes
        source = self._memory.span.part(self._turns.take(num_bytes, 256), num_bytes)
        return CopyCeiling(self._num_threads, self._target.span, source)


def segment_copies(memory: KVMemory, buffer: Buffer, staging: Buffer) -> Way:
    """Copies of as many segments as the staging buffer holds, one after the other, to their place.

    Keys and values of a head lie end to end, so that one call copies both.
    """
    count = staging.span.num_bytes // memory.segment_bytes
    shape = (-1, memory.rows, memory.shape.num_kv_heads, 2 * WINDOW_SIZE, memory.shape.head_dim)
    used = staging.tensor()[: count * memory.segment_bytes].view(torch.bfloat16)
    staged, places = used.view(shape), numbers_of(memory, buffer).view(shape)
    turns = Turns(memory.num_segments)

    def copy() -> None:
        first = turns.take(count, 1)
        for source, out in zip(staged, places[first : first + count], strict=True):
            cpu.copy_segment(source, out)

    return "segments", count * memory.segment_bytes, copy


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows: sizes of pieces within numbers of threads."""
    is_quick = arguments.quick
    buffer = filled_buffer(_QUICK_BYTES if is_quick else measuring_bytes())
    memory = KVMemory(buffer, SHAPES["qwen3"], _QUICK_ROWS if is_quick else _ROWS)
    call_bytes = min(_CALL_BYTES, memory.span.num_bytes // _LEAST_CALLS)
    target = filled_buffer(call_bytes)
    pieces = {size: GatherPieces(memory, buffer, target.tensor(), size) for size in PIECE_BYTES}
    for size, some in pieces.items():
        if not some.is_exact():
            raise RuntimeError(f"the gather of {size} B pieces is wrong: run the tests")
    rows: list[Row] = []
    torch_threads = torch.get_num_threads()
    try:
        with progress("gather", len(arguments.threads) * len(PIECE_BYTES)) as advance:
            for num_threads in arguments.threads:
                library.set_num_threads(num_threads)
                torch.set_num_threads(num_threads)
                rounds = Rounds(num_threads, memory, target)
                for size, some in pieces.items():
                    ways: list[Way] = [
                        ("gather", some.num_bytes, some.gather),
                        ("torch index_select", some.num_bytes, some.index_select),
                    ]
                    if size == max(PIECE_BYTES):
                        ways.append(segment_copies(memory, buffer, target))
                    rows += rounds.measure(size, ways, arguments.rounds)
                    advance()
    finally:
        library.set_num_threads(None)
        torch.set_num_threads(torch_threads)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    arguments = parser(__doc__, rounds=7).parse_args(argv)
    rows = measure(arguments)
    lines = [
        (
            r["way"],
            "whole" if r["way"] == "segments" else r["piece_bytes"],
            r["num_threads"],
            r["gbs"],
            r["memcpy_gbs"],
            r["stream_gbs"],
            r["fraction"],
        )
        for r in rows
    ]
    columns = ("way", "piece, bytes", "threads", "GB/s", "memcpy", "non-temporal", "fraction")
    print_table("copies on the CPU", columns, lines)
    finish("cpu_gather", rows, checks, arguments)


if __name__ == "__main__":
    run(main)
