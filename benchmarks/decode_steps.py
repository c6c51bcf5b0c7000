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

_SHORT_CONTEXT = 128
_STEPS_LAYERS = 4


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
    """Many steps one after the other, of a few layers; windows leave the accelerator meanwhile.

    In turn with them the machine alone moves the bytes that were placed before the first.
    """
    case = case.with_layers(_STEPS_LAYERS)
    way = RegionDecode(case, cpu_share, WARM_UP + num_steps)
    placed = way.placed_bytes()
    machine = ceilings.pass_of(placed["unpinned"], placed["pinned"])
    for _ in range(WARM_UP):
        machine.seconds()
        seconds_of(way.step, case.device)
    samples, evicting, alone = [], [], []
    for _ in range(num_steps):
        alone.append(1e3 * machine.seconds())
        is_evicting = way.is_full_window_next()
        samples.append(1e3 * seconds_of(way.step, case.device))
        if is_evicting:
            evicting.append(samples[-1])
    row = {
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
    if evicting:
        row |= {"evicting_ms": median(evicting), "evicting_samples": evicting}
    yield row


def _p99(samples: Sequence[float]) -> float:
    return quantiles(samples, n=100, method="inclusive")[98]
