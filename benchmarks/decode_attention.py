"""Measure decode steps: all attention layers of a model over a long context, and what surrounds it.

For each model, batch and context: milliseconds a layer at several shares of the CPU, from 0
(everything is streamed to the GPU) to 1 (the CPU attends to everything), beside the ceilings of
memory and bus in the same rounds, and transformers' DynamicCache on the GPU and offloaded. At
Qwen3's 16 x 32K also: shares that the CPU reaches by borrowing, the step over a short context, a
thousand steps one after the other, steps in which windows leave the GPU, the step with one of its
parts replaced, and a whole model of random weights.

The accelerator is simulated where there is no CUDA; then only --quick is of use.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.command import Report, finish, parser, print_table, run, save
from benchmarks.decode_ablations import ablations
from benchmarks.decode_case import NUM_LAYERS, Case
from benchmarks.decode_checks import best, checks
from benchmarks.decode_rounds import StepCeilings, attending_threads
from benchmarks.decode_steps import evicting, short, steps
from benchmarks.decode_sweep import baselines, borrowing, sweep, unless_memory_is_short
from benchmarks.results import Row
from benchmarks.whole_model import model_rows

TOPIC = "decode_attention"
PARTS = ("sweep", "baselines", "borrowing", "short", "steps", "evicting", "ablations", "model")
_SHARES = (0.0, 0.6, 0.65, 0.7, 0.75, 1.0)
_USUAL_SHARE = 0.7
"""For the parts that need one share, where no sweep tells the best."""
_PLACED, _BORROWED_SHARES = 0.5, (0.5, 0.6, 0.7, 0.8, 0.9)
"""One placement, and the shares of the steps over it."""

_MODEL_LAYERS = 24
"""Of the whole model. Its offloaded cache takes twice its bytes of page-locked memory, for torch
rounds each tensor up to a power of two: more layers do not fit into 128 GB beside ours.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A model's shape, batch and context, the shares to measure there, and the layers of
    transformers' caches.
    """

    shape: str
    batch_size: int
    context: int
    shares: tuple[float, ...] = _SHARES
    baseline_layers: int = 4


def _grid(
    shape: str, sizes: Sequence[tuple[int, int]], shares: tuple[float, ...]
) -> tuple[Point, ...]:
    """Points of one shape; two layers of transformers' caches, one ahead of the other."""
    return tuple(Point(shape, batch, context << 10, shares, 2) for batch, context in sizes)


