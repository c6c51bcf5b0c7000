"""How near the share that is chosen comes to the best one: `python -m benchmarks.share_tracking`.

For each model, 16 sequences of 2K to 32K tokens: steps over a cache whose segments were placed by
this machine's calibration, in turn with steps at that share and at others all around, over one
other cache whose CPU part is borrowed, so that nothing moves between them and all have the same
memory. A few layers do: the costs are a layer's. (arXiv:2609.14507, Figure 12.)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from statistics import median

import torch

from benchmarks.attention_shapes import WINDOW_SIZE
from benchmarks.cache_steps import CacheSteps
from benchmarks.command import Report, finish, parser, print_table, run, save
from benchmarks.decode_case import NUM_LAYERS, Case
from benchmarks.decode_rounds import attending_threads, seconds_of
from benchmarks.decode_sweep import unless_memory_is_short
from benchmarks.results import Check, Row
from sparsekv.engine.calibrate import calibrate
from sparsekv.roofline import PRESETS, CostModel

TOPIC = "share_tracking"
CHOSEN, SAME, FIXED = "chosen", "same share", "fixed"
BATCH_SIZE = 16
CONTEXTS = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10)
LONG_CONTEXT = 8 << 10
"""From here on the targets are the tighter ones."""
_QUICK_CONTEXTS = (768, 1024)
_LEAST_LAYERS, _LEAST_BYTES, _QUICK_LAYERS = 6, 2 << 30, 6
"""As many layers as hold so much: none may find its keys in the processor's caches again."""
_STEP = 0.03
_SHARES = tuple(round(0.48 + _STEP * i, 2) for i in range(15))
_QUICK_SHARES = (0.5, 1.0)
_TURNS = 3
"""Of the chosen share in a round, for one of another share."""
_WARM_UP = 2
"""Steps after each change of the share: what they need is prepared in them."""
_SAMPLE_S = 0.03
"""A sample is as many steps as take so long."""
_LEAST_ON_A_LINE = 3
_POINTS, _SLOWER, _SLOWER_SHORT = 0.03, 1.03, 1.06
_CALIBRATION_S = 60.0


_Line = tuple[float, float]
"""Slope, and height at 0."""


