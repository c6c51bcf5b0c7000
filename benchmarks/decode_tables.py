"""Markdown of decode steps and of routing in a prefill; see `tables`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.decode_checks import best, cases
from benchmarks.decode_ways import OFFLOADED
from benchmarks.results import Result, Row
from benchmarks.tables import checks, markdown, percent, provenance, rate

_OWN_RATES = {
    "kv_gbs": "keys and values, GB/s",
    "cpu_gbs": "CPU, GB/s",
    "h2d_gbs": "host to GPU, GB/s",
}
_RATES = _OWN_RATES | {"ceiling_gbs": "both ceilings together, GB/s"}
_EXPOSED = "exposed_cpu_ms"


def decode_attention(results: Sequence[Result]) -> str:
    """Every case over the share, then what was measured at one case only; targets."""
    parts = []
    for result in results:
        parts.append(provenance(result))
        for shape, size, rows in cases(result.rows):
            for table in (_sweep, _borrowing, _short, _steps, _evicting, _ablations, _model):
                parts += table(f"{shape}, {size}", rows)
        parts += _left_out(result.rows)
        parts.append(checks(result))
    return "\n\n".join(parts)


def decode_in_short(results: Sequence[Result]) -> str:
    """The best share of each case, beside the ceilings and transformers' offloaded cache."""
    lines = []
    for result in results:
        for shape, size, rows in cases(result.rows):
            fastest = best(rows)
            if fastest is None:
                continue
            theirs = [r for r in rows if r["kind"] == "decode" and r["way"] == OFFLOADED]
            lines.append(
                [
                    result.machine["name"],
                    f"{shape}, {size}",
                    f"{fastest['share']:g}",
                    _ms(fastest),
                    rate(fastest["kv_gbs"]),
                    _fraction(fastest),
                    _times(theirs[0], fastest) if theirs else "",
                ]
            )
    return markdown(
        [
            "machine",
            "model, batch x context",
            "CPU's share",
            "ms a layer",
            "keys and values, GB/s",
            "of both ceilings together",
            "times the offloaded cache",
        ],
        lines,
    )


def prefill_route(results: Sequence[Result]) -> str:
    """Milliseconds a layer of each way, and what it takes of the GPU's memory; targets."""
    parts = []
    for result in results:
        parts.append(provenance(result))
        for shape, size, rows in cases(result.rows):
            lines = [[row["way"], row["layers"], _ms(row), _gpu_memory(row)] for row in rows]
            columns = [f"{shape}, {size}", "layers", "ms a layer", "GPU memory at most, GB"]
            parts.append(markdown(columns, lines))
        parts.append(checks(result))
    return "\n\n".join(parts)


def _sweep(title: str, rows: Sequence[Row]) -> Iterator[str]:
    fastest = best(rows)
    swept = [row for row in rows if row["kind"] == "decode"]
    has_waits = any(_EXPOSED in row for row in swept)
    lines = []
    for row in swept:
        name = f"share {row['share']:g}" if "share" in row else row["way"]
        what = f"**{name}**" if row is fastest else name
        waits = [f"{row[_EXPOSED]:.2f}" if _EXPOSED in row else ""] if has_waits else []
        lines.append([what, row["layers"], _ms(row), *_rates(row, _RATES), _fraction(row), *waits])
    if lines:
        columns = [title, "layers", "ms a layer", *_RATES.values(), "fraction"]
        yield markdown([*columns, *(["waiting for the CPU, ms a layer"] * has_waits)], lines)
    if fastest is not None and "ceiling_h2d_gbs" in fastest:
        yield (
            f"Ceilings beside the fastest: reading {rate(fastest['ceiling_read_gbs'])} GB/s, host "
            f"to GPU {rate(fastest['ceiling_h2d_gbs'])}; together "
            f"{rate(fastest['ceiling_both_read_gbs'])} and "
            f"{rate(fastest['ceiling_both_h2d_gbs'])}."
        )


