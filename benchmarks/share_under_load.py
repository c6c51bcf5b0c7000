"""How an elastic share holds while others use the machine: `python -m benchmarks.share_under_load`.

A rival in mid-run: it begins to read memory, with three threads for each one that attends, or to
copy over the bus, and ends again. Each step is timed, and under the load steps at fixed shares in
turn with it, over the same cache.

Two models at once (arXiv:2609.14507, Table 3): in two processes, in two threads of one, or in those
on two GPUs where there are two. They decode the same, both at the share that one alone would have,
or both at elastic shares.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import groupby
from statistics import median

import torch

from benchmarks.buffer import Buffer, measuring_bytes
from benchmarks.bus_ceilings import BusCeiling, BusLoad
from benchmarks.cache_steps import CacheSteps
from benchmarks.command import Report, finish, parser, print_table, run, save
from benchmarks.decode_case import NUM_LAYERS, Case
from benchmarks.decode_rounds import attending_threads
from benchmarks.decode_sweep import unless_memory_is_short
from benchmarks.memory_ceilings import ReadLoad, filled_buffer
from benchmarks.model_pair import ONE_PROCESS, TWO_GPUS, TWO_PROCESSES, ModelPair, Turn
from benchmarks.results import Check, Row
from benchmarks.share_tracking import BATCH_SIZE, FIXED, calibration_row
from sparsekv.roofline import CostModel

TOPIC = "share_under_load"
RIVAL, PAIR = "rival", "two models"
ELASTIC, FROZEN = "elastic", "frozen"
MEMORY, BUS = "memory", "bus"
CONTEXT = 16 << 10
PAIR_SIZES = ((4, 8 << 10), (4, 16 << 10), (16, 8 << 10), (16, 16 << 10))
"""Batch and context."""
_LAYERS = 16
"""A third of Qwen3's: a model has as many more times to judge by in each step."""
_QUICK_CONTEXT, _QUICK_LAYERS = 1024, 2
_SHARES = tuple(round(0.5 + 0.04 * i, 2) for i in range(12))
"""Of these, those that can be had: what is placed unpinned is the CPU's."""
_QUICK_SHARES = (0.75, 1.0)
BEFORE, UNDER, AFTER = 8, 40, 24
"""Steps that are told of, until the load begins, under it, and when it has ended."""
_SETTLING = 24
"""Steps before those, in which costs and share become what they are here."""
_READERS_PER_THREAD = 3
"""On the same cores: with one, what the CPU reads took only a fifth longer."""
_WARM_UP, _SAMPLES = 2, 3
_PAIR_STEPS = (-0.12, -0.06, 0.06, 0.12)
"""From the share that one alone would have to those that two could have."""
_SECONDS, _QUICK_SECONDS = 1.0, 0.1
"""Of two models' turn."""
_NEAR, _STEPS = 1.1, 15
"""A step is near the best one, and after at most so many it must be."""
_IN_A_ROW = 5
"""Steps of which the median must be near: single ones scatter."""


def under_load(
    case: Case,
    cost: CostModel,
    loads: dict[str, AbstractContextManager[object]],
    shares: Sequence[float],
    rounds: int,
) -> Iterator[Row]:
    """For each load a row of the elastic share, with every step, and one for each fixed share."""
    elastic = CacheSteps.by_costs(case, cost, is_elastic=True)
    elastic.step(_SETTLING)
    for name, load in loads.items():
        known = {**case.known, "part": RIVAL, "kind": "steps", "load": name}
        steps = [_step(elastic) for _ in range(BEFORE)]
        with load:
            steps += [_step(elastic) for _ in range(UNDER)]
            kept = _in_turn(elastic, shares, rounds)
            costs = elastic.cost
        steps += [_step(elastic) for _ in range(AFTER)]
        for share, samples in kept.items():
            row = {"ms_per_layer": median(samples), "samples": samples, "share": share}
            if share is None:
                row |= {"way": ELASTIC, "steps": steps, "share": steps[BEFORE + UNDER - 1]["share"]}
                row |= {"placed_share": elastic.cache.stats().placed_share}
                row |= _factors(costs, cost)
            else:
                row |= {"way": FIXED}
            yield known | row


def _factors(costs: CostModel, before: CostModel) -> Row:
    """How much dearer a token has become for each engine."""
    return {
        "cpu_factor": costs.cpu_s_per_token / before.cpu_s_per_token,
        "h2d_factor": costs.h2d_s_per_token / before.h2d_s_per_token,
    }