def tracking(case: Case, cost: CostModel, shares: Sequence[float], rounds: int) -> Iterator[Row]:
    """A row for the cache of the chosen share, one for steps of the other at that share, and one
    for each of `shares`, all in turn.
    """
    chosen = CacheSteps.by_costs(case, cost)
    fixed = CacheSteps.borrowing(case)
    chosen.step(_WARM_UP)
    num_steps = max(1, round(_SAMPLE_S / seconds_of(chosen.step, case.device)))
    stats = chosen.cache.stats()
    order: list[tuple[str, float]] = [(FIXED, share) for share in shares]
    for i in range(_TURNS):
        order.insert(i * (len(shares) // _TURNS + 1), (SAME, stats.cpu_share))
    order.append((CHOSEN, stats.cpu_share))
    kept: dict[tuple[str, float], list[float]] = {turn: [] for turn in order}
    for _ in range(rounds):
        for way, share in order:
            if way != CHOSEN:
                fixed.cache.step_share = share
            steps = chosen if way == CHOSEN else fixed
            steps.step(_WARM_UP)
            kept[way, share].append(steps.sample(num_steps))
    known = {**case.known, "kind": "tracking", "num_steps": num_steps}
    for (way, share), samples in kept.items():
        row = {"way": way, "share": share, "ms_per_layer": median(samples), "samples": samples}
        if way == CHOSEN:
            assert stats.balance is not None
            row |= {"predicted_share": cost.optimal_share(case.context)}
            row |= {"predicted_ms": 1e3 * stats.balance.predicted_s}
        yield known | row


def calibration_row(case: Case) -> tuple[CostModel, Row]:
    """What the shares are chosen by: measured before, as at the library's first use. Without a GPU
    a machine that is known, to see that it runs.
    """
    per_token = case.batch_size * case.geometry.bytes_per_token_per_layer
    residual = seconds = None
    if case.device.type == "cuda":
        start = time.perf_counter()
        found = calibrate(
            case.geometry,
            num_heads=case.shape.num_heads,
            batch_size=case.batch_size,
            device=case.device,
        )
        seconds = time.perf_counter() - start
        cost, residual = found.cost, found.residual
    else:
        cost = PRESETS["h200"].cost_model(bytes_per_token=per_token, flops_per_byte=8)
    return cost, {
        **case.known,
        "kind": "calibration",
        "cpu_gbs": per_token / cost.cpu_s_per_token / 1e9,
        "h2d_gbs": per_token / cost.h2d_s_per_token / 1e9,
        "cpu_overhead_us": 1e6 * cost.cpu_overhead_s,
        "gpu_overhead_us": 1e6 * cost.gpu_overhead_s,
        "marginal_share": cost.marginal_share,
        "residual": residual,
        "seconds": seconds,
    }


def optimum(rows: Sequence[Row]) -> tuple[float, float, float]:
    """The measured optimum, from and to: shares at which a step is at most 1 % longer than at the
    best; and the milliseconds of a layer at that one.

    A step is as long as the later engine takes: two lines over the share, that of the GPU and that
    of the CPU, fitted to all medians. One median by itself says little where the line is flat: the
    CPU is faster the less the GPU reads, so that beyond the optimum times change less than they
    scatter. And the least of many that scatter is less than any of them would be again.
    """
    fixed = sorted(_medians(row for row in rows if row["way"] == FIXED))
    if len(fixed) < 2 * _LEAST_ON_A_LINE:
        best, time = min(fixed, key=lambda point: point[1])
        return best, best, time
    first, last = _two_lines(fixed)
    grid = [fixed[0][0] + 0.001 * i for i in range(round(1e3 * (fixed[-1][0] - fixed[0][0])) + 1)]
    times = [max(first[0] * x + first[1], last[0] * x + last[1]) for x in grid]
    good = [x for x, time in zip(grid, times, strict=True) if time <= 1.01 * min(times)]
    return good[0], good[-1], min(times)


def _medians(rows: Iterable[Row]) -> Iterator[tuple[float, float]]:
    """The shares that there are and the median of each: few segments have few shares, and steps at
    those in between are steps at the nearest one.
    """
    samples: dict[float, list[float]] = {}
    for row in rows:
        num_segments = row["context"] // WINDOW_SIZE
        share = round(row["share"] * num_segments) / num_segments
        samples.setdefault(share, []).extend(row["samples"])
    return ((share, median(here)) for share, here in samples.items())


def _two_lines(points: Sequence[tuple[float, float]]) -> tuple[_Line, _Line]:
    """The pair of lines, one through the first points and one through the others, that misses them
    least.
    """
    pairs = []
    for count in range(_LEAST_ON_A_LINE, len(points) - _LEAST_ON_A_LINE + 1):
        parts = points[:count], points[count:]
        lines = _line(parts[0]), _line(parts[1])
        missed = sum(
            (a * x + b - y) ** 2 for (a, b), part in zip(lines, parts, strict=True) for x, y in part
        )
        pairs.append((missed, lines))
    return min(pairs)[1]


def _line(points: Sequence[tuple[float, float]]) -> _Line:
    """Slope and height at 0 of the line through points, by least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points)
    slope /= sum((x - mean_x) ** 2 for x, _ in points)
    return slope, mean_y - slope * mean_x


def row_of(way: str, rows: Sequence[Row]) -> Row:
    """The row of CHOSEN or SAME."""
    return next(row for row in rows if row["way"] == way)


def cases(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Shape, size, and the rows of all ways."""
    tracked = [row for row in rows if row["kind"] == "tracking"]
    for (shape, size), group in groupby(tracked, key=lambda row: (row["shape"], row["size"])):
        yield shape, size, list(group)


def checks(rows: Sequence[Row]) -> list[Check]:
    """Distance from the measured optimum, the step beside the best fixed share's, and what the
    calibration takes; CUDA only.
    """
    made = [
        Check(
            name=f"{row['shape']}: seconds of the calibration",
            value=row["seconds"],
            target=_CALIBRATION_S,
            lower_is_better=True,
        )
        for row in rows
        if row["kind"] == "calibration" and row.get("seconds") is not None
    ]
    for shape, size, here in cases(rows):
        chosen = row_of(SAME, here)
        if not chosen["device"].startswith("cuda"):
            continue
        low, high, best_ms = optimum(here)
        is_long = chosen["context"] >= LONG_CONTEXT
        if is_long:
            made.append(
                Check(
                    name=f"{shape}, {size}: distance of the chosen share from the measured optimum",
                    value=max(low - chosen["share"], chosen["share"] - high, 0.0),
                    target=_POINTS,
                    lower_is_better=True,
                )
            )
        made.append(
            Check(
                name=f"{shape}, {size}: step at the chosen share / at the best fixed one",
                value=chosen["ms_per_layer"] / best_ms,
                target=_SLOWER if is_long else _SLOWER_SHORT,
                lower_is_better=True,
            )
        )
    return made


def measure(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Add all rows to `rows`, each as soon as there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report()
    contexts = _QUICK_CONTEXTS if arguments.quick else CONTEXTS
    shares = _QUICK_SHARES if arguments.quick else _SHARES
    with attending_threads(arguments.threads) as num_threads:
        for name in arguments.shapes:
            case = Case.of_model(name, BATCH_SIZE, contexts[-1], device)
            cost, row = calibration_row(case)
            rows.append({**row, "num_threads": num_threads})
            report(f"{name}: {cost}, residual {row['residual']}")
            for context in contexts:
                case = Case.of_model(name, BATCH_SIZE, context, device)
                wanted = -(-_LEAST_BYTES * case.num_layers // case.kv_bytes)
                num_layers = _QUICK_LAYERS if arguments.quick else max(wanted, _LEAST_LAYERS)
                case = case.with_layers(num_layers)
                known = {**case.known, "kind": "tracking"}
                tracked = partial(tracking, case, cost, shares, arguments.rounds)
                for row in unless_memory_is_short(known, tracked):
                    rows.append({**row, "num_threads": num_threads})
                    report(f"{name}, {case.size}: {row.get('way')} {row.get('share')}")
                save(TOPIC, rows, checks, arguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__, rounds=5, scales=False)
    options.add_argument(
        "--shapes", nargs="+", choices=NUM_LAYERS, default=list(NUM_LAYERS), help="models"
    )
    arguments = options.parse_args(argv)
    rows: list[Row] = []
    try:
        measure(arguments, rows)
    finally:
        _show(rows)
        finish(TOPIC, rows, checks, arguments)


def _show(rows: Sequence[Row]) -> None:
    lines = []
    for shape, size, here in cases(rows):
        low, high, best_ms = optimum(here)
        times = (row_of(way, here)["ms_per_layer"] for way in (CHOSEN, SAME))
        share = row_of(SAME, here)["share"]
        lines.append((shape, size, share, f"{low:.3f} to {high:.3f}", *times, best_ms))
    columns = ("shape", "size", "chosen", "optimum", "ms a layer", "borrowed", "at the best")
    print_table("shares of the CPU", columns, lines)


if __name__ == "__main__":
    run(main)
