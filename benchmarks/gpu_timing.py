"""The time that the GPU takes for what it is given, with nothing of the host's in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_HOLDS = (40_000_000, 160_000_000, 640_000_000)
"""Cycles of the GPU, about 20 ms and more: many times what the host takes to queue what is timed.
"""


def timed(launches: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Seconds that the GPU takes for the launches, and that the host takes to issue them.

    The GPU is kept from beginning until all are in its queue, which holds 1024: so none of the
    host's time is in its own.

    Raises:
        RuntimeError: it began before all were there, however long it was kept.
    """
    for cycles in _HOLDS:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        first.record()
        start = time.perf_counter()
        for launch in launches:
            launch()
        issue_seconds = time.perf_counter() - start
        last.record()
        is_queued = not first.query()
        last.synchronize()
        if is_queued:
            return first.elapsed_time(last) / 1e3, issue_seconds
    raise RuntimeError(
        f"{len(launches)} launches took {issue_seconds:.3f} s to issue: too slow for the GPU to "
        "wait for; unset CUDA_LAUNCH_BLOCKING, if it is set"
    )