def _borrowing(title: str, rows: Sequence[Row]) -> Iterator[str]:
    """Beside the rows of the same shares without borrowing, where the sweep has them."""
    placed = {row["share"]: row for row in rows if row["kind"] == "decode" and "share" in row}
    borrowing = [row for row in rows if row["kind"] == "borrowing"]
    lines = []
    for row in borrowing:
        rates = [rate(row[key]) if key in row else "" for key in _RATES]
        same = placed.get(row["share"])
        beside = ["", ""] if same is None else [_ms(same), _fraction(same)]
        lines.append([f"share {row['share']:g}", _ms(row), *rates, _fraction(row), *beside])
    if lines:
        first = f"{title}, placed at {borrowing[0]['placed']:g}"
        columns = [first, "ms a layer", *_RATES.values(), "fraction"]
        yield markdown([*columns, "placed at that share, ms a layer", "fraction"], lines)


def _short(title: str, rows: Sequence[Row]) -> Iterator[str]:
    lines = [[r["way"], f"{r['us_per_layer']:.1f}"] for r in rows if r["kind"] == "short"]
    if lines:
        yield markdown([f"{title}, all in the window", "us a layer"], lines)


def _steps(title: str, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["kind"] == "steps":
            what = f"{title}, {row['layers']} layers, {row['num_steps']} steps"
            line = [f"share {row['share']:g}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}"]
            columns = [what, "P50, ms a step", "P99, ms a step"]
            alone = _machine_alone(row)
            yield markdown([*columns, *alone], [[*line, *alone.values()]])


def _evicting(title: str, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["kind"] == "evicting":
            columns = [f"{title}, {row['layers']} layers", "ms a step", "evicting, ms a step"]
            line = [f"share {row['share']:g}", f"{row['p50_ms']:.1f}", f"{row['evicting_ms']:.1f}"]
            yield markdown(columns, [line])


def _machine_alone(row: Row) -> dict[str, str]:
    """By column, where it was measured: how even the machine is with nothing of the product."""
    if "machine_samples" not in row:
        return {}
    p50, p99 = row["machine_p50_ms"], row["machine_p99_ms"]
    return {
        "machine alone: P50, ms": f"{p50:.2f}",
        "P99, ms": f"{p99:.2f}",
        "its P99 / P50": f"{p99 / p50:.2f}",
    }


def _ablations(title: str, rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for row in rows:
        if row["kind"] == "ablation":
            rates = _rates(row, _OWN_RATES)
            speed = f"{row['relative_speed']:.2f}"
            lines.append([row["way"], f"{row['share']:g}", _ms(row), *rates, speed])
    if lines:
        columns = [f"{title}, replaced", "share", "ms a layer", *_OWN_RATES.values()]
        yield markdown([*columns, "relative speed"], lines)


def _model(title: str, rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for row in rows:
        if row["kind"] == "model":
            way = f"{row['way']}, share {row['share']:g}" if "share" in row else row["way"]
            lines.append([way, row["layers"], _ms(row), *_rates(row, _OWN_RATES)])
    if lines:
        columns = [f"{title}, whole model", "layers", "ms a layer", *_OWN_RATES.values()]
        yield markdown(columns, lines)


def _rates(row: Row, names: Iterable[str]) -> list[str]:
    return [rate(row[name]) if name in row else "" for name in names]


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["kind"] == "left out":
            what = row.get("way", row.get("part"))
            share = f", share {row['share']:g}" if "share" in row else ""
            yield f"Left out: {row['shape']}, {row['size']}, {what}{share}: {row['reason']}"


def _gpu_memory(row: Row) -> str:
    return f"{row['gpu_bytes'] / 1e9:.2f}" if "gpu_bytes" in row else ""


def _ms(row: Row) -> str:
    return f"{row['ms_per_layer']:.2f}"


def _fraction(row: Row) -> str:
    return percent(row["fraction"]) if "fraction" in row else ""


def _times(theirs: Row, ours: Row) -> str:
    return f"{theirs['ms_per_layer'] / ours['ms_per_layer']:.1f}"
