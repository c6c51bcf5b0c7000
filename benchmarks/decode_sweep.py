"""Decode steps of all layers: the library at several shares, and transformers' caches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.decode_case import Case
from benchmarks.decode_rounds import StepCeilings, medians, seconds_of, synchronize
from benchmarks.decode_ways import SPARSEKV, DecodeWay, DynamicDecode, RegionDecode
from benchmarks.results import Row
from sparsekv import CapacityError

WARM_UP = 2
_BASELINE_LAYERS = 4
"""Layers of transformers' caches: their layers do the same whatever their number, and more of them
take minutes to fill.
"""


def sweep(
    case: Case, shares: Sequence[float], rounds: int, ceilings: StepCeilings
) -> Iterator[Row]:
    """A row for each share, its ceilings measured between its steps."""
    for share in shares:
        known = {**case.known, "kind": "decode", "way": SPARSEKV, "share": share}
        measure = partial(_region_row, known, case, rounds, ceilings)
        yield from unless_memory_is_short(known, measure)


def baselines(case: Case, rounds: int, ceilings: StepCeilings) -> Iterator[Row]:
    """transformers' DynamicCache on the accelerator, and kept in host memory (CUDA only)."""
    case = case.with_layers(_BASELINE_LAYERS)
    for is_offloaded in (False, True) if case.device.type == "cuda" else (False,):
        known = {**case.known, "kind": "decode", "way": DynamicDecode.name_of(is_offloaded)}
        measure = partial(_dynamic_row, known, case, is_offloaded, rounds, ceilings)
        yield from unless_memory_is_short(known, measure)


def unless_memory_is_short(known: Row, measure: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """What `measure` gives; where host or accelerator lack memory, what is known and the reason."""
    try:
        yield from measure()
    except (CapacityError, torch.OutOfMemoryError) as error:
        yield {**known, "kind": "left out", "reason": str(error).splitlines()[0]}
    finally:
        # What was measured is gone by now, and its memory is to serve what comes next.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _dynamic_row(
    known: Row, case: Case, is_offloaded: bool, rounds: int, ceilings: StepCeilings
) -> Iterator[Row]:
    way = DynamicDecode(case, is_offloaded)
    _warm_up(way, case)
    yield known | _timed(way, case, case.kv_bytes, rounds, ceilings)


def _region_row(known: Row, case: Case, rounds: int, ceilings: StepCeilings) -> Iterator[Row]:
    start = time.perf_counter()
    way = RegionDecode(case, known["share"], WARM_UP + rounds)
    synchronize(case.device)
    fill_seconds = time.perf_counter() - start
    _warm_up(way, case)
    before, placed = way.cache.stats().h2d_bytes, way.placed_bytes()
    row = known | _timed(way, case, sum(placed.values()), rounds, ceilings)
    stats = way.cache.stats()
    seconds = row["ms_per_layer"] * case.num_layers / 1e3
    row["cpu_gbs"] = placed["unpinned"] / seconds / 1e9
    row["h2d_gbs"] = placed["pinned"] / seconds / 1e9
    row["h2d_bytes_per_step"] = (stats.h2d_bytes - before) / rounds
    row["placed_share"] = stats.cpu_share
    row["fill_seconds"] = fill_seconds
    yield row | _exposed(stats.to_dict())


def _warm_up(way: DecodeWay, case: Case) -> None:
    for _ in range(WARM_UP):
        seconds_of(way.step, case.device)


def _timed(way: DecodeWay, case: Case, kv_bytes: int, rounds: int, ceilings: StepCeilings) -> Row:
    """Steps and ceilings in turn; `kv_bytes` are what a step reads."""
    seconds, found = [], []
    for _ in range(rounds):
        found.append(ceilings.measure())
        seconds.append(seconds_of(way.step, case.device))
    row = {
        "ms_per_layer": 1e3 * median(seconds) / case.num_layers,
        "kv_bytes": kv_bytes,
        "kv_gbs": kv_bytes / median(seconds) / 1e9,
        "samples": [1e3 * s / case.num_layers for s in seconds],
        "ceiling_samples": found,
        **medians(found),
    }
    if "ceiling_gbs" in row:
        row["fraction"] = row["kv_gbs"] / row["ceiling_gbs"]
    return row


def _exposed(stats: dict[str, object]) -> Row:
    """What the engine says it waited for, under its own names; nothing while it keeps no count."""
    return {name: value for name, value in stats.items() if name.startswith("exposed")}