def _step(elastic: CacheSteps) -> Row:
    """Of one step, and the share it had."""
    return {"share": elastic.share, "ms_per_layer": elastic.sample()}


def _in_turn(
    elastic: CacheSteps, shares: Sequence[float], rounds: int
) -> dict[float | None, list[float]]:
    """Milliseconds of a layer by share, None for the elastic one; each step by itself, for that is
    how those of the elastic share are timed.
    """
    least = elastic.cache.router.marginal_share
    kept: dict[float | None, list[float]] = {None: []}
    kept |= {share: [] for share in shares if share >= least}
    for _ in range(rounds):
        for share, samples in kept.items():
            with nullcontext() if share is None else elastic.at_share(share):
                elastic.step(_WARM_UP)
                samples += [elastic.sample() for _ in range(_SAMPLES)]
    return kept


def pair_rows(
    case: Case, cost: CostModel, pair: ModelPair, rounds: int, seconds: float
) -> Iterator[Row]:
    """A row for each way, of the mean of both models: shares frozen, elastic, and fixed beside."""
    frozen = cost.optimal_share(case.context)
    ways = [(FROZEN, frozen), (ELASTIC, None)]
    ways += [(FIXED, frozen + step) for step in _PAIR_STEPS if frozen + step <= 1]
    turns: list[list[list[Turn]]] = [[] for _ in ways]
    with pair.decoding(case, cost):
        for _ in range(1 + rounds):
            for (_, share), kept in zip(ways, turns, strict=True):
                kept.append(pair.decode(share, seconds))
    for (way, _), kept in zip(ways, turns, strict=True):
        # In the first turn the costs become what they are with two.
        samples = [[turn.ms_per_layer for turn in both] for both in kept[1:]]
        yield {
            **case.known,
            "part": PAIR,
            "kind": "steps",
            "way": way,
            "shares": [turn.share for turn in kept[-1]],
            "factors": [_factors(turn.cost, cost) for turn in kept[-1]],
            "ms_per_layer": median(sum(both) / 2 for both in samples),
            "samples": samples,
        }


def rivals(rows: Sequence[Row]) -> Iterator[tuple[str, Row, Row]]:
    """What and under which load, the elastic share's row and that of the best fixed one, if there
    are both.
    """
    chosen = _steps_of(RIVAL, rows)
    for (shape, size, load), group in groupby(
        chosen, key=lambda row: (row["shape"], row["size"], row["load"])
    ):
        here = list(group)
        elastic = next(row for row in here if row["way"] == ELASTIC)
        fixed = [row for row in here if row["way"] == FIXED]
        if fixed:
            best = min(fixed, key=lambda row: row["ms_per_layer"])
            yield f"{shape}, {size}, {load}", elastic, best


def pairs(rows: Sequence[Row]) -> Iterator[tuple[str, Row, Row, Row]]:
    """What two models decode and where; the rows of frozen and of elastic shares, of sizes of which
    there are both, and that of the best of all that stay.
    """
    for (where, shape, size), group in groupby(
        _steps_of(PAIR, rows), key=lambda row: (row["where"], row["shape"], row["size"])
    ):
        frozen, *others = group
        if others:
            elastic, *fixed = others
            best = min((frozen, *fixed), key=lambda row: row["ms_per_layer"])
            yield f"{shape}, {size}, {where}", frozen, elastic, best


def _steps_of(part: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["part"] == part and row["kind"] == "steps"]


def steps_until_near(elastic: Row, best: Row) -> int:
    """Steps under the load until those that follow are near the best fixed share's."""
    under = [step["ms_per_layer"] for step in elastic["steps"][BEFORE : BEFORE + UNDER]]
    for i in range(UNDER - _IN_A_ROW + 1):
        if median(under[i : i + _IN_A_ROW]) <= _NEAR * best["ms_per_layer"]:
            return i
    return UNDER


def checks(rows: Sequence[Row]) -> list[Check]:
    """How near the best fixed share, how soon, and two models beside frozen shares; CUDA only."""
    made = []
    for name, elastic, best in rivals(rows):
        if not elastic["device"].startswith("cuda"):
            continue
        made += [
            Check(
                name=f"{name}: steps until within 10 % of the best fixed share",
                value=steps_until_near(elastic, best),
                target=_STEPS,
                lower_is_better=True,
            ),
            Check(
                name=f"{name}: steps at the elastic share / at the best fixed one, later",
                value=elastic["ms_per_layer"] / best["ms_per_layer"],
                target=_NEAR,
                lower_is_better=True,
            ),
        ]
    for name, frozen, elastic, _ in pairs(rows):
        if frozen["device"].startswith("cuda"):
            made.append(
                Check(
                    name=f"two models, {name}: steps at elastic / at frozen shares",
                    value=elastic["ms_per_layer"] / frozen["ms_per_layer"],
                    target=1.0,
                    lower_is_better=True,
                )
            )
    return made


