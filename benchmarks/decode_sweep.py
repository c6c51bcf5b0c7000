"""Decode steps of all layers: the library at several shares, placed or borrowed, and transformers'
caches.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.decode_case import Case
from benchmarks.decode_rates import awaited_flags, region_rates, step_rates
from benchmarks.decode_rounds import StepCeilings, seconds_of, synchronize
from benchmarks.decode_ways import SPARSEKV, DecodeWay, DynamicDecode, RegionDecode
from benchmarks.results import Row
from sparsekv import CapacityError

WARM_UP = 2
_WATCHED = 2
"""Steps in which waits are looked at."""


def sweep(
    case: Case, shares: Sequence[float], rounds: int, ceilings: StepCeilings
) -> Iterator[Row]:
    """A row for each share, its ceilings measured between its steps."""
    for share in shares:
        known = {**case.known, "kind": "decode", "way": SPARSEKV, "share": share}
        measure = partial(_region_row, known, case, rounds, ceilings)
        yield from unless_memory_is_short(known, measure)


def borrowing(
    case: Case, placed: float, shares: Sequence[float], rounds: int, ceilings: StepCeilings
) -> Iterator[Row]:
    """A row for each share of a step, all over one cache that was placed at the share `placed`: for
    the rest the CPU borrows. As fast as placing them, if it reads pinned memory as it does other.
    """
    way_name = f"{SPARSEKV}, placed at {placed:g}"
    known = {**case.known, "kind": "borrowing", "way": way_name, "placed": placed}
    measure = partial(_borrowing_rows, known, case, shares, rounds, ceilings)
    yield from unless_memory_is_short(known, measure)


def baselines(case: Case, rounds: int, ceilings: StepCeilings) -> Iterator[Row]:
    """transformers' DynamicCache on the accelerator, and kept in host memory (CUDA only).

    Few layers do: they do the same whatever their number, and take seconds each to fill.
    """
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
            _empty_host_cache()


def _empty_host_cache() -> None:
    """Let go of page-locked memory that torch keeps: several times what an offloaded cache held."""
    for module, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if hasattr(module, name):
            getattr(module, name)()
            return


def _dynamic_row(
    known: Row, case: Case, is_offloaded: bool, rounds: int, ceilings: StepCeilings
) -> Iterator[Row]:
    way = DynamicDecode(case, is_offloaded)
    _warm_up(way, case)
    seconds, found = _in_turn(way, case, rounds, ceilings)
    yield known | step_rates(case, seconds, case.kv_bytes, found)


def _region_row(known: Row, case: Case, rounds: int, ceilings: StepCeilings) -> Iterator[Row]:
    start = time.perf_counter()
    way = RegionDecode(case, known["share"], WARM_UP + rounds + _WATCHED)
    synchronize(case.device)
    fill_seconds = time.perf_counter() - start
    yield known | _by_engine(way, case, rounds, ceilings) | {"fill_seconds": fill_seconds}


def _borrowing_rows(
    known: Row, case: Case, shares: Sequence[float], rounds: int, ceilings: StepCeilings
) -> Iterator[Row]:
    way = RegionDecode(case, known["placed"], len(shares) * (WARM_UP + rounds + _WATCHED))
    for share in shares:
        way.cache.step_share = share
        yield known | {"share": share} | _by_engine(way, case, rounds, ceilings)


def _by_engine(way: RegionDecode, case: Case, rounds: int, ceilings: StepCeilings) -> Row:
    """Steps at the cache's share, and what each engine reads of the placed bytes in them."""
    _warm_up(way, case)
    before, placed = way.cache.stats(), way.placed_bytes()
    seconds, found = _in_turn(way, case, rounds, ceilings)
    stats = way.cache.stats()
    borrowed = (stats.borrowed_bytes - before.borrowed_bytes) // rounds
    read = {"unpinned": placed["unpinned"] + borrowed, "pinned": placed["pinned"] - borrowed}
    row = region_rates(case, seconds, read, found)
    row["borrowed_bytes_per_step"] = borrowed
    row["h2d_bytes_per_step"] = (stats.h2d_bytes - before.h2d_bytes) / rounds
    row["placed_share"] = stats.placed_share
    row["share_in_use"] = stats.cpu_share
    return row | _exposed(way, case)


def _warm_up(way: DecodeWay, case: Case) -> None:
    for _ in range(WARM_UP):
        seconds_of(way.step, case.device)


def _in_turn(
    way: DecodeWay, case: Case, rounds: int, ceilings: StepCeilings
) -> tuple[list[float], list[Row]]:
    """Seconds of steps, and the ceilings measured between them."""
    seconds, found = [], []
    for _ in range(rounds):
        found.append(ceilings.measure())
        seconds.append(seconds_of(way.step, case.device))
    return seconds, found


def _exposed(way: DecodeWay, case: Case) -> Row:
    """How long a layer stands still for the CPU, in steps that are not timed; CUDA only."""
    if case.device.type != "cuda":
        return {}
    with awaited_flags() as waited:
        for _ in range(_WATCHED):
            seconds_of(way.step, case.device)
        seconds = waited()
    if seconds is None:
        return {}
    return {"exposed_cpu_ms": 1e3 * seconds / _WATCHED / case.num_layers}
