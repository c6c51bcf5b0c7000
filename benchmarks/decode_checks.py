"""What the decode step is to reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.decode_ways import OFFLOADED, SPARSEKV
from benchmarks.results import Check, Row

_TARGET_SIZE = "16 x 32K"
_FRACTION = 0.90
_TIMES_OFFLOADED, _TIMES_OFFLOADED_MODEL = 15.0, 10.0
_EXTRA_US = 40.0
_SPREAD = 1.05


def checks(rows: Sequence[Row]) -> list[Check]:
    """Speed at 16 x 32K, the cost of a short step, the evenness of many; CUDA only.

    What was not measured is not checked.
    """
    rows = [row for row in rows if row["device"].startswith("cuda")]
    return [
        *_fractions(rows),
        *_against_offloaded(rows, "decode", "cache update and attention", _TIMES_OFFLOADED),
        *_against_offloaded(rows, "model", "whole layers", _TIMES_OFFLOADED_MODEL),
        *_short(rows),
        *_spreads(rows),
    ]


def best(rows: Sequence[Row], kind: str = "decode") -> Row | None:
    """The fastest row of the library; None without one."""
    ours = [row for row in rows if row["kind"] == kind and row["way"] == SPARSEKV]
    return min(ours, key=lambda row: row["ms_per_layer"], default=None)


def cases(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Shape and size, and the rows of that case, in the order in which they were measured."""
    for shape, size in dict.fromkeys((row["shape"], row["size"]) for row in rows):
        yield shape, size, [r for r in rows if (r["shape"], r["size"]) == (shape, size)]


def _fractions(rows: Sequence[Row]) -> Iterator[Check]:
    for shape, size, here in cases(rows):
        fastest = best(here)
        if size == _TARGET_SIZE and fastest is not None:
            yield Check(
                name=f"{shape}, {size}, share {fastest['share']:g}: fraction of reading and host "
                "to GPU together",
                value=fastest["fraction"],
                target=_FRACTION,
            )


def _against_offloaded(rows: Sequence[Row], kind: str, what: str, target: float) -> Iterator[Check]:
    for shape, size, here in cases(rows):
        fastest = best(here, kind)
        theirs = [r for r in here if r["kind"] == kind and r["way"] == OFFLOADED]
        if size == _TARGET_SIZE and fastest is not None and theirs:
            yield Check(
                name=f"{shape}, {size}, {what}: times transformers' offloaded cache",
                value=theirs[0]["ms_per_layer"] / fastest["ms_per_layer"],
                target=target,
            )


def _short(rows: Sequence[Row]) -> Iterator[Check]:
    for row in rows:
        if row["kind"] == "short" and "extra_us" in row:
            against = f", against {row['against']}" if "against" in row else ""
            yield Check(
                name=f"{row['shape']}, {row['size']}, all in the window{against}: extra us a layer",
                value=row["extra_us"],
                target=_EXTRA_US,
                lower_is_better=True,
            )


def _spreads(rows: Sequence[Row]) -> Iterator[Check]:
    for row in rows:
        where = f"{row['shape']}, {row['size']}, {row['layers']} layers"
        if row["kind"] == "steps":
            name, value = f"{where}, {row['num_steps']} steps: P99 / P50", row["p99_ms"]
        elif row["kind"] == "evicting":
            name, value = f"{where}: median evicting step / P50", row["evicting_ms"]
        else:
            continue
        yield Check(name=name, value=value / row["p50_ms"], target=_SPREAD, lower_is_better=True)
