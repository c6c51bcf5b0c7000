"""Measure how fast this machine reads, writes and copies memory, and copies to and from its GPU.

Nothing of the product takes part. Every other number is judged by these, measured again beside it
by the classes that this module gathers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from benchmarks.buffer import Buffer, Span, measuring_bytes
from benchmarks.bus_ceilings import COPY_BYTES, BusCeiling, hbm_copy_gbs
from benchmarks.command import finish, parser, print_table, progress, run
from benchmarks.machine import llc_bytes
from benchmarks.memory_ceilings import (
    CopyCeiling,
    ReadCeiling,
    ReadLoad,
    WriteCeiling,
    fill,
    filled_buffer,
)
from benchmarks.results import Check, Row

__all__ = [
    "Buffer",
    "BusCeiling",
    "CopyCeiling",
    "ReadCeiling",
    "ReadLoad",
    "Span",
    "WriteCeiling",
    "fill",
    "filled_buffer",
    "hbm_copy_gbs",
    "measuring_bytes",
]

_QUICK_BYTES = 8 << 20

Measurement = tuple[Row, Callable[[], "dict[str, float]"]]
"""What goes into the row before it is measured, and one round of it: GB/s by name."""


def checks(rows: Sequence[Row]) -> list[Check]:
    """None: a ceiling is what others are held to."""
    return []


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All ceilings, each measured once in every round."""
    num_bytes = _QUICK_BYTES if arguments.quick else measuring_bytes(num_buffers=2)
    buffers = [filled_buffer(num_bytes) for _ in range(2)]
    with ExitStack() as stack:
        measurements = list(_on_the_cpu(arguments.threads, *buffers))
        if torch.cuda.is_available():
            bus = stack.enter_context(BusCeiling())
            measurements += _on_the_gpu(arguments.threads, bus, buffers[0])
        samples: list[list[dict[str, float]]] = [[] for _ in measurements]
        total = arguments.rounds * len(measurements)
        with progress("ceilings", total) as advance:
            for _ in range(arguments.rounds):
                for kept, (_, measure_once) in zip(samples, measurements, strict=True):
                    kept.append(measure_once())
                    advance()
    return [_row(known, kept) for (known, _), kept in zip(measurements, samples, strict=True)]


def _on_the_cpu(threads: Sequence[int], buffer: Buffer, target: Buffer) -> Iterator[Measurement]:
    span = buffer.span
    known: Row = {
        "bytes": span.num_bytes,
        "last_level_caches": span.num_bytes / (llc_bytes() or span.num_bytes),
        "huge_fraction": buffer.huge_fraction(),
    }
    for n in threads:
        read = ReadCeiling(n, span)
        write = WriteCeiling(n, target.span)
        copy = CopyCeiling(n, target.span, span)
        for what, once in (
            ("read", read.measure),
            ("write", write.measure),
            ("copy, glibc memcpy", copy.memcpy),
            ("copy, non-temporal", copy.stream),
        ):
            yield {"what": what, "num_threads": n, **known}, partial(_named, once)


def _on_the_gpu(threads: Sequence[int], bus: BusCeiling, buffer: Buffer) -> Iterator[Measurement]:
    known: Row = {"num_threads": 0, "bytes": COPY_BYTES}
    yield {"what": "copy, host to GPU", **known}, partial(_named, bus.h2d)
    yield {"what": "copy, GPU to host", **known}, partial(_named, bus.d2h)
    yield {"what": "copy, inside the GPU", "num_threads": 0}, partial(_named, hbm_copy_gbs)

    for n in threads:
        what = "read and copy to GPU, together"
        yield {"what": what, "num_threads": n}, partial(_together, bus, n, buffer.span)


def _named(once: Callable[[], float]) -> dict[str, float]:
    return {"gbs": once()}


def _together(bus: BusCeiling, num_threads: int, span: Span) -> dict[str, float]:
    h2d, read = bus.h2d_while_reading(num_threads, span)
    return {"gbs": read + h2d, "read_gbs": read, "h2d_gbs": h2d}


def _row(known: Row, samples: Sequence[dict[str, float]]) -> Row:
    """Medians by name, and what they are the medians of."""
    names = samples[0]
    medians = {name: median(sample[name] for sample in samples) for name in names}
    return {**known, **medians, "samples": [sample["gbs"] for sample in samples]}


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    arguments = parser(__doc__, rounds=5).parse_args(argv)
    rows = measure(arguments)
    lines = [(r["what"], r["num_threads"], r["gbs"], *_spread(r)) for r in rows]
    print_table("ceilings", ("what", "threads", "GB/s", "lowest", "highest"), lines)
    finish("ceilings", rows, checks, arguments)


def _spread(row: Row) -> tuple[float, float]:
    return min(row["samples"]), max(row["samples"])


if __name__ == "__main__":
    run(main)