_SHORT = (
    Point("qwen3", 16, 32 << 10),
    Point("mixtral", 16, 32 << 10, (0.0, 0.65, 0.7, 0.75)),
    Point("qwen3", 4, 8 << 10, (0.0, 0.6, 0.7, 1.0)),
)
_REST = (
    *_grid("qwen3", [(4, 16), (4, 32), (16, 8)], (0.0, 0.7, 1.0)),
    *_grid("qwen3", [(16, 16), (32, 8), (32, 16)], (0.7,)),
    *_grid("mixtral", [(4, 8), (4, 16), (4, 32), (16, 8)], (0.0, 0.7, 1.0)),
    *_grid("mixtral", [(16, 16), (32, 8), (32, 16)], (0.7,)),
)
_LARGEST = (*_grid("qwen3", [(32, 32)], (0.7,)), *_grid("mixtral", [(32, 32)], (0.7,)))
_PLANS = {
    "short": _SHORT,
    "rest": _REST,
    "largest": _LARGEST,
    "full": (*_SHORT, *_REST, *_LARGEST),
}
"""`full` in pieces of some minutes each: what has targets, the rest of batch 4, 16, 32 by context
8K, 16K, 32K, and what takes about all memory of a machine of 128 GB, or more.
"""
_QUICK_PLAN = (Point("qwen3", 2, 640, (0.5,)), Point("mixtral", 2, 512, (0.0, 1.0)))
_QUICK_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many steps each part takes."""

    short_rounds: int
    num_steps: int


_SIZES, _QUICK_SIZES = Sizes(short_rounds=60, num_steps=1000), Sizes(short_rounds=2, num_steps=8)


def measure(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Add all rows to `rows`, each as soon as there is one.

    Raises:
        RuntimeError: parts that failed, once all others are measured: a run takes minutes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report()
    failed = []
    with (
        attending_threads(arguments.threads) as num_threads,
        StepCeilings(num_threads, arguments.quick) as ceilings,
    ):
        for point in _points(arguments):
            case = Case.of_model(point.shape, point.batch_size, point.context, device)
            if arguments.quick:
                case = case.with_layers(_QUICK_LAYERS)
            for part in _parts_of(point, arguments):
                try:
                    for row in _measure_part(part, case, point, arguments, ceilings, rows):
                        rows.append({**row, "part": part, "num_threads": num_threads})
                        report(_line(rows[-1]))
                    save(TOPIC, rows, checks, arguments)
                except Exception:
                    report(traceback.format_exc())
                    failed.append(f"{part} of {point.shape}, {case.size}")
    if failed:
        raise RuntimeError(f"not measured, for the reasons above: {'; '.join(failed)}")


def _points(arguments: argparse.Namespace) -> list[Point]:
    plan = _QUICK_PLAN if arguments.quick else _PLANS[arguments.plan]
    return [point for point in plan if point.shape in arguments.shapes]


def _parts_of(point: Point, arguments: argparse.Namespace) -> list[str]:
    """Sweep and baselines everywhere, the others at the first point of all only."""
    is_first = point in (_SHORT[0], _QUICK_PLAN[0])
    everywhere = PARTS if is_first else PARTS[:2]
    return [part for part in everywhere if part in arguments.parts]


def _measure_part(
    part: str,
    case: Case,
    point: Point,
    arguments: argparse.Namespace,
    ceilings: StepCeilings,
    rows: Sequence[Row],
) -> Iterable[Row]:
    rounds, is_quick = arguments.rounds, arguments.quick
    sizes = _QUICK_SIZES if is_quick else _SIZES
    fastest = best([row for row in rows if row.items() >= case.known.items()])
    share = _USUAL_SHARE if fastest is None else fastest["share"]
    few = case.with_layers(point.baseline_layers)
    most = case.with_layers(_MODEL_LAYERS)
    measures: dict[str, Callable[[], Iterable[Row]]] = {
        "sweep": lambda: sweep(case, arguments.shares or point.shares, rounds, ceilings),
        "baselines": lambda: baselines(few, rounds, ceilings),
        "borrowing": lambda: borrowing(case, _PLACED, _BORROWED_SHARES, rounds, ceilings),
        "short": lambda: short(case, sizes.short_rounds),
        "steps": lambda: steps(case, share, sizes.num_steps, ceilings),
        "evicting": lambda: evicting(case, share, rounds),
        "ablations": lambda: ablations(case, share, rounds, ceilings),
        "model": lambda: model_rows(most, _shares_up_to(share), rounds, is_quick, ceilings),
    }
    return unless_memory_is_short({**case.known, "part": part}, measures[part])


def _shares_up_to(share: float) -> list[float]:
    """The share that is best for attention alone, and smaller ones."""
    return sorted({round(max(0.0, share - less), 2) for less in (0.0, 0.05, 0.1)})


def _line(row: Row) -> str:
    """A row in a few words, for those who wait."""
    words = [row["kind"], row["shape"], row["size"], row.get("way", row.get("part")), _share(row)]
    for name in ("ms_per_layer", "us_per_layer", "p50_ms", "kv_gbs", "fraction", "fill_seconds"):
        if name in row:
            words.append(f"{name} {row[name]:.3g}")
    return ", ".join(str(word) for word in (*words, row.get("reason")) if word not in (None, ""))


def _share(row: Row) -> str:
    return f"{row['share']:g}" if "share" in row else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__, rounds=5, scales=False)
    options.add_argument(
        "--plan", choices=_PLANS, default="short", help="batches and contexts (default: short)"
    )
    options.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="what to measure (default: everything)",
    )
    options.add_argument(
        "--shapes",
        nargs="+",
        choices=NUM_LAYERS,
        default=list(NUM_LAYERS),
        help="models of the plan to measure (default: all)",
    )
    options.add_argument(
        "--shares", nargs="+", type=float, help="shares of the CPU (default: those of the plan)"
    )
    arguments = options.parse_args(argv)
    rows: list[Row] = []
    try:
        measure(arguments, rows)
    finally:
        # Also after an error, Ctrl-C or SIGTERM: what was measured took minutes.
        _show(rows)
        finish(TOPIC, rows, checks, arguments)


def _show(rows: Sequence[Row]) -> None:
    columns = ("shape", "size", "layers", "what", "share", "ms a layer", "GB/s", "ceiling", "part")
    lines = [
        (
            row["shape"],
            row["size"],
            row["layers"],
            row["way"],
            _share(row),
            row["ms_per_layer"],
            *(
                f"{row[key]:.3g}" if key in row else ""
                for key in ("kv_gbs", "ceiling_gbs", "fraction")
            ),
        )
        for row in rows
        if "ms_per_layer" in row
    ]
    print_table("decode steps", columns, lines)
    lines = [
        (r["shape"], r["size"], r["way"], r["us_per_layer"]) for r in rows if r["kind"] == "short"
    ]
    print_table("all in the window", ("shape", "size", "what", "us a layer"), lines)


if __name__ == "__main__":
    run(main)
