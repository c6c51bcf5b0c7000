"""What a step costs where there is nothing to move, and how even many steps are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median, quantiles

from benchmarks.decode_case import Case
from benchmarks.decode_rounds import StepCeilings, seconds_of, take_turns
from benchmarks.decode_sweep import WARM_UP
from benchmarks.decode_ways import DecodeWay, DynamicDecode, RegionDecode
from benchmarks.plain_decode import PlainDecode, sdpa_calls
from benchmarks.results import Row
from sparsekv import CacheConfig

_SHORT_CONTEXT = 128
_STEPS_CONTEXT = 8 << 10
"""A thousand steps of all layers over more would take many minutes."""
_STEPS_OF_A_TURN = 4
"""For each pass of the machine's own."""
_UNSTEADY, _STEADY = 2, 3
"""Steps after tokens were taken back, in which launches are prepared anew, and steps after these,
before the one in which windows leave.
"""


def short(case: Case, rounds: int) -> Iterator[Row]:
    """Steps of all layers over a short context, which lies in the window, the ways in turn.

    What the library takes more is against the fastest plain attention of the same rounds.
    """
    case = replace(case, context=_SHORT_CONTEXT)
    num_steps = WARM_UP + rounds
    ours = RegionDecode(case, 0.5, num_steps)
    plain = [PlainDecode(case, num_steps, call) for call in sdpa_calls(case.device)]
    ways: list[DecodeWay] = [ours, *plain, DynamicDecode(case)]
    found = take_turns([way.step for way in ways], case.device, rounds, WARM_UP)
    samples = {
        way.name: [1e6 * s / case.num_layers for s in kept]
        for way, kept in zip(ways, found, strict=True)
    }
    fastest = min((way.name for way in plain), key=lambda name: median(samples[name]))
    for name, kept in samples.items():
        row = {**case.known, "kind": "short", "way": name, "us_per_layer": median(kept)}
        if name == ours.name:
            pairs = zip(kept, samples[fastest], strict=True)
            row |= {"extra_us": median(a - b for a, b in pairs), "against": fastest}
        yield row | {"samples": kept}


def steps(case: Case, cpu_share: float, num_steps: int, ceilings: StepCeilings) -> Iterator[Row]:
    """Many steps of all layers one after the other, over a context of 8K at most; windows leave the
    accelerator meanwhile.

    Between them the machine alone moves the bytes that were placed before the first.
    """
    case = replace(case, context=min(case.context, _STEPS_CONTEXT))
    way = RegionDecode(case, cpu_share, WARM_UP + num_steps)
    placed = way.placed_bytes()
    machine = ceilings.pass_of(placed["unpinned"], placed["pinned"])
    for _ in range(WARM_UP):
        machine.seconds()
        seconds_of(way.step, case.device)
    samples, alone = [], []
    for i in range(num_steps):
        if i % _STEPS_OF_A_TURN == 0:
            alone.append(1e3 * machine.seconds())
        samples.append(1e3 * seconds_of(way.step, case.device))
    yield {
        **case.known,
        "kind": "steps",
        "way": way.name,
        "share": cpu_share,
        "num_steps": num_steps,
        "p50_ms": median(samples),
        "p99_ms": _p99(samples),
        "samples": samples,
        "machine_p50_ms": median(alone),
        "machine_p99_ms": _p99(alone),
        "machine_samples": alone,
    }


def evicting(case: Case, cpu_share: float, rounds: int) -> Iterator[Row]:
    """Steps in which the windows of all layers leave the accelerator, and those before them.

    After each of them its tokens are taken back, for there is one in as many steps as a window has
    tokens.
    """
    num_steps = _UNSTEADY + _STEADY + 1
    window_size = CacheConfig().window_size
    begun = replace(case, context=case.context // window_size * window_size - num_steps)
    way = RegionDecode(begun, cpu_share, num_steps)
    steady, leaving = [], []
    for i in range(1 + rounds):
        seconds = [1e3 * seconds_of(way.step, case.device) for _ in range(num_steps - 1)]
        assert way.is_full_window_next()
        last = 1e3 * seconds_of(way.step, case.device)
        way.cache.crop(begun.context)
        if i:
            steady += seconds[_UNSTEADY:]
            leaving.append(last)
    yield {
        **case.known,
        "kind": "evicting",
        "way": way.name,
        "share": cpu_share,
        "p50_ms": median(steady),
        "samples": steady,
        "evicting_ms": median(leaving),
        "evicting_samples": leaving,
    }


def _p99(samples: Sequence[float]) -> float:
    return quantiles(samples, n=100, method="inclusive")[98]
