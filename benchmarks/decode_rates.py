"""What a step's seconds and the ceilings of the same rounds come to, as every row has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.decode_case import Case
from benchmarks.decode_rounds import medians
from benchmarks.results import Row
from sparsekv.device import CudaStream


def step_rates(case: Case, seconds: Sequence[float], kv_bytes: int, found: Sequence[Row]) -> Row:
    """Milliseconds a layer and GB/s of one way, beside its ceilings.

    Args:
        case: what was decoded.
        seconds: of a step of all layers, in each round.
        kv_bytes: keys and values that a step reads.
        found: the ceilings of the same rounds.
    """
    row = {
        "ms_per_layer": 1e3 * median(seconds) / case.num_layers,
        "kv_bytes": kv_bytes,
        "kv_gbs": kv_bytes / median(seconds) / 1e9,
        "samples": [1e3 * s / case.num_layers for s in seconds],
        "ceiling_samples": list(found),
        **medians(found),
    }
    if "ceiling_gbs" in row:
        row["fraction"] = row["kv_gbs"] / row["ceiling_gbs"]
    return row


def region_rates(
    case: Case, seconds: Sequence[float], placed: dict[str, int], found: Sequence[Row]
) -> Row:
    """The same of the library: also what each engine reads of `placed`, bytes by region's name."""
    row = step_rates(case, seconds, sum(placed.values()), found)
    for name, region in (("cpu_gbs", "unpinned"), ("h2d_gbs", "pinned")):
        row[name] = placed[region] / median(seconds) / 1e9
    return row


def placed_bytes(stats: Any) -> dict[str, int]:
    """Bytes of the tokens in each CPU region, by its name, from a cache's statistics."""
    return {region.name: region.used_bytes for region in stats.regions if region.memory == "CPU"}


@contextmanager
def awaited_flags() -> Iterator[Callable[[], float | None]]:
    """See how long streams stand still for the CPU's results, by events around each wait.

    The events cost time themselves: steps that are timed run outside.

    Yields:
        What gives the seconds since the start, once the device has been synchronised; None where
        no stream was told to wait.
    """
    real = CudaStream.wait_flag
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def noted(stream: CudaStream, *arguments: Any) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        real(stream, *arguments)
        after.record()
        events.append((before, after))

    def seconds() -> float | None:
        waits = [before.elapsed_time(after) for before, after in events]
        return sum(waits) / 1e3 if waits else None

    CudaStream.wait_flag = noted  # type: ignore[method-assign, assignment]
    try:
        yield seconds
    finally:
        CudaStream.wait_flag = real  # type: ignore[method-assign]