def measure(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Add all rows to `rows`, each as soon as there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report()
    with attending_threads(arguments.threads) as num_threads:

        def keep(row: Row) -> None:
            rows.append({**row, "num_threads": num_threads})
            told = {k: v for k, v in row.items() if k not in ("samples", "steps")}
            report(", ".join(str(value) for value in told.values()))
            save(TOPIC, rows, checks, arguments)

        for name in arguments.shapes:
            case = Case.of_model(name, BATCH_SIZE, CONTEXT, device).with_layers(_LAYERS)
            if arguments.quick:
                case = replace(case, batch_size=1, context=_QUICK_CONTEXT, num_layers=_QUICK_LAYERS)
            if RIVAL in arguments.parts:
                for row in _rival_part(case, arguments, num_threads):
                    keep(row)
            if PAIR in arguments.parts:
                for row in _pair_part(case, arguments):
                    keep(row)


def _rival_part(case: Case, arguments: argparse.Namespace, num_threads: int) -> Iterator[Row]:
    cost, _ = calibration_row(case)
    shares = _QUICK_SHARES if arguments.quick else _SHARES
    buffer = filled_buffer((8 << 20) if arguments.quick else measuring_bytes())
    with ExitStack() as stack:
        loads = _loads(buffer, num_threads, stack)
        known = {**case.known, "part": RIVAL}
        yield from unless_memory_is_short(
            known, lambda: under_load(case, cost, loads, shares, arguments.rounds)
        )


def _loads(
    buffer: Buffer, num_threads: int, stack: ExitStack
) -> dict[str, AbstractContextManager[object]]:
    reading = ReadLoad(_READERS_PER_THREAD * num_threads, buffer.span)
    loads: dict[str, AbstractContextManager[object]] = {MEMORY: reading}
    if torch.cuda.is_available():
        loads[BUS] = BusLoad(stack.enter_context(BusCeiling()))
    return loads


def _pair_part(case: Case, arguments: argparse.Namespace) -> Iterator[Row]:
    sizes = ((case.batch_size, case.context),) if arguments.quick else PAIR_SIZES
    cases = [replace(case, batch_size=batch, context=context) for batch, context in sizes]
    # Each alone on the machine, before there are two.
    costs = {case.batch_size: calibration_row(case)[0] for case in reversed(cases)}
    seconds = _QUICK_SECONDS if arguments.quick else _SECONDS
    ways = (TWO_GPUS,) if torch.cuda.device_count() > 1 else (ONE_PROCESS, TWO_PROCESSES)
    for where in ways:
        with ModelPair(where, arguments.threads) as pair:
            for case in cases:
                cost = costs[case.batch_size]
                for row in pair_rows(case, cost, pair, arguments.rounds, seconds):
                    yield {**row, "where": where}


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__, rounds=3, scales=False)
    options.add_argument(
        "--shapes", nargs="+", choices=NUM_LAYERS, default=list(NUM_LAYERS), help="models"
    )
    options.add_argument(
        "--parts", nargs="+", choices=(RIVAL, PAIR), default=[RIVAL, PAIR], help="what to measure"
    )
    arguments = options.parse_args(argv)
    rows: list[Row] = []
    try:
        measure(arguments, rows)
    finally:
        _show(rows)
        finish(TOPIC, rows, checks, arguments)


def _show(rows: Sequence[Row]) -> None:
    print_table(
        "shares under load",
        ("load", "elastic", "best fixed", "ms a layer", "at the best"),
        [
            (name, elastic["share"], best["share"], elastic["ms_per_layer"], best["ms_per_layer"])
            for name, elastic, best in rivals(rows)
        ],
    )
    print_table(
        "two models at once",
        ("two models", *("frozen", "and", "ms", "elastic", "and", "ms", "best", "and", "ms")),
        [
            (name, *(cell for row in ways for cell in (*row["shares"], row["ms_per_layer"])))
            for name, *ways in pairs(rows)
        ],
    )


if __name__ == "__main__":
    run(main)
